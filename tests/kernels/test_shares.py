"""Shares of outputs and heads, and the cores of ranks: every output belongs to one rank, and every rank has some."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.kernels.numa import parse_cores, rank_cores, read_nodes
from quire.kernels.shares import max_ranks, share_heads, share_outputs

pytestmark = pytest.mark.core


@pytest.mark.parametrize("count", [16, 64, 97, 576, 1536, 49152])
def test_every_output_belongs_to_one_rank(count: int) -> None:
    for size in range(1, min(9, max_ranks(count)) + 1):
        shares = [share_outputs(count, rank, size) for rank in range(size)]
        assert [each for share in shares for each in share] == list(range(count))
        assert all(len(share) > 0 and share.start % 16 == 0 for share in shares)


@pytest.mark.parametrize(("heads", "keys"), [(9, 3), (4, 4), (8, 1), (14, 2), (32, 8)])
def test_every_query_head_belongs_to_one_rank_and_has_its_key_head_there(heads: int, keys: int) -> None:
    group = heads // keys
    for size in range(1, heads + 1):
        shares = [share_heads(heads, keys, rank, size) for rank in range(size)]
        assert [head for share in shares for head in share.queries] == list(range(heads))
        for share in shares:
            assert {head // group for head in share.queries} == set(share.keys)
            assert len(share.queries) % len(share.keys) == 0


def test_nodes_and_their_cores(tmp_path: Path) -> None:
    for name, cores in {"node0": "0-1,8\n", "node2": "2-3\n", "node10": "\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cores)
    nodes = read_nodes(tmp_path)
    assert nodes == [{0, 1, 8}, {2, 3}]
    assert [rank_cores(rank, 4, nodes, range(16)) for rank in range(4)] == [{0, 1, 8}, {0, 1, 8}, {2, 3}, {2, 3}]
    assert rank_cores(1, 2, nodes, {0, 2}) == {2}
    assert rank_cores(1, 2, nodes, {0, 1, 8}) is None
    assert read_nodes(tmp_path / "none") == []
    assert parse_cores("") == set()
