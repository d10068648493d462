"""Attention on the GPU, for any mix of rows.

If no row of a few queries has more than one, these are computed by `decode.py` (or `single_query.py`, where
`decode.suits` is False), otherwise by `verify.py`. Rows of more queries are computed by `varlen.py` on Hopper and by
`prefill.py` elsewhere. What depends only on the step's rows is computed once, by the first layer, and stored in
`Paging.work`. With `exact` all kernels give the same bits: single queries use the same tiles of keys as prefill, and
so do the nodes of trees, each as a single query.
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

from quire.kernels.cuda.attention import decode, latent, varlen_items, verify
from quire.kernels.cuda.attention.decode import NEW_ROWS, New, decode_attention
from quire.kernels.cuda.attention.latent import latent_attention
from quire.kernels.cuda.attention.prefill import TILE_QUERIES, Tiles, key_tile, prefill_attention
from quire.kernels.cuda.attention.scoring import Scoring
from quire.kernels.cuda.attention.single_query import single_query_attention
from quire.kernels.cuda.attention.split_kv import FIELDS, max_splits, split_contexts
from quire.kernels.cuda.attention.verify import MAX_NODES, MAX_QUERIES, path_masks, verify_attention
from quire.kernels.cuda.rope import rope_store
from quire.kernels.paging import LayerCache, Paging


@dataclass(slots=True)
class Work:
    """The work lists of a step. A captured step comes with all of them; other steps make them on first use.

    Layers with different windows see different keys, so lists are stored by window.
    """

    has_singles: bool  # rows of one query, or of at most max_queries
    has_others: bool
    splits: dict[int | None, Tensor] = field(default_factory=dict)  # of these rows: `split_kv.split_contexts`
    items: dict[int | None, Tensor] = field(default_factory=dict)  # of the others: `varlen_items.plan_items`
    tiles: Tiles | None = None  # of the others, for `prefill`
    max_queries: int = 1  # more than 1: `verify` computes the rows in `splits`
    masks: Tensor | None = None  # of trees: `verify.path_masks`


def find_work(paging: Paging, group: int, *, has_varlen: bool, exact: bool) -> Work:
    """The step's Work. The first layer makes it. `has_varlen`: whether `varlen` supports this step's chains."""
    if paging.work is None:
        counts = count_queries(paging)
        few = [count for count in counts if 0 < count <= find_limit(paging, exact=exact)]
        max_queries = verify.round_queries(max(few, default=1))
        if has_varlen and paging.paths is None and not verify.is_fastest(max_queries, group, sum(counts)):
            few, max_queries = [count for count in few if count == 1], 1
        paging.work = Work(bool(few), len(few) < len(counts), max_queries=max_queries)
    work: Work = paging.work
    if work.masks is None and work.max_queries > 1 and paging.paths is not None and not exact:
        work.masks = path_masks(paging.paths)
    return work


def find_limit(paging: Paging, *, exact: bool) -> int:
    """The most queries of a row that `prefill` and `varlen` leave to the other kernels."""
    if paging.paths is not None:
        return MAX_NODES
    return 1 if exact else MAX_QUERIES


def find_splits(
    work: Work, paging: Paging, window: int | None, group: int, kv_heads: int, *, exact: bool, latents: bool = False
) -> Tensor:
    if window not in work.splits:
        counts = np.array(count_queries(paging))
        rows = np.flatnonzero((counts > 0) & (counts <= work.max_queries))
        tokens, ends = (np.array(numbers)[rows] for numbers in (paging.host_query_starts, paging.host_seq_lens))
        if exact and work.max_queries > 1:
            splits = list_tokens(rows, tokens, counts[rows])
        else:
            num_tokens = paging.host_query_starts[-1]
            units = num_units(work.max_queries, group, kv_heads, num_tokens, exact=exact, latents=latents)
            splits = split_rows(rows, tokens, counts[rows], ends, window, units, exact=exact)
        work.splits[window] = send(splits, paging.seq_lens.device)
    return work.splits[window]


def num_units(max_queries: int, group: int, kv_heads: int, num_tokens: int, *, exact: bool, latents: bool) -> int:
    """Programs of a split, for rows of up to `max_queries` queries."""
    if latents:
        return latent.num_units(group, max_queries, exact=exact)
    return kv_heads if max_queries == 1 else verify.num_units(max_queries, group, kv_heads, num_tokens)


def find_items(work: Work, paging: Paging, window: int | None, q: Tensor, cache: LayerCache) -> Tensor:
    if window not in work.items:
        kv_heads, page = cache.k.shape[1:3]
        counts, group = count_queries(paging), q.shape[1] // kv_heads
        items = cut_items(counts, paging.host_seq_lens, group, kv_heads, page, window, work.max_queries)
        work.items[window] = send(items, q.device)
    return work.items[window]


def find_tiles(work: Work, paging: Paging) -> Tiles:
    if work.tiles is None:
        tiles = cut_tiles(count_queries(paging), work.max_queries)
        work.tiles = Tiles(send(Tiles.flatten(tiles), paging.seq_lens.device))
    return work.tiles


def count_queries(paging: Paging) -> list[int]:
    return [stop - start for start, stop in pairwise(paging.host_query_starts)]


def split_rows(
    rows: NDArray[np.int64],
    tokens: NDArray[np.int64],
    counts: NDArray[np.int64] | int,
    ends: NDArray[np.int64],
    window: int | None,
    units: int,
    *,
    exact: bool,
) -> NDArray[np.int32]:
    """The splits of rows of a few queries, [n, FIELDS]. tokens: the rows' first tokens in the step; counts: their
    queries; ends: their context lengths; units: programs a split. With `exact` no row is cut."""
    firsts = np.zeros_like(ends) if window is None else np.maximum(ends - counts - window + 1, 0)
    splits = split_contexts(firsts, ends, units, len(rows) if exact else max_splits(len(rows), units))
    splits[:, 7] = tokens[splits[:, 0]]
    splits[:, 0] = rows[splits[:, 0]]
    return splits


def list_tokens(rows: NDArray[np.int64], tokens: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Each token of the rows as an entry of its own, [n, FIELDS]: for `single_query` with trees."""
    splits = np.zeros((int(counts.sum()), FIELDS), np.int32)
    splits[:, 0] = np.repeat(rows, counts)
    splits[:, 5] = 1
    before = np.cumsum(counts) - counts
    splits[:, 7] = np.repeat(tokens - before, counts) + np.arange(len(splits))
    return splits


def cut_items(
    counts: Sequence[int], seq_lens: Any, group: int, kv_heads: int, page: int, window: int | None, max_few: int = 1
) -> NDArray[np.int32]:
    """The items of the rows of more than `max_few` queries: see `varlen_items.plan_items`."""
    several = np.array(counts)
    several[several <= max_few] = 0
    return varlen_items.plan_items(several, np.array(seq_lens), group, kv_heads, page, window)


def cut_tiles(counts: Sequence[int], max_few: int = 1) -> list[tuple[int, int]]:
    """Tiles of rows that have more than `max_few` queries: (row, first query)."""
    return [
        (row, first) for row, count in enumerate(counts) if count > max_few for first in range(0, count, TILE_QUERIES)
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
    sinks: Tensor | None = None,
    exact: bool = False,
) -> Tensor:
    """As in the reference."""
    scoring, kv_heads = Scoring(scale, window, slopes, softcap, sinks), cache.k.shape[1]
    if is_latent(cache):
        assert scoring == Scoring(scale, None, None, None), "latents have no options"
        return attend_to_latents(q, cache, paging, scale, exact=exact)
    has_varlen = not exact and varlen_items.suits(q.dtype, cache, is_plain=scoring.is_plain)
    work = find_work(paging, q.shape[1] // kv_heads, has_varlen=has_varlen, exact=exact)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)

    def attend_singles() -> None:
        attend: Callable[..., None] = decode_attention
        if exact:
            attend = partial(single_query_attention, exact_tile=key_tile(q.shape[-1], q.dtype))
        elif work.max_queries > 1:
            attend = partial(verify_attention, max_queries=work.max_queries, masks=work.masks)
        elif not decode.suits(q, kv_heads):
            attend = single_query_attention
        splits = find_splits(work, paging, window, q.shape[1] // kv_heads, kv_heads, exact=exact)
        attend(q, cache, paging, splits, out, scoring)

    def attend_others() -> None:
        if has_varlen:
            from quire.kernels.cuda.attention.varlen import varlen_attention  # needs Hopper

            varlen_attention(q, cache, paging, find_items(work, paging, window, q, cache), out, scoring)
        else:
            prefill_attention(q, cache, paging, find_tiles(work, paging), out, scoring, exact=exact)

    run_work(work, attend_singles, attend_others)
    return out


def run_work(work: Work, attend_singles: Callable[[], None], attend_others: Callable[[], None]) -> None:
    if work.has_singles and work.has_others:
        run_both(on_side=attend_singles, on_main=attend_others)
    elif work.has_singles:
        attend_singles()
    elif work.has_others:
        attend_others()


def is_latent(cache: LayerCache) -> bool:
    """Whether values are the first numbers of the keys."""
    return bool(cache.v.shape[-1] != cache.k.shape[-1])


def attend_to_latents(q: Tensor, cache: LayerCache, paging: Paging, scale: float, *, exact: bool) -> Tensor:
    heads = q.shape[1]
    work = find_work(paging, heads, has_varlen=False, exact=exact)
    out = torch.empty(*q.shape[:2], cache.v.shape[-1], dtype=q.dtype, device=q.device)
    attend = partial(latent_attention, q, cache, paging, out, scale, exact=exact)

    def attend_singles() -> None:
        splits = find_splits(work, paging, None, heads, 1, exact=exact, latents=True)
        if exact:
            attend(splits=splits, paths=paging.paths)
        else:
            attend(splits=splits, max_queries=work.max_queries, masks=work.masks)

    run_work(work, attend_singles, lambda: attend(tiles=find_tiles(work, paging)))
    return out


def is_decode(paging: Paging) -> bool:
    """Whether all rows have one query."""
    work: Work | None = paging.work
    if work is None:
        return paging.max_query_len == 1
    return not work.has_others and work.max_queries == 1


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
    paging: Paging, *, scale: float, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, exact: bool = False,
) -> Tensor:  # fmt: skip
    """`rope`, `store_kv` and `attention` of the reference; q and k may be rotated in place."""
    kv_heads, scoring = cache.k.shape[1], Scoring(scale, window, None, softcap, sinks)
    if not exact and q.shape[0] <= NEW_ROWS and decode.suits(q, kv_heads) and is_decode(paging):
        out, new = torch.empty(q.shape, dtype=q.dtype, device=q.device), New(k, v, angles, interleaved)
        work = find_work(paging, q.shape[1] // kv_heads, has_varlen=False, exact=False)
        splits = find_splits(work, paging, window, q.shape[1] // kv_heads, kv_heads, exact=False)
        decode_attention(q, cache, paging, splits, out, scoring, new=new)
        return out
    rope_store(q, k, v, positions, angles, interleaved, cache, paging.slot_mapping[cache.group])
    return attention(q, cache, paging, scale=scale, window=window, softcap=softcap, sinks=sinks, exact=exact)
