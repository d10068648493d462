"""Attention on the GPU, for any mix of rows: single queries go one way, tiles of queries another, long prompts a third.

What depends only on the step's shape is worked out once, by the first layer, and kept in the Paging. With `exact` the
ways give the same bits: single queries take the same keys at a time as tiles do, and nothing goes to cuDNN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.cuda.decode import NEW_ROWS, New, decode_attention, suits
from quire.kernels.cuda.prefill import TILE_QUERIES, Tiles, key_tile, prefill_attention
from quire.kernels.cuda.prompts import PromptRows, attend_prompts, find_prompts, has_parts, part
from quire.kernels.cuda.rotary import rope_store
from quire.kernels.cuda.scoring import Scoring
from quire.kernels.cuda.single import attend_singly
from quire.kernels.paging import LayerCache, Paging


@dataclass(slots=True)
class Work:
    """A step's rows by how they are computed."""

    all_single: bool
    singles: Tensor | None  # [n] int32, rows of one query, where not all are
    tiles: Tiles | None
    prompts: list[PromptRows]  # rows that are long enough for cuDNN


class Reach(NamedTuple):
    """What of a step cuDNN may be given: whole prompts, and prompts that have a context."""

    prompts: bool
    with_context: bool


NOTHING = Reach(False, False)


def plan_work(paging: Paging, device: torch.device, reach: Reach) -> Work:
    counts = [stop - start for start, stop in pairwise(paging.host_query_starts)]
    if paging.ancestors is None and all(count == 1 for count in counts):
        return Work(True, None, None, [])
    prompts: list[PromptRows] = []
    if reach.prompts and paging.ancestors is None:
        prompts = find_prompts(paging, counts, with_context=reach.with_context)
    done = {row: rows.length for rows in prompts for row in rows.rows}
    singles, tiles = cut(counts, done, trees=paging.ancestors is not None)
    return Work(False, _column(singles, device), _tiles(tiles, device), prompts)


def cut(counts: Sequence[int], done: Mapping[int, int], *, trees: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """Rows of one query, and tiles of the others: (row, first query). `done` says how many of a row's need nothing."""
    singles = [] if trees else [row for row, count in enumerate(counts) if count == 1]
    tiles = [
        (row, first)
        for row, count in enumerate(counts)
        if trees or count != 1
        for first in range(done.get(row, 0), count, TILE_QUERIES)
    ]
    return singles, tiles


def _column(numbers: Sequence[int], device: torch.device) -> Tensor | None:
    if not numbers:
        return None
    return torch.tensor(numbers, dtype=torch.int32).to(device, non_blocking=True)


def _tiles(tiles: Sequence[tuple[int, int]], device: torch.device) -> Tiles | None:
    numbers = _column(Tiles.flatten(tiles) if tiles else [], device)
    return None if numbers is None else Tiles(numbers)


def attention(
    q: Tensor,
    cache: LayerCache,
    paging: Paging,
    *,
    scale: float,
    window: int | None = None,
    slopes: Tensor | None = None,
    softcap: float | None = None,
    own: tuple[Tensor, Tensor] | None = None,
    exact: bool = False,
) -> Tensor:
    """As in the reference."""
    scoring = Scoring(scale, window, slopes, softcap)
    work = find_work(paging, q.device, NOTHING if own is None or exact else find_reach(q, cache, scoring))
    attend = decode_attention
    if exact or not suits(q, cache.k.shape[1]):
        attend = partial(attend_singly, exact_tile=key_tile(q.shape[-1], q.dtype) if exact else None)
    if len(work.prompts) == 1 and work.prompts[0].num_tokens == q.shape[0]:
        assert own is not None
        return attend_prompts(q, *own, work.prompts[0], cache, paging, scale).reshape(q.shape)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tables = paging.block_tables[cache.group]
    if work.all_single:
        attend(q, cache, tables, paging.seq_lens, out, scoring)
        return out
    for rows in work.prompts:
        assert own is not None
        part(out, rows).copy_(attend_prompts(q, *own, rows, cache, paging, scale))
    if work.singles is not None:
        attend(q, cache, tables, paging.seq_lens, out, scoring, rows=work.singles, starts=paging.query_starts)
    if work.tiles is not None:
        prefill_attention(q, cache, paging, work.tiles, out, scoring, exact=exact)
    return out


def turn_and_attend(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, angles: Tensor, interleaved: bool, cache: LayerCache,
    paging: Paging, *, scale: float, window: int | None = None, softcap: float | None = None, exact: bool = False,
) -> Tensor:  # fmt: skip
    """`rope`, `store_kv` and `attention` of the reference; q and k may be turned where they are."""
    scoring = Scoring(scale, window, None, softcap)
    is_few = not exact and q.shape[0] <= NEW_ROWS and suits(q, cache.k.shape[1])
    if is_few and find_work(paging, q.device, find_reach(q, cache, scoring)).all_single:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        new = New(k, v, angles, interleaved)
        decode_attention(q, cache, paging.block_tables[cache.group], paging.seq_lens, out, scoring, new=new)
        return out
    rope_store(q, k, v, positions, angles, interleaved, cache, paging.slots[cache.group])
    return attention(q, cache, paging, scale=scale, window=window, softcap=softcap, own=(k, v), exact=exact)


def find_reach(q: Tensor, cache: LayerCache, scoring: Scoring) -> Reach:
    if not scoring.is_plain or q.dtype == torch.float32:
        return NOTHING
    return Reach(True, has_parts(q.shape[1], cache.k.shape[1], q.shape[2], q.dtype, q.device))


def find_work(paging: Paging, device: torch.device, reach: Reach) -> Work:
    """This step's, worked out by the first layer of its kind. A captured step comes with its own."""
    if isinstance(paging.work, Work):
        return paging.work
    if paging.work is None:
        paging.work = {}
    if reach not in paging.work:
        paging.work[reach] = plan_work(paging, device, reach)
    work: Work = paging.work[reach]
    return work
