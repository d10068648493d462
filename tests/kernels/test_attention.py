"""Paged attention, of the reference and of the CPU, against attention written one key at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.cpu import ops as cpu
from quire.kernels.paging import NO_TOKEN
from tests.kernels.naive import Query, attend, causal, tree
from tests.tools.paged import PagedCache
from tests.tools.trees import paths_of

pytestmark = pytest.mark.cpu

BACKENDS = pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SCALE = 0.3


class Rows:
    """Sequences with random q, k and v, stored step by step and attended to in the last one."""

    def __init__(
        self,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 8,
        dtype: torch.dtype = torch.float32,
        window: int | None = None,
        seed: int = 0,
    ) -> None:
        self.shape = (heads, kv_heads, dim)
        self.window, self.dtype = window, dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = PagedCache(kv_heads=kv_heads, head_dim=dim, dtype=dtype, windows=[window], seed=seed)
        self.k: dict[int, Tensor] = {}
        self.v: dict[int, Tensor] = {}

    def draw(self, count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, self.shape[2], generator=self.generator).to(self.dtype)

    def step(self, ops, rows: list[tuple[int, int]], paths: Tensor | None = None, **options) -> Tensor:
        """Store a step's keys and values, attend, and return (what came out, what should have)."""
        heads, kv_heads, _ = self.shape
        tokens = sum(count for _, count in rows)
        self.q, k, v = self.draw(tokens, heads), self.draw(tokens, kv_heads), self.draw(tokens, kv_heads)
        self.paging = self.cache.step(rows, paths)
        layer = self.cache.layers[0]
        ops.store_kv(k, v, layer, self.paging.slot_mapping[0])
        for store, new in ((self.k, k), (self.v, v)):
            for (sequence, _), part in zip(rows, new.split([count for _, count in rows]), strict=True):
                store[sequence] = torch.cat((store[sequence], part)) if sequence in store else part
        return ops.attention(self.q, layer, self.paging, scale=SCALE, window=self.window, **options)

    def expected(self, sequences: list[int], queries: list[list[Query]], **options) -> Tensor:
        out, token = [], 0
        for sequence, row in zip(sequences, queries, strict=True):
            for query in row:
                k, v = self.k[sequence], self.v[sequence]
                out.append(attend(self.q[token], k, v, query, scale=SCALE, window=self.window, **options))
                token += 1
        return torch.stack(out)


def check(ops, rows: Rows, steps: list[list[tuple[int, int]]], **options) -> None:
    done: dict[int, int] = {}
    for step in steps:
        out = rows.step(ops, step, **options)
        queries = [causal(done.get(sequence, 0), count) for sequence, count in step]
        expected = rows.expected([sequence for sequence, _ in step], queries, **options)
        assert out.dtype == rows.dtype
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[rows.dtype], rtol=0)
        for sequence, count in step:
            done[sequence] = done.get(sequence, 0) + count


MIXED = [[(0, 5), (1, 1)], [(1, 3), (2, 9), (0, 1)], [(0, 1), (1, 1), (2, 1)], [(2, 1), (1, 6), (0, 1)]]
EQUAL = [
    [(0, 6), (1, 6), (2, 7)],
    [(0, 1), (1, 1)],
    [(1, 1), (0, 1), (2, 1)],
    [(0, 1), (2, 3), (1, 1)],
    [(2, 0), (1, 1)],
]


@BACKENDS
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("steps", [MIXED, EQUAL], ids=["mixed", "equal"])
def test_mixed_rows(ops, dtype: torch.dtype, steps) -> None:
    check(ops, Rows(dtype=dtype), steps)


@BACKENDS
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (5, 1), (1, 1)])
@pytest.mark.parametrize("dim", [2, 16])
def test_head_groups(ops, heads: int, kv_heads: int, dim: int) -> None:
    check(ops, Rows(heads, kv_heads, dim), MIXED)


@BACKENDS
@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 100])
def test_window(ops, window: int) -> None:
    check(ops, Rows(window=window), [*MIXED, [(0, 1), (2, 11), (1, 2)]])
    check(ops, Rows(window=window), [*EQUAL, [(0, 1), (1, 1)]])


@BACKENDS
@pytest.mark.parametrize("window", [None, 3])
def test_alibi(ops, window: int | None) -> None:
    check(ops, Rows(window=window), MIXED, slopes=torch.tensor([0.5, 0.25, 0.1, 0.0]))


@BACKENDS
@pytest.mark.parametrize("window", [None, 3])
def test_softcap(ops, window: int | None) -> None:
    check(ops, Rows(window=window), MIXED, softcap=0.4)


PARENTS = [None, 0, 0, 1, 1, 2, 0]  # of tokens; token 0 is the root
NODES = [-1, -1, 0, 0, 1, -1]  # the same as `Drafts` has them


@BACKENDS
@pytest.mark.parametrize("window", [None, 1, 2, 4])
@pytest.mark.parametrize("slopes", [None, torch.tensor([0.5, 0.25, 0.1, 0.0])], ids=["plain", "alibi"])
@pytest.mark.parametrize("context", [0, 9])
def test_trees(ops, window: int | None, slopes: Tensor | None, context: int) -> None:
    """Beside a row of one token, a chain, and a tree that is a chain."""
    rows = Rows(window=window)
    rows.step(ops, [(0, context), (1, 2)] if context else [(1, 2)])
    queries = [tree(context, PARENTS), causal(2, 1), causal(0, 9), causal(0, 2)]
    paths = paths_of([7, 1, 9, 2], [NODES, None, None, [-1]])
    assert paths.shape == (19, 3)
    out = rows.step(ops, [(0, 7), (1, 1), (2, 9), (3, 2)], paths, slopes=slopes)
    torch.testing.assert_close(out.double(), rows.expected([0, 1, 2, 3], queries, slopes=slopes), atol=2e-6, rtol=0)


def test_paths() -> None:
    """The tree of docs/speculation.md, and a chain."""
    none = NO_TOKEN
    assert paths_of([5, 2], [[-1, 0, -1, 2], None]).tolist() == [
        [0, none, none], [0, 1, none], [0, 1, 2], [0, 3, none], [0, 3, 4], [none] * 3, [none] * 3,
    ]  # fmt: skip


def test_keys_of_another_dtype() -> None:
    rows = Rows(dtype=torch.bfloat16)
    rows.step(cpu, [(0, 5), (1, 5)])
    q = torch.randn(3, 4, 8)
    paging = rows.cache.step([(0, 1), (1, 2)])
    layer = rows.cache.layers[0]
    cpu.store_kv(torch.randn(3, 2, 8), torch.randn(3, 2, 8), layer, paging.slot_mapping[0])
    out = cpu.attention(q, layer, paging, scale=SCALE)
    torch.testing.assert_close(out, reference.attention(q, layer, paging, scale=SCALE), atol=1e-5, rtol=0)


def test_a_row_does_not_depend_on_the_others() -> None:
    """Bit for bit: alone, beside rows as long as it, and beside others."""
    rows = Rows(heads=6, kv_heads=2, dim=32)
    rows.step(cpu, [(0, 40), (1, 40), (2, 13), (3, 40)])
    step = [(0, 1), (1, 1), (2, 1), (3, 9)]
    together = rows.step(cpu, step)
    for index, (start, stop) in enumerate([(0, 1), (1, 2), (2, 3), (3, 12)]):
        alone = row_alone(rows.paging, index)
        out = cpu.attention(rows.q[start:stop], rows.cache.layers[0], alone, scale=SCALE)
        assert torch.equal(out, together[start:stop])


def row_alone(paging: reference.Paging, row: int) -> reference.Paging:
    start, stop = paging.host_query_starts[row : row + 2]
    return reference.Paging(
        query_starts=torch.tensor([0, stop - start]),
        seq_lens=paging.seq_lens[row : row + 1],
        block_tables=[table[row : row + 1] for table in paging.block_tables],
        slot_mapping=[slots[start:stop] for slots in paging.slot_mapping],
        block_size=paging.block_size,
        host_query_starts=[0, stop - start],
        host_seq_lens=paging.host_seq_lens[row : row + 1],
    )
