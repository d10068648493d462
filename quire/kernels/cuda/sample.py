"""A token for each row, drawn or the likeliest, straight from the head's products and without a word from the host.

The meaning is that of `pick` in the engine's sampler: temperature, min-p, top-k and top-p leave a part of the tokens,
and the draw for (seed, position) picks from it by its place in the cumulative distribution, in the order of ids. Where
a head caps its logits, tokens are ranked by its products. The GPU's runner is the caller.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.best import BestFinder
from quire.kernels.cuda.chain import after_last, chained, let_next
from quire.kernels.cuda.cut import (
    CUT,
    FLOOR,
    KEEP,
    NUM_COLUMNS,
    NUM_SETTINGS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WARPS,
    WIDTH,
    Cutter,
    is_counted,
    is_drawn,
    weigh,
)
from quire.kernels.cuda.philox import draw_uniform


class Draws(NamedTuple):
    """What the rows of a step want: one entry a row."""

    seeds: Tensor  # [rows] int64
    settings: Tensor  # [rows, 4] float64: temperature, top-k, top-p and min-p's floor, see `cut.py`
    has_top_k: bool  # some row
    has_top_p: bool


@triton.jit
def _pick(
    logits, tokens, scores, seeds, positions, settings, state, masses, ties, arrived, row_stride, size, softcap,
    WIDTH: tl.constexpr, LANES: tl.constexpr, CAPPED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next(CHAINED)
    after_last(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    num_tiles = tl.num_programs(1)
    wanted = settings + row * NUM_SETTINGS
    temperature = tl.load(wanted + TEMPERATURE).to(tl.float32)
    floor = tl.load(wanted + FLOOR).to(tl.float32)
    top = tl.load(scores + row)
    if not is_drawn(temperature, top):
        return
    has_cut = is_counted(tl.load(wanted + TOP_K), size) | (tl.load(wanted + TOP_P) < 1.0)
    cut = tl.where(has_cut, tl.load(state + row * NUM_COLUMNS + CUT).to(tl.float32), float("-inf"))
    keep = tl.where(has_cut, tl.load(state + row * NUM_COLUMNS + KEEP), size).to(tl.int32)

    within = tl.arange(0, WIDTH)
    columns = tile * WIDTH + within
    inside = columns < size
    value = tl.load(logits + row * row_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    weight = weigh(value, top, temperature, floor, softcap, CAPPED)
    at = row * num_tiles + tile
    tl.store(masses + at, tl.sum(tl.where(value > cut, weight, 0.0), axis=0))
    tl.store(ties + at, tl.sum((inside & (value == cut)).to(tl.int32), axis=0))
    tl.debug_barrier()
    before = tl.atomic_add(arrived + row, 1, sem="acq_rel")
    if before < num_tiles - 1:
        return

    tl.store(arrived + row, 0)
    lanes = tl.arange(0, LANES)
    at = row * num_tiles + lanes
    mass = tl.load(masses + at, mask=lanes < num_tiles, other=0.0, cache_modifier=".cg").to(tl.float64)
    tied = tl.load(ties + at, mask=lanes < num_tiles, other=0, cache_modifier=".cg")
    tied_before = tl.cumsum(tied, axis=0) - tied
    each = weigh(cut, top, temperature, floor, softcap, CAPPED).to(tl.float64)
    mass += tl.minimum(tl.maximum(keep - tied_before, 0), tied) * each
    ends = tl.cumsum(mass, axis=0)
    place = draw_uniform(tl.load(seeds + row), tl.load(positions + row).to(tl.int64)) * tl.max(ends, axis=0)
    last = tl.max(tl.where(mass > 0.0, lanes, 0), axis=0)
    tile = tl.minimum(tl.sum((ends <= place).to(tl.int32), axis=0), last)
    place = tl.maximum(place - tl.sum(tl.where(lanes < tile, mass, 0.0), axis=0), 0.0)
    tied_before = tl.sum(tl.where(lanes < tile, tied, 0), axis=0)

    columns = tile * WIDTH + within
    inside = columns < size
    value = tl.load(logits + row * row_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    is_tie = (inside & (value == cut)).to(tl.int32)
    kept = (value > cut) | ((is_tie > 0) & (tied_before + tl.cumsum(is_tie, axis=0) <= keep))
    weight = tl.where(kept, weigh(value, top, temperature, floor, softcap, CAPPED), 0.0)
    ends = tl.cumsum(weight.to(tl.float64), axis=0)
    last = tl.max(tl.where(weight > 0.0, within, 0), axis=0)
    found = tl.minimum(tl.sum((ends <= place).to(tl.int32), axis=0), last)
    tl.store(tokens + row, (tile * WIDTH + found).to(tl.int64))


class TokenSampler:
    """Chooses the tokens of up to so many rows of `size` logits; scores that are no numbers say where none is left."""

    def __init__(self, max_rows: int, size: int, softcap: float | None, device: torch.device) -> None:
        self._find_best = BestFinder(max_rows, device)
        self._cut = Cutter(max_rows, size, softcap, device)
        self._softcap = softcap
        num_parts = max_rows * self._cut.num_tiles
        self._masses = torch.empty(num_parts, dtype=torch.float32, device=device)
        self._ties = torch.empty(num_parts, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def __call__(self, logits: Tensor, draws: Draws, positions: Tensor, tokens: Tensor, scores: Tensor) -> None:
        """logits [n, vocab] before any cap, positions [n] -> tokens and scores, as many as there are draws.

        A position is the number of tokens before the one to be chosen, a score the largest logit.
        """
        logits = logits[: len(draws.seeds)]
        rows, size = logits.shape
        num_tiles = self._cut.num_tiles
        self._find_best(logits, tokens, scores)
        if draws.has_top_k:
            self._cut(logits, scores, draws.settings, by_mass=False)
        if draws.has_top_p:
            self._cut(logits, scores, draws.settings, by_mass=True)
        _pick[(rows, num_tiles)](
            logits, tokens, scores, draws.seeds, positions, draws.settings, self._cut.state, self._masses, self._ties,
            self._arrived, logits.stride(0), size, self._softcap or 0.0, WIDTH=WIDTH,
            LANES=triton.next_power_of_2(num_tiles), CAPPED=self._softcap is not None, num_warps=WARPS, **chained(),
        )  # fmt: skip
