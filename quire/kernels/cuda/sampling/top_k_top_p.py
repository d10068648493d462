"""The top-k and top-p cutoff of a row of logits, found without sorting: by a search over all values of the type.

Floats map to integers of the same order (`ordered_bits`). A pass has a few thresholds between two bounds. For each it
sums the logits that reach it: their number for top-k, their probability for top-p. The next pass searches between the
two thresholds around the target, until one value is left. Of the tokens that have this value the first are kept. Sums
are made by tile and then over tiles, always in the same order, so a row's cutoff does not depend on other rows.
`sample.py` calls it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import sampling
from quire.kernels.cuda.attention.scoring import softcap_scores
from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous

WIDTH = 4096  # of a tile
NUM_THRESHOLDS = 8  # of a pass: each costs three operations a logit, a pass fifteen and a read of all logits
NUM_EVEN = 2  # passes with thresholds evenly spaced in value: most integers belong to values near zero
WARPS = 4
LOW_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # unused low bits of the type's values as float32

LOG2_E = tl.constexpr(1.4426950408889634)
REACH = tl.constexpr(32.0)  # the first thresholds of a top-k are within this distance of the largest logit

# Columns of `settings`: see `quire.kernels.sampling`.
TEMPERATURE, TOP_K = tl.constexpr(sampling.TEMPERATURE), tl.constexpr(sampling.TOP_K)
TOP_P, FLOOR = tl.constexpr(sampling.TOP_P), tl.constexpr(sampling.FLOOR)
NUM_SETTINGS = tl.constexpr(sampling.NUM_SETTINGS)

# Columns of `cuts`: the state of a row's search.
LOW = tl.constexpr(0)  # the ordered bits of a value that the target amount reaches
HIGH = tl.constexpr(1)  # the ordered bits of a value that less than the target reaches
ABOVE = tl.constexpr(2)  # the amount that reaches HIGH
TARGET = tl.constexpr(3)  # the amount to keep
CUT = tl.constexpr(4)  # the cutoff value
KEEP = tl.constexpr(5)  # the number of tokens at the cutoff that are kept
SPARE = tl.constexpr(6)  # the number of tokens at the cutoff that are not kept
NUM_COLUMNS = tl.constexpr(7)


@triton.jit
def ordered_bits(value, LOW_BITS: tl.constexpr):
    """float32 -> int64: the rank of a value among all values of its type."""
    bits = value.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> LOW_BITS).to(tl.int64)


@triton.jit
def from_ordered_bits(ordered, LOW_BITS: tl.constexpr):
    """The inverse of `ordered_bits`."""
    bits = ordered << LOW_BITS
    bits = tl.where(ordered < 0, (bits | ((1 << LOW_BITS) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def scale(value, top, temperature, floor, softcap, CAPPED: tl.constexpr):
    """(logit - largest logit) / temperature; minus infinity below min-p's floor."""
    if CAPPED:
        value = softcap_scores(value, softcap)
        top = softcap_scores(top, softcap)
    below = value - top
    return tl.where(below < floor, float("-inf"), below / temperature)


@triton.jit
def weigh(value, top, temperature, floor, softcap, CAPPED: tl.constexpr):
    """A token's probability relative to that of the likeliest; 0 below min-p's floor."""
    return tl.exp2(scale(value, top, temperature, floor, softcap, CAPPED) * LOG2_E)


@triton.jit
def is_drawn(temperature, top):
    """Whether a row's token is sampled: the row is not greedy, and its largest logit is finite."""
    return (temperature > 0.0) & (tl.abs(top) < float("inf"))


@triton.jit
def has_top_k(top_k, size):
    return (top_k > 0.0) & (top_k < size)


@triton.jit
def threshold(nth, low, high, reach, even, LOW_BITS: tl.constexpr, NUM_THRESHOLDS: tl.constexpr):
    """The ordered bits of a pass's nth threshold. The first is `low`; the one after the last is `high`."""
    if even:
        end = from_ordered_bits(high, LOW_BITS)
        begin = tl.maximum(from_ordered_bits(low, LOW_BITS), end - reach)
        ordered = ordered_bits(begin + (end - begin) * (nth * (1.0 / NUM_THRESHOLDS)), LOW_BITS)
        ordered = tl.where(nth == 0, low, tl.maximum(ordered, low))
    else:
        ordered = low + nth * tl.cdiv(high - low, NUM_THRESHOLDS)
    return tl.where(nth < NUM_THRESHOLDS, tl.minimum(ordered, high), high)


@triton.jit(do_not_specialize=["pass_index"])  # one compilation for all passes
def _search(
    logits, max_logits, entries, settings, cuts, sums, arrived, pass_index, row_stride, size, softcap,
    BY_MASS: tl.constexpr, NUM_EVEN: tl.constexpr, LOW_BITS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
    NUM_THRESHOLDS: tl.constexpr, CAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    num_tiles = tl.num_programs(1)
    search = cuts + row * NUM_COLUMNS
    row_settings = settings + tl.load(entries + row) * NUM_SETTINGS
    temperature = tl.load(row_settings + TEMPERATURE).to(tl.float32)
    floor = tl.load(row_settings + FLOOR).to(tl.float32)
    top_k = tl.load(row_settings + TOP_K)
    top_p = tl.load(row_settings + TOP_P)
    top = tl.load(max_logits + row)
    uses_top_k = has_top_k(top_k, size)
    if not (is_drawn(temperature, top) & ((top_p < 1.0) if BY_MASS else uses_top_k)):
        return
    first = pass_index == 0
    low = tl.load(search + LOW).to(tl.int64)
    high = tl.load(search + HIGH).to(tl.int64)
    above = tl.load(search + ABOVE)
    if first:
        low = ordered_bits(top * 0.0 - float("inf"), LOW_BITS)
        if BY_MASS:
            low = tl.where(uses_top_k, ordered_bits(tl.load(search + CUT).to(tl.float32), LOW_BITS), low)
        high = ordered_bits(top, LOW_BITS) + 1
        above = 0.0 * above
    elif high - low == 1:
        return

    even = pass_index < NUM_EVEN
    reach = top * 0.0 + REACH
    if BY_MASS and not CAPPED:
        # All tokens further below the largest together have a probability of less than 1 - top_p.
        reach = temperature * tl.log(size / (1.0 - top_p).to(tl.float32))
    columns = tile * WIDTH + tl.arange(0, WIDTH)
    inside = columns < size
    value = tl.load(logits + row * row_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    weight = inside.to(tl.float32)
    if BY_MASS:
        weight = weigh(value, top, temperature, floor, softcap, CAPPED)
        if CAPPED:  # without a cap the weight outside is 0
            weight = tl.where(inside, weight, 0.0)
    tile_sums = sums + (row * num_tiles + tile) * NUM_THRESHOLDS
    for nth in range(NUM_THRESHOLDS):
        reaches = value >= from_ordered_bits(threshold(nth, low, high, reach, even, LOW_BITS, NUM_THRESHOLDS), LOW_BITS)
        tl.store(tile_sums + nth, tl.sum(tl.where(reaches, weight, 0.0), axis=0))
    tl.debug_barrier()
    before = tl.atomic_add(arrived + row, 1, sem="acq_rel")
    if before < num_tiles - 1:
        return

    tl.store(arrived + row, 0)
    lanes = tl.arange(0, LANES)[:, None]
    indices = tl.arange(0, NUM_THRESHOLDS)
    row_sums = sums + (row * num_tiles + lanes) * NUM_THRESHOLDS + indices[None, :]
    totals = tl.load(row_sums, mask=lanes < num_tiles, other=0.0, cache_modifier=".cg").to(tl.float64)
    totals = tl.sum(totals, axis=0)
    target = tl.load(search + TARGET)
    if first:
        target = top_k
        if BY_MASS:
            spare = tl.where(uses_top_k, tl.load(search + SPARE), 0.0)
            cut = tl.where(uses_top_k, tl.load(search + CUT).to(tl.float32), top)
            unkept = spare * weigh(cut, top, temperature, floor, softcap, CAPPED).to(tl.float64)
            target = top_p * (tl.sum(tl.where(indices == 0, totals, 0.0), axis=0) - unkept)
    # The target amount reaches LOW, the first threshold, even if rounding says otherwise.
    num_reached = tl.maximum(tl.sum((totals >= target).to(tl.int32), axis=0), 1)
    reached = tl.sum(tl.where(indices == num_reached - 1, totals, 0.0), axis=0)
    above = tl.where(num_reached < NUM_THRESHOLDS, tl.sum(tl.where(indices == num_reached, totals, 0.0), axis=0), above)
    next_low = threshold(num_reached - 1, low, high, reach, even, LOW_BITS, NUM_THRESHOLDS)
    next_high = threshold(num_reached, low, high, reach, even, LOW_BITS, NUM_THRESHOLDS)
    tl.store(search + LOW, next_low.to(tl.float64))
    tl.store(search + HIGH, next_high.to(tl.float64))
    tl.store(search + ABOVE, above)
    tl.store(search + TARGET, target)
    if next_high - next_low == 1:
        cut = from_ordered_bits(next_low, LOW_BITS)
        keep = target - above
        if BY_MASS:
            each = weigh(cut, top, temperature, floor, softcap, CAPPED).to(tl.float64)
            keep = tl.where(each > 0.0, tl.maximum(tl.ceil(keep / each), 1.0), size)
            same = uses_top_k & (cut == tl.load(search + CUT).to(tl.float32))
            keep = tl.where(same, tl.minimum(keep, tl.load(search + KEEP)), keep)
        tl.store(search + CUT, cut.to(tl.float64))
        tl.store(search + KEEP, keep)
        tl.store(search + SPARE, reached - above - keep)


class TopKTopP:
    """Finds the cutoffs of up to `max_rows` rows of `size` logits, and stores them in `cuts`."""

    def __init__(self, max_rows: int, size: int, softcap: float | None, device: torch.device) -> None:
        self.num_tiles = triton.cdiv(size, WIDTH)
        self.cuts = torch.zeros(max_rows, NUM_COLUMNS.value, dtype=torch.float64, device=device)
        self._softcap = softcap
        self._sums = torch.empty(max_rows * self.num_tiles * NUM_THRESHOLDS, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def __call__(self, logits: Tensor, max_logits: Tensor, entries: Tensor, settings: Tensor, *, by_mass: bool) -> None:
        """by_mass: top-p, after top-k; otherwise top-k. Rows without the setting are skipped."""
        rows, size = logits.shape
        low_bits = LOW_BITS[logits.dtype]
        for pass_index in range(num_passes(low_bits)):
            _search[(rows, self.num_tiles)](
                logits, max_logits, entries, settings, self.cuts, self._sums, self._arrived, pass_index,
                logits.stride(0), size, self._softcap or 0.0, BY_MASS=by_mass, NUM_EVEN=NUM_EVEN, LOW_BITS=low_bits,
                WIDTH=WIDTH, LANES=triton.next_power_of_2(self.num_tiles), NUM_THRESHOLDS=NUM_THRESHOLDS,
                CAPPED=self._softcap is not None, num_warps=WARPS, **pdl_options(),
            )  # fmt: skip


def num_passes(low_bits: int) -> int:
    """Enough for any row. A pass leaves 1 / NUM_THRESHOLDS of the integers; one with even thresholds may leave more."""
    passes = 0
    while NUM_THRESHOLDS**passes < 1 << (32 - low_bits):
        passes += 1
    return NUM_EVEN + passes
