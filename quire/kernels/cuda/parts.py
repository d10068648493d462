"""Contexts that several programs share: each leaves its part in a workspace, and the last to do so joins them, in their
order. The sum does not depend on who was last."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 132 * 4  # with one query each: enough to keep an H200's multiprocessors reading
MAX_SPLITS = 32


@triton.jit
def stretch(seq_len, first, splits, nth, TILE: tl.constexpr):
    """What the nth of `splits` programs takes of a context that is seen from `first` on: where it begins, how long it
    is, and how many programs take part; a short context has no part for every one."""
    tiles = tl.cdiv(seq_len, TILE) - first // TILE
    own = tl.maximum(tl.cdiv(tiles, splits), 1)
    used = tl.maximum(tl.cdiv(tiles, own), 1)
    return (first // TILE + nth * own) * TILE, own * TILE, used


@triton.jit
def leave_part(
    parts, tops, arrived, pair, nth, room, count, top, mass, total, lanes, columns, is_query, inside,
    QUERIES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Leave what the nth program of a pair has found; whether it was the last of `count` to do so. There is room for
    more, so that every pair's parts lie at a fixed place."""
    mine = (pair * room + nth) * QUERIES + lanes
    tl.store(parts + mine[:, None] * WIDTH + columns[None, :], total, mask=inside)
    tl.store(tops + mine * 2, top, mask=is_query)
    tl.store(tops + mine * 2 + 1, mass, mask=is_query)
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived + pair, 1, sem="acq_rel") == count - 1
    if is_last:
        tl.store(arrived + pair, 0)
    return is_last


@triton.jit
def join_parts(
    parts, tops, first_part, count, columns, is_query, inside, QUERIES: tl.constexpr, WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """What several programs have found for the same queries, in their order: sums of weights and weighted values.

    AT_ONCE parts are on their way together.
    """
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, WIDTH], tl.float32)
    for first in range(0, count, AT_ONCE):
        for nth in tl.static_range(AT_ONCE):
            is_there = first + nth < count
            its = first_part + (first + nth) * QUERIES
            wanted = is_query & is_there
            its_top = tl.load(tops + its * 2, mask=wanted, other=float("-inf"), cache_modifier=".cg")
            its_mass = tl.load(tops + its * 2 + 1, mask=wanted, other=0.0, cache_modifier=".cg")
            at = parts + its[:, None] * WIDTH + columns[None, :]
            part = tl.load(at, mask=inside & is_there, other=0.0, cache_modifier=".cg")
            higher = tl.maximum(top, its_top)
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            fading, factor = tl.exp2(top - safe), tl.exp2(its_top - safe)
            mass = mass * fading + its_mass * factor
            total = total * fading[:, None] + part * factor[:, None]
            top = higher
    return mass, total


def choose_splits(num_rows: int, kv_heads: int) -> int:
    """How many programs share a context, where each row has one query: fixed for a number of rows, since a captured
    graph cannot change it. Where there are several, they are PROGRAMS or fewer in all."""
    return max(1, min(MAX_SPLITS, PROGRAMS // max(1, num_rows * kv_heads)))


@cache
def workspace(programs: int, queries: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the parts of so many programs, shared by all layers and steps, and how many have arrived of each pair.

    It never grows or moves: graphs point to it.
    """
    parts = torch.empty(programs * queries * width, dtype=torch.float32, device=device)
    tops = torch.empty(programs * queries * 2, dtype=torch.float32, device=device)
    return parts, tops, torch.zeros(programs, dtype=torch.int32, device=device)
