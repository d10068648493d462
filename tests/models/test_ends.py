"""A step of which only the rows' last tokens are wanted: its last layer leaves the others out, no more changes."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.paging import Ends, Paging
from tests.tools.paged import PagedCache
from tests.tools.tiny import FAMILIES, tiny_model

pytestmark = pytest.mark.cpu

STEPS = [[(0, 7), (1, 1), (2, 12)], [(2, 1), (0, 5), (3, 20)], [(0, 1), (1, 1), (2, 1), (3, 1)]]


@pytest.mark.parametrize("family", FAMILIES)
def test_ends_are_rows_of_the_whole(family: str) -> None:
    config = FAMILIES[family]
    model, caches = tiny_model(config), [layers_of(config) for _ in range(2)]
    generator = torch.Generator().manual_seed(3)
    for rows in STEPS:
        tokens = torch.randint(0, config.vocab_size, (sum(count for _, count in rows),), generator=generator)
        hidden = []
        for cache, only_ends in zip(caches, (False, True), strict=True):
            paging, positions = cache.step(rows), cache.positions(rows)
            ends = ends_of(paging) if only_ends else None
            hidden.append(model(tokens, positions, paging, cache.layers, ends))
        last = torch.tensor(paging.host_query_starts[1:]) - 1
        torch.testing.assert_close(hidden[1], hidden[0][last], rtol=1e-5, atol=1e-6)
    for whole, ended in zip(*(cache.layers for cache in caches), strict=True):
        torch.testing.assert_close(ended.k, whole.k, equal_nan=True)
        torch.testing.assert_close(ended.v, whole.v, equal_nan=True)


def ends_of(paging: Paging) -> Ends:
    """The same rows, each with its last token only."""
    num_rows = len(paging.host_seq_lens)
    starts, tokens = torch.arange(num_rows + 1, dtype=torch.int32), paging.query_starts[1:].long() - 1
    tables, lengths = paging.block_tables, paging.host_seq_lens
    return Ends(
        tokens, Paging(starts, paging.seq_lens, tables, [], paging.block_size, list(range(num_rows + 1)), lengths)
    )


def layers_of(config) -> PagedCache:
    return PagedCache(
        kv_heads=config.num_kv_heads, head_dim=config.head_dim, groups=range(config.num_layers), windows=config.windows
    )
