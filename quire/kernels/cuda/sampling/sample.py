"""Samples a token for each row from the head's products, without the host.

The rule is that of `quire.kernels.sampling`: min-p, top-k and top-p select ids, and the token is the one whose
logit / temperature + noise is largest. If the head has a soft cap, top-k and top-p rank tokens by the products. The
GPU's runner calls it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous
from quire.kernels.cuda.sampling.argmax import Argmax
from quire.kernels.cuda.sampling.gumbel import gumbel
from quire.kernels.cuda.sampling.top_k_top_p import (
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
    TopKTopP,
    has_top_k,
    is_drawn,
    scale,
)


class SamplingInputs(NamedTuple):
    """What a step's rows are sampled with: each row's entry in the sampling state, its length, and the state."""

    entries: Tensor  # [rows] int32
    lengths: Tensor  # [rows] int32: tokens before the one to be chosen
    seeds: Tensor  # [entries] int64
    settings: Tensor  # [entries, NUM_SETTINGS] float64, see `quire.kernels.sampling`
    last_tokens: Tensor  # [entries] int64: the chosen token is also stored here
    has_top_k: bool  # of at least one row
    has_top_p: bool


@triton.jit
def noisy_score(
    value, seed, length, tile, top, temperature, floor, softcap, WIDTH: tl.constexpr, CAPPED: tl.constexpr
):  # fmt: skip
    """The scores of a tile's ids: scaled logit plus noise; minus infinity below min-p's floor."""
    return scale(value, top, temperature, floor, softcap, CAPPED) + gumbel(seed, length, tile, WIDTH)


@triton.jit
def _best_of(scores, columns, size):
    """The largest score and its id; of equals the lowest id."""
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, columns, size), axis=0)


@triton.jit
def _pick(
    logits, tokens, max_logits, entries, lengths, seeds, settings, last_tokens, cuts, bests, ids, ties, arrived,
    row_stride, size, softcap,
    WIDTH: tl.constexpr, LANES: tl.constexpr, CAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    num_tiles = tl.num_programs(1)
    entry = tl.load(entries + row)
    row_settings = settings + entry * NUM_SETTINGS
    temperature = tl.load(row_settings + TEMPERATURE).to(tl.float32)
    floor = tl.load(row_settings + FLOOR).to(tl.float32)
    top = tl.load(max_logits + row)
    if not is_drawn(temperature, top):
        return
    has_cut = has_top_k(tl.load(row_settings + TOP_K), size) | (tl.load(row_settings + TOP_P) < 1.0)
    cut = tl.where(has_cut, tl.load(cuts + row * NUM_COLUMNS + CUT).to(tl.float32), float("-inf"))
    keep = tl.where(has_cut, tl.load(cuts + row * NUM_COLUMNS + KEEP), 0).to(tl.int32)
    seed, length = tl.load(seeds + entry), tl.load(lengths + row).to(tl.int64)

    # Each tile stores its best id above the cutoff and its best id at the cutoff. The number of ids kept at the cutoff
    # depends on the tiles before it.
    within = tl.arange(0, WIDTH)
    columns = tile * WIDTH + within
    value = tl.load(logits + row * row_stride + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
    score = noisy_score(value, seed, length, tile, top, temperature, floor, softcap, WIDTH, CAPPED)
    is_tie = (value == cut) & (value > float("-inf"))  # without a cutoff, ids after the vocabulary would be ties
    best, best_id = _best_of(tl.where(value > cut, score, float("-inf")), columns, size)
    best_tie, tie_id = _best_of(tl.where(is_tie, score, float("-inf")), columns, size)
    index = row * num_tiles + tile
    tl.store(bests + 2 * index, best)
    tl.store(bests + 2 * index + 1, best_tie)
    tl.store(ids + 2 * index, best_id)
    tl.store(ids + 2 * index + 1, tie_id)
    tl.store(ties + index, tl.sum(is_tie.to(tl.int32), axis=0))
    tl.debug_barrier()
    before = tl.atomic_add(arrived + row, 1, sem="acq_rel")
    if before < num_tiles - 1:
        return

    tl.store(arrived + row, 0)
    lanes = tl.arange(0, LANES)
    is_tile = lanes < num_tiles
    index = row * num_tiles + lanes
    tied = tl.load(ties + index, mask=is_tile, other=0, cache_modifier=".cg")
    tied_before = tl.cumsum(tied, axis=0) - tied
    all_best = tl.load(bests + 2 * index, mask=is_tile, other=float("-inf"), cache_modifier=".cg")
    all_ids = tl.load(ids + 2 * index, mask=is_tile, other=size, cache_modifier=".cg")
    best, best_id = _best_of(all_best, all_ids, size)
    kept_whole = is_tile & (tied_before + tied <= keep)
    all_best = tl.load(bests + 2 * index + 1, mask=kept_whole, other=float("-inf"), cache_modifier=".cg")
    all_ids = tl.load(ids + 2 * index + 1, mask=kept_whole, other=size, cache_modifier=".cg")
    best_tie, tie_id = _best_of(all_best, all_ids, size)
    best_id = tl.where((best_tie > best) | ((best_tie == best) & (tie_id < best_id)), tie_id, best_id)
    best = tl.maximum(best, best_tie)
    is_divided = is_tile & (tied_before < keep) & (tied_before + tied > keep)
    if tl.max(is_divided.to(tl.int32), axis=0) > 0:
        tile = tl.max(tl.where(is_divided, lanes, 0), axis=0)
        left = keep - tl.max(tl.where(is_divided, tied_before, 0), axis=0)
        columns = tile * WIDTH + within
        value = tl.load(logits + row * row_stride + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
        score = noisy_score(value, seed, length, tile, top, temperature, floor, softcap, WIDTH, CAPPED)
        is_tie = (value == cut) & (value > float("-inf"))
        is_kept = is_tie & (tl.cumsum(is_tie.to(tl.int32), axis=0) <= left)
        best_tie, tie_id = _best_of(tl.where(is_kept, score, float("-inf")), columns, size)
        best_id = tl.where((best_tie > best) | ((best_tie == best) & (tie_id < best_id)), tie_id, best_id)
    tl.store(tokens + row, best_id.to(tl.int64))
    tl.store(last_tokens + entry, best_id.to(tl.int64))


class TokenSampler:
    """Samples tokens of up to `max_rows` rows of `size` logits. A row has none if its largest is not finite."""

    def __init__(self, max_rows: int, size: int, softcap: float | None, device: torch.device) -> None:
        self._argmax = Argmax(max_rows, device)
        self._cut = TopKTopP(max_rows, size, softcap, device)
        self._softcap = softcap
        num_entries = max_rows * self._cut.num_tiles
        self._bests = torch.empty(2 * num_entries, dtype=torch.float32, device=device)
        self._ids = torch.empty(2 * num_entries, dtype=torch.int32, device=device)
        self._ties = torch.empty(num_entries, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def __call__(self, logits: Tensor, inputs: SamplingInputs, tokens: Tensor, max_logits: Tensor) -> None:
        """logits [n, vocab] before any cap -> tokens and largest logits, one for each entry in `inputs`."""
        logits = logits[: len(inputs.entries)]
        rows, size = logits.shape
        num_tiles = self._cut.num_tiles
        self._argmax(logits, inputs.entries, tokens, max_logits, inputs.last_tokens)
        if inputs.has_top_k:
            self._cut(logits, max_logits, inputs.entries, inputs.settings, by_mass=False)
        if inputs.has_top_p:
            self._cut(logits, max_logits, inputs.entries, inputs.settings, by_mass=True)
        _pick[(rows, num_tiles)](
            logits, tokens, max_logits, inputs.entries, inputs.lengths, inputs.seeds, inputs.settings,
            inputs.last_tokens, self._cut.cuts, self._bests, self._ids, self._ties, self._arrived,
            logits.stride(0), size, self._softcap or 0.0, WIDTH=WIDTH, LANES=triton.next_power_of_2(num_tiles),
            CAPPED=self._softcap is not None, num_warps=WARPS, **pdl_options(),
        )  # fmt: skip
