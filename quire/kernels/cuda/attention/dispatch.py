"""Attention on the GPU, for any mix of rows.

Rows of one query are computed by `decode.py` (or `single_query.py`, where `decode.suits` is False). Rows of several
queries are computed by `varlen.py` on Hopper and by `prefill.py` elsewhere. What depends only on the step's rows is
computed once, by the first layer, and stored in `Paging.work`. With `exact` all kernels give the same bits: single
queries use the same tiles of keys as prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.cuda.attention import decode, varlen_items
from quire.kernels.cuda.attention.decode import NEW_ROWS, New, decode_attention
from quire.kernels.cuda.attention.prefill import TILE_QUERIES, Tiles, key_tile, prefill_attention
from quire.kernels.cuda.attention.scoring import Scoring
from quire.kernels.cuda.attention.single_query import single_query_attention
from quire.kernels.cuda.attention.split_kv import max_splits, split_contexts
from quire.kernels.cuda.rope import rope_store
from quire.kernels.paging import LayerCache, Paging


@dataclass(slots=True)
class Work:
    """The work lists of a step. A captured step comes with all of them; other steps make them on first use.

    Layers with different windows see different keys, so lists are stored by window.
    """

    has_singles: bool  # rows of one query
    has_others: bool
    splits: dict[int | None, Tensor] = field(default_factory=dict)  # of single queries: `split_kv.split_contexts`
    items: dict[int | None, Tensor] = field(default_factory=dict)  # of the others: `varlen_items.plan_items`
    tiles: Tiles | None = None  # of the others, for `prefill`
    mask: Tensor | None = None  # of the step, for `prefill`, if a row has a draft tree: `mask_tokens`


def find_work(paging: Paging) -> Work:
    """The step's Work. The first layer makes it."""
    if paging.work is None:
        counts = count_queries(paging)
        trees = paging.paths is not None
        paging.work = Work(not trees and 1 in counts, trees or any(count != 1 for count in counts))
    work: Work = paging.work
    return work


def find_splits(work: Work, paging: Paging, window: int | None, kv_heads: int, *, exact: bool) -> Tensor:
    if window not in work.splits:
        rows = np.flatnonzero(np.array(count_queries(paging)) == 1)
        tokens, ends = (np.array(numbers)[rows] for numbers in (paging.host_query_starts, paging.host_seq_lens))
        splits = split_rows(rows, tokens, ends, window, kv_heads, exact=exact)
        work.splits[window] = send(splits, paging.seq_lens.device)
    return work.splits[window]


def find_items(work: Work, paging: Paging, window: int | None, q: Tensor, cache: LayerCache) -> Tensor:
    if window not in work.items:
        kv_heads, page = cache.k.shape[1:3]
        items = cut_items(count_queries(paging), paging.host_seq_lens, q.shape[1] // kv_heads, kv_heads, page, window)
        work.items[window] = send(items, q.device)
    return work.items[window]


def find_tiles(work: Work, paging: Paging) -> Tiles:
    if work.tiles is None:
        tiles = cut_tiles(count_queries(paging), trees=paging.paths is not None)
        work.tiles = Tiles(send(Tiles.flatten(tiles), paging.seq_lens.device))
    return work.tiles


def find_mask(work: Work, paging: Paging) -> Tensor | None:
    if work.mask is None and paging.paths is not None:
        work.mask = mask_tokens(paging)
    return work.mask


def mask_tokens(paging: Paging) -> Tensor:
    """Which tokens of its row a token sees, [tokens, max_query] uint8: those of its path or, in a chain, those up to
    itself."""
    paths, width = paging.paths, paging.max_query_len
    assert paths is not None
    nth = send(np.concatenate([np.arange(count) for count in count_queries(paging)]), paths.device)
    in_chain = torch.arange(width, device=paths.device) <= nth[:, None]
    in_tree = torch.zeros(len(paths), width + 1, dtype=torch.bool, device=paths.device)
    in_tree.scatter_(1, torch.where(paths < 0, width, paths).long(), True)  # the last column takes what is no token
    return torch.where(paths[:, :1] < 0, in_chain, in_tree[:, :width]).to(torch.uint8)


def count_queries(paging: Paging) -> list[int]:
    return [stop - start for start, stop in pairwise(paging.host_query_starts)]


def split_rows(
    rows: NDArray[np.int64],
    tokens: NDArray[np.int64],
    ends: NDArray[np.int64],
    window: int | None,
    kv_heads: int,
    *,
    exact: bool,
) -> NDArray[np.int32]:
    """The splits of rows of one query, [n, FIELDS]. tokens: the rows' tokens in the step; ends: their context lengths.
    With `exact` no row is cut."""
    firsts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    splits = split_contexts(firsts, ends, kv_heads, len(rows) if exact else max_splits(len(rows), kv_heads))
    splits[:, 7] = tokens[splits[:, 0]]
    splits[:, 0] = rows[splits[:, 0]]
    return splits


def cut_items(
    counts: Sequence[int], seq_lens: Any, group: int, kv_heads: int, page: int, window: int | None
) -> NDArray[np.int32]:
    """The items of the rows of several queries: see `varlen_items.plan_items`."""
    several = np.array(counts)
    several[several == 1] = 0
    return varlen_items.plan_items(several, np.array(seq_lens), group, kv_heads, page, window)


def cut_tiles(counts: Sequence[int], *, trees: bool = False) -> list[tuple[int, int]]:
    """Tiles of rows that have several queries, or are trees: (row, first query)."""
    return [
        (row, first)
        for row, count in enumerate(counts)
        if trees or count != 1
        for first in range(0, count, TILE_QUERIES)
    ]


def send(numbers: Sequence[int] | NDArray[np.int32], device: torch.device) -> Tensor:
    return torch.from_numpy(np.asarray(numbers, np.int32)).to(device, non_blocking=True)


def attention(
    q: Tensor,
    cache: LayerCache,
    paging: Paging,
    *,
    scale: float,
    window: int | None = None,
    slopes: Tensor | None = None,
    softcap: float | None = None,
    exact: bool = False,
) -> Tensor:
    """As in the reference."""
    scoring, kv_heads = Scoring(scale, window, slopes, softcap), cache.k.shape[1]
    work = find_work(paging)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)

    def attend_singles() -> None:
        attend = decode_attention
        if exact or not decode.suits(q, kv_heads):
            attend = partial(single_query_attention, exact_tile=key_tile(q.shape[-1], q.dtype) if exact else None)
        attend(q, cache, paging, find_splits(work, paging, window, kv_heads, exact=exact), out, scoring)

    def attend_others() -> None:
        if not exact and paging.paths is None and varlen_items.suits(q.dtype, cache, scoring):
            from quire.kernels.cuda.attention.varlen import varlen_attention  # needs Hopper

            varlen_attention(q, cache, paging, find_items(work, paging, window, q, cache), out, scoring)
        else:
            mask = find_mask(work, paging)
            prefill_attention(q, cache, paging, find_tiles(work, paging), out, scoring, mask=mask, exact=exact)

    if work.has_singles and work.has_others:
        run_both(on_side=attend_singles, on_main=attend_others)
    elif work.has_singles:
        attend_singles()
    elif work.has_others:
        attend_others()
    return out


def run_both(on_side: Callable[[], None], on_main: Callable[[], None]) -> None:
    """Run both on two streams, so that they overlap. Kernels launched later wait for both.

    A process has one engine on a GPU, so one side stream and one set of workspaces are enough.
    """
    main = torch.cuda.current_stream()
    side = side_stream(main.device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        on_side()
    on_main()
    main.wait_stream(side)


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def rope_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, angles: Tensor, interleaved: bool, cache: LayerCache,
    paging: Paging, *, scale: float, window: int | None = None, softcap: float | None = None, exact: bool = False,
) -> Tensor:  # fmt: skip
    """`rope`, `store_kv` and `attention` of the reference; q and k may be rotated in place."""
    kv_heads, work = cache.k.shape[1], find_work(paging)
    if not exact and not work.has_others and q.shape[0] <= NEW_ROWS and decode.suits(q, kv_heads):
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        splits = find_splits(work, paging, window, kv_heads, exact=False)
        scoring, new = Scoring(scale, window, None, softcap), New(k, v, angles, interleaved)
        decode_attention(q, cache, paging, splits, out, scoring, new=new)
        return out
    rope_store(q, k, v, positions, angles, interleaved, cache, paging.slot_mapping[cache.group])
    return attention(q, cache, paging, scale=scale, window=window, softcap=softcap, exact=exact)
