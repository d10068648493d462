"""Where top-k and top-p cut a row of logits, found without sorting it: by a search over all values a logit can have.

Floats stand in the order of whole numbers (`number_of`), so a pass over the row measures how much reaches each of a few
thresholds between two bounds (how many tokens for top-k, how much probability for top-p), and the next pass goes on
between the two where the wanted amount lies, until one value is left. Of the tokens that have it the first are kept.
Sums are made tile by tile and then over tiles, always in the same order, so a row's cut does not depend on the rows
beside it. `sample.py` is the caller.
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
PARTS = 8  # thresholds a pass: each costs three operations a logit, a pass fifteen and a reading of all logits
NUM_EVEN = 2  # passes whose thresholds stand evenly among values: most numbers belong to values next to zero
WARPS = 4
LOW_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # that are no part of such a value as a float32

LOG2_E = tl.constexpr(1.4426950408889634)
REACH = tl.constexpr(32.0)  # among so many below the largest logit the first thresholds of a top-k stand

# Columns of `settings`: see `quire.kernels.sampling`.
TEMPERATURE, TOP_K = tl.constexpr(sampling.TEMPERATURE), tl.constexpr(sampling.TOP_K)
TOP_P, FLOOR = tl.constexpr(sampling.TOP_P), tl.constexpr(sampling.FLOOR)
NUM_SETTINGS = tl.constexpr(sampling.NUM_SETTINGS)

# Columns of `cuts`, what is known of a row's cut.
LOW = tl.constexpr(0)  # the number of a value that enough reaches
HIGH = tl.constexpr(1)  # and of one that too little does
ABOVE = tl.constexpr(2)  # how much reaches HIGH
TARGET = tl.constexpr(3)  # how much is wanted
CUT = tl.constexpr(4)  # the value that was found
KEEP = tl.constexpr(5)  # how many of the tokens that have it are kept
SPARE = tl.constexpr(6)  # and how many are not
NUM_COLUMNS = tl.constexpr(7)


@triton.jit
def number_of(value, LOW_BITS: tl.constexpr):
    """float32 -> int64: the place of a value among all that its narrower type has."""
    bits = value.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> LOW_BITS).to(tl.int64)


@triton.jit
def value_of(number, LOW_BITS: tl.constexpr):
    """The float32 at a place: the inverse of `number_of`."""
    bits = number << LOW_BITS
    bits = tl.where(number < 0, (bits | ((1 << LOW_BITS) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def scale(value, top, temperature, floor, softcap, CAPPED: tl.constexpr):
    """A token's logit less the largest one, by the temperature; minus infinity below min-p's floor."""
    if CAPPED:
        value = softcap_scores(value, softcap)
        top = softcap_scores(top, softcap)
    below = value - top
    return tl.where(below < floor, float("-inf"), below / temperature)


@triton.jit
def weigh(value, top, temperature, floor, softcap, CAPPED: tl.constexpr):
    """A token's probability as a share of the likeliest one's; nothing below min-p's floor."""
    return tl.exp2(scale(value, top, temperature, floor, softcap, CAPPED) * LOG2_E)


@triton.jit
def is_drawn(temperature, top):
    """Whether a row's token is drawn: it is not greedy, and its largest logit is a number."""
    return (temperature > 0.0) & (tl.abs(top) < float("inf"))


@triton.jit
def is_counted(top_k, size):
    return (top_k > 0.0) & (top_k < size)


@triton.jit
def place(part, low, high, reach, even, LOW_BITS: tl.constexpr, PARTS: tl.constexpr):
    """The number of a pass's threshold: LOW is the first, HIGH stands behind the last."""
    if even:
        end = value_of(high, LOW_BITS)
        begin = tl.maximum(value_of(low, LOW_BITS), end - reach)
        number = number_of(begin + (end - begin) * (part * (1.0 / PARTS)), LOW_BITS)
        number = tl.where(part == 0, low, tl.maximum(number, low))
    else:
        number = low + part * tl.cdiv(high - low, PARTS)
    return tl.where(part < PARTS, tl.minimum(number, high), high)


@triton.jit(do_not_specialize=["number"])  # one compilation for all passes: the first draw waits for it
def _search(
    logits, scores, entries, settings, cuts, sums, arrived, number, row_stride, size, softcap,
    BY_MASS: tl.constexpr, NUM_EVEN: tl.constexpr, LOW_BITS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
    PARTS: tl.constexpr, CAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    num_tiles = tl.num_programs(1)
    known = cuts + row * NUM_COLUMNS
    wanted = settings + tl.load(entries + row) * NUM_SETTINGS
    temperature = tl.load(wanted + TEMPERATURE).to(tl.float32)
    floor = tl.load(wanted + FLOOR).to(tl.float32)
    top_k = tl.load(wanted + TOP_K)
    top_p = tl.load(wanted + TOP_P)
    top = tl.load(scores + row)
    counted = is_counted(top_k, size)
    if not (is_drawn(temperature, top) & ((top_p < 1.0) if BY_MASS else counted)):
        return
    first = number == 0
    low = tl.load(known + LOW).to(tl.int64)
    high = tl.load(known + HIGH).to(tl.int64)
    above = tl.load(known + ABOVE)
    if first:
        low = number_of(top * 0.0 - float("inf"), LOW_BITS)
        if BY_MASS:
            low = tl.where(counted, number_of(tl.load(known + CUT).to(tl.float32), LOW_BITS), low)
        high = number_of(top, LOW_BITS) + 1
        above = 0.0 * above
    elif high - low == 1:
        return

    even = number < NUM_EVEN
    reach = top * 0.0 + REACH
    if BY_MASS and not CAPPED:
        # All tokens further below the largest than this have less than top-p leaves over, together.
        reach = temperature * tl.log(size / (1.0 - top_p).to(tl.float32))
    columns = tile * WIDTH + tl.arange(0, WIDTH)
    inside = columns < size
    value = tl.load(logits + row * row_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    weight = inside.to(tl.float32)
    if BY_MASS:
        weight = weigh(value, top, temperature, floor, softcap, CAPPED)
        if CAPPED:  # or else what lies outside has no weight anyway
            weight = tl.where(inside, weight, 0.0)
    mine = sums + (row * num_tiles + tile) * PARTS
    for part in range(PARTS):
        reaches = value >= value_of(place(part, low, high, reach, even, LOW_BITS, PARTS), LOW_BITS)
        tl.store(mine + part, tl.sum(tl.where(reaches, weight, 0.0), axis=0))
    tl.debug_barrier()
    before = tl.atomic_add(arrived + row, 1, sem="acq_rel")
    if before < num_tiles - 1:
        return

    tl.store(arrived + row, 0)
    lanes = tl.arange(0, LANES)[:, None]
    parts = tl.arange(0, PARTS)
    of_row = sums + (row * num_tiles + lanes) * PARTS + parts[None, :]
    totals = tl.load(of_row, mask=lanes < num_tiles, other=0.0, cache_modifier=".cg").to(tl.float64)
    totals = tl.sum(totals, axis=0)
    target = tl.load(known + TARGET)
    if first:
        target = top_k
        if BY_MASS:
            spare = tl.where(counted, tl.load(known + SPARE), 0.0)
            cut = tl.where(counted, tl.load(known + CUT).to(tl.float32), top)
            unkept = spare * weigh(cut, top, temperature, floor, softcap, CAPPED).to(tl.float64)
            target = top_p * (tl.sum(tl.where(parts == 0, totals, 0.0), axis=0) - unkept)
    # LOW, the first threshold, is reached by enough: rounding must not say otherwise.
    num_reached = tl.maximum(tl.sum((totals >= target).to(tl.int32), axis=0), 1)
    reached = tl.sum(tl.where(parts == num_reached - 1, totals, 0.0), axis=0)
    above = tl.where(num_reached < PARTS, tl.sum(tl.where(parts == num_reached, totals, 0.0), axis=0), above)
    next_low = place(num_reached - 1, low, high, reach, even, LOW_BITS, PARTS)
    next_high = place(num_reached, low, high, reach, even, LOW_BITS, PARTS)
    tl.store(known + LOW, next_low.to(tl.float64))
    tl.store(known + HIGH, next_high.to(tl.float64))
    tl.store(known + ABOVE, above)
    tl.store(known + TARGET, target)
    if next_high - next_low == 1:
        cut = value_of(next_low, LOW_BITS)
        keep = target - above
        if BY_MASS:
            each = weigh(cut, top, temperature, floor, softcap, CAPPED).to(tl.float64)
            keep = tl.where(each > 0.0, tl.maximum(tl.ceil(keep / each), 1.0), size)
            same = counted & (cut == tl.load(known + CUT).to(tl.float32))
            keep = tl.where(same, tl.minimum(keep, tl.load(known + KEEP)), keep)
        tl.store(known + CUT, cut.to(tl.float64))
        tl.store(known + KEEP, keep)
        tl.store(known + SPARE, reached - above - keep)


class TopKTopP:
    """Finds the cuts of up to so many rows of `size` logits; `cuts` holds what was found."""

    def __init__(self, max_rows: int, size: int, softcap: float | None, device: torch.device) -> None:
        self.num_tiles = triton.cdiv(size, WIDTH)
        self.cuts = torch.zeros(max_rows, NUM_COLUMNS.value, dtype=torch.float64, device=device)
        self._softcap = softcap
        self._sums = torch.empty(max_rows * self.num_tiles * PARTS, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def __call__(self, logits: Tensor, scores: Tensor, entries: Tensor, settings: Tensor, *, by_mass: bool) -> None:
        """By mass for rows with a top-p, after those with a top-k were cut by count; other rows are passed over."""
        rows, size = logits.shape
        low_bits = LOW_BITS[logits.dtype]
        for number in range(num_passes(low_bits)):
            _search[(rows, self.num_tiles)](
                logits, scores, entries, settings, self.cuts, self._sums, self._arrived, number, logits.stride(0), size,
                self._softcap or 0.0, BY_MASS=by_mass, NUM_EVEN=NUM_EVEN, LOW_BITS=low_bits, WIDTH=WIDTH,
                LANES=triton.next_power_of_2(self.num_tiles), PARTS=PARTS, CAPPED=self._softcap is not None,
                num_warps=WARPS, **pdl_options(),
            )  # fmt: skip


def num_passes(low_bits: int) -> int:
    """Enough for any row: of all numbers each pass leaves one part, but those with even thresholds may leave more."""
    passes = 0
    while PARTS**passes < 1 << (32 - low_bits):
        passes += 1
    return NUM_EVEN + passes
