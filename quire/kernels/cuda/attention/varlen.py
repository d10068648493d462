"""Attention of any rows of a step over the paged cache, on Hopper: two warpgroups compute, other warps load the data.

A tile is 128 packed rows of one request and key head: packed row p is query p // GROUP with query head p % GROUP of the
key head's group. `varlen_items.py` cuts a step into items: tiles and ranges of their keys. A fixed grid of programs
takes (item, key head) units in turn, so one captured graph serves any step. If a tile's keys are split, the last
program to end merges the partial results, in order.

Shared memory holds STAGES tiles of keys and of values, and BUFFERS tiles of queries. The barriers, at the n-th use of a
stage or buffer (n runs on from unit to unit):

    barrier          arrives                                         count    waited for by           parity
    k_full, v_full   a load warp, and the tile's bytes               1        both warpgroups         n & 1
    k_free, v_free   a warpgroup, after its product has ended        2        the load warp           (n & 1) ^ 1
    q_full           the query warp, after it has fenced its copies  1        both warpgroups         n & 1
    q_free           a warpgroup, at the end of a unit               2        the query warp          (n & 1) ^ 1

A stage is filled again only after both warpgroups have released it, so no warp is two phases behind. Each wait is for
an event of an earlier tile, so there is no deadlock. Every unit has at least one tile for every warp.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.cuda.attention.scoring import Scoring
from quire.kernels.cuda.attention.split_kv import workspace
from quire.kernels.cuda.attention.varlen_items import ITEM_FIELDS, KEYS, MAX_PARTIALS, STAGES, num_programs
from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous
from quire.kernels.paging import LayerCache, Paging

BUFFERS = 2  # tiles of queries in shared memory

FIELDS = gl.constexpr(ITEM_FIELDS)
ROWS = gl.constexpr(64)  # of a warpgroup: half of a tile
SIDES = gl.constexpr(2)  # warpgroups
SPAN = gl.constexpr(64)  # columns that are contiguous in shared memory: 128 bytes, one swizzle
LANES = gl.constexpr(16)  # rows of queries that are copied at a time
LOG2_E = gl.constexpr(1.4426950408889634)
UNSEEN = gl.constexpr(-(2.0**100))  # a power of two: its product with the scale is exact, so UNSEEN - UNSEEN is 0


@gluon.jit
def count_turns(units, programs):
    """The number of units of this program. Every other round is in reverse order, which balances the lengths."""
    whole = units // programs
    rank = gl.program_id(0)
    if whole % 2 == 1:
        rank = programs - 1 - rank
    return whole + (rank < units - whole * programs).to(gl.int32)


@gluon.jit
def take_unit(turn, items, programs, KV_HEADS: gl.constexpr):
    """A pointer to this turn's item, and its key head. An item's heads are consecutive units, which run together."""
    rank = gl.program_id(0)
    if turn % 2 == 1:
        rank = programs - 1 - rank
    unit = turn * programs + rank
    return items + 1 + unit // KV_HEADS * FIELDS, unit % KV_HEADS


@gluon.jit
def count_tiles(begin, end, KEYS: gl.constexpr):
    """At least one, so that all warps pass the same barriers even for an item without keys."""
    return gl.maximum((end - begin + KEYS - 1) // KEYS, 1)


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), phase ^ wraps.to(gl.int32)


@gluon.jit
def retreat(stage, phase, STAGES: gl.constexpr):
    wraps = stage == 0
    return gl.where(wraps, STAGES - 1, stage - 1), phase ^ wraps.to(gl.int32)


@gluon.jit
def load_keys_or_values(
    source, tiles, full, free, work, paged, KV_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: loads the keys, or the values, of every tile of every unit."""
    items, programs = work
    tables, table_row, block_rows, head_rows = paged
    BOX: gl.constexpr = source.block_type.shape[0]
    BOXES: gl.constexpr = KEYS // BOX
    SPANS: gl.constexpr = DIM // SPAN
    pieces = tiles._reinterpret(tiles.dtype, [STAGES * SPANS * BOXES, BOX, SPAN], source.layout)
    stage = 0
    phase = 1
    for turn in range(count_turns(gl.load(items) * KV_HEADS, programs)):
        item, head = take_unit(turn, items, programs, KV_HEADS)
        row = gl.load(item)
        begin = gl.load(item + 2)
        end = gl.load(item + 3)
        table = tables + row.to(gl.int64) * table_row
        last = gl.maximum(end - 1, 0) // PAGE  # table entries after it are undefined
        in_block = head * head_rows
        for tile in range(count_tiles(begin, end, KEYS)):
            rows = ()
            for nth in gl.static_range(BOXES):
                block = gl.load(table + gl.minimum(begin // PAGE + tile * BOXES + nth, last))
                rows = rows + (block * block_rows + in_block,)  # type: ignore[assignment]
            mbarrier.wait(free.index(stage), phase)
            mbarrier.expect(full.index(stage), KEYS * DIM * 2)
            for span in gl.static_range(SPANS):
                for nth in gl.static_range(BOXES):
                    piece = pieces.index((stage * SPANS + span) * BOXES + nth)
                    tma.async_copy_global_to_shared(source, [rows[nth], span * SPAN], full.index(stage), piece)
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def load_queries(
    q, queries, full, free, work, starts, q_row, KV_HEADS: gl.constexpr, DIM: gl.constexpr,
    GROUP: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """One warp: loads the queries of every unit. Indices past the row's last packed row are clamped to it."""
    items, programs = work
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    EACH: gl.constexpr = ROWS // LANES
    SPANS: gl.constexpr = DIM // SPAN
    PIECES: gl.constexpr = SIDES * SPANS * EACH
    pieces = queries._reinterpret(queries.dtype, [BUFFERS * PIECES, LANES, SPAN], queries.layout)
    lanes = gl.arange(0, LANES, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, SPAN, layout=gl.SliceLayout(0, layout))
    buffer = 0
    phase = 1
    for turn in range(count_turns(gl.load(items) * KV_HEADS, programs)):
        item, head = take_unit(turn, items, programs, KV_HEADS)
        row = gl.load(item)
        first = gl.load(item + 1)
        start = gl.load(starts + row)
        last = (gl.load(starts + row + 1) - start) * GROUP - 1
        source = q + gl.multiple_of(start.to(gl.int64) * q_row, 8) + head * (GROUP * DIM)
        mbarrier.wait(free.index(buffer), phase)
        for nth in range(SIDES * EACH):
            packed = gl.minimum(first + nth * LANES + lanes, last)
            offsets = gl.multiple_of(packed // GROUP * q_row, 8) + packed % GROUP * DIM
            piece = buffer * PIECES + nth // EACH * (SPANS * EACH) + nth % EACH
            for span in gl.static_range(SPANS):
                lane_source = source + (offsets[:, None] + columns[None, :] + span * SPAN)
                async_copy.async_copy_global_to_shared(pieces.index(piece + span * EACH), lane_source)
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()  # makes the copies visible to wgmma
        mbarrier.arrive(full.index(buffer), count=1)
        buffer, phase = advance(buffer, phase, BUFFERS)


@gluon.jit
def mask_scores(scores, query_positions, tile, end, window, HAS_WINDOW: gl.constexpr):
    """Mask the keys that queries at these positions do not see. Positions count from the item's first key."""
    KEYS: gl.constexpr = scores.shape[1]
    within = tile * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores.type.layout))
    scores = gl.where(within[None, :] < gl.minimum(query_positions + 1, end)[:, None], scores, UNSEEN)
    if HAS_WINDOW:
        scores = gl.where(within[None, :] > (query_positions - window)[:, None], scores, UNSEEN)
    return scores


@gluon.jit
def pack(weights, dtype: gl.constexpr):
    """Weights in 16 bits, two neighbours in an int32: the form in which the next step gets them."""
    even, odd = gl.split(gl.reshape(weights, [ROWS, weights.shape[1] // 2, 2]))
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, True, 1)
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, True, 1)


@gluon.jit
def as_left(packed, dtype: gl.constexpr, DIM: gl.constexpr):
    """Packed weights as the left operand of their product with the values. Only the type changes, no data moves."""
    in_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    even = packed.to(gl.int16).to(dtype, bitcast=True)
    odd = (packed >> 16).to(gl.int16).to(dtype, bitcast=True)
    weights = gl.reshape(gl.join(even, odd), [ROWS, packed.shape[1] * 2])
    return gl.convert_layout(weights, gl.DotOperandLayout(0, in_sums, 2), assert_trivial=True)


@gluon.jit
def step(
    query, keys, values, k_full, k_free, v_full, v_free, stage, phase, packed, rescale, total, top, mass,
    query_positions, tile, end, window, is_masked, scale, DIM: gl.constexpr, STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Score one more tile of keys while the values of the tile before it are summed."""
    KEYS: gl.constexpr = keys.shape[1]
    in_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    in_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    zeros = gl.zeros([ROWS, KEYS], gl.float32, in_scores)
    before, phase_before = retreat(stage, phase, STAGES)
    left = as_left(packed, keys.dtype, DIM)
    mbarrier.wait(k_full.index(stage), phase)
    scores = warpgroup_mma(query, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), phase_before)
    total = total * gl.convert_layout(rescale, gl.SliceLayout(1, in_sums))[:, None]
    total = warpgroup_mma(left, values.index(before), total, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_free.index(stage), count=1)
    if is_masked:
        scores = mask_scores(scores, query_positions, tile, end, window, HAS_WINDOW)
    higher = gl.maximum(top, gl.max(scores, axis=1))
    shift = higher * scale
    weights = gl.exp2(scores * scale - shift[:, None])
    rescale = gl.exp2(top * scale - shift)
    mass = mass * rescale + gl.sum(weights, axis=1)
    # This barrier has been waited for already. Without a second wait ptxas moves the wait for the sums before the code
    # above, which then does not overlap with them. ptxas moves nothing across a wait for a barrier.
    mbarrier.wait(v_full.index(before), phase_before)
    total = warpgroup_mma_wait(0, deps=(total,))
    mbarrier.arrive(v_free.index(before), count=1)
    stage, phase = advance(stage, phase, STAGES)
    return stage, phase, pack(weights, keys.dtype), rescale, total, higher, mass


@gluon.jit
def store_partial(partials, tops, arrived, index, counter, count, shift, mass, total):
    """Store the partial result of a split. True if it is the last of its tile's `count` splits."""
    DIM: gl.constexpr = total.shape[1]
    layout: gl.constexpr = total.type.layout
    rows = index * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    gl.store(partials + rows[:, None] * DIM + columns[None, :], total)
    gl.store(tops + rows * 2, shift)
    gl.store(tops + rows * 2 + 1, mass)
    gl.thread_barrier()
    is_last = gl.atomic_add(arrived + counter, 1, sem="acq_rel") == count - 1
    if is_last:
        gl.store(arrived + counter, 0)
    return is_last


@gluon.jit
def merge_partials(partials, tops, first, stride, count, total):
    """Merge a tile's partial results in order: the sum does not depend on which program is last."""
    DIM: gl.constexpr = total.shape[1]
    layout: gl.constexpr = total.type.layout
    lanes = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    mass = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    total = gl.zeros([ROWS, DIM], gl.float32, layout)
    for nth in range(count):
        rows = (first + nth * stride) * ROWS + lanes
        partial_top = gl.load(tops + rows * 2, cache_modifier=".cg")
        partial_mass = gl.load(tops + rows * 2 + 1, cache_modifier=".cg")
        partial = gl.load(partials + rows[:, None] * DIM + columns[None, :], cache_modifier=".cg")
        higher = gl.maximum(top, partial_top)
        rescale = gl.exp2(top - higher)
        factor = gl.exp2(partial_top - higher)
        mass = mass * rescale + partial_mass * factor
        total = total * rescale[:, None] + partial * factor[:, None]
        top = higher
    return mass, total


@gluon.jit
def write(out, buffer, result, first, last, out_row, DIM: gl.constexpr, GROUP: gl.constexpr):
    """Write the result through shared memory, which coalesces stores. Rows after the last query are not written."""
    spread: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (DIM // 8), DIM // 8], [4, 1], [1, 0])
    buffer.store(result.to(buffer.dtype))
    gl.thread_barrier()
    result = buffer.load(spread)
    packed = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, spread))
    columns = gl.arange(0, DIM, layout=gl.SliceLayout(0, spread))
    offsets = gl.multiple_of(packed // GROUP * out_row, 8) + packed % GROUP * DIM
    gl.store(out + offsets[:, None] + columns[None, :], result, mask=(packed <= last)[:, None])


@gluon.jit
def attend(
    shared, work, attended, SIDE: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, GROUP: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """One warpgroup: computes its half of the packed rows of every unit. Both take the same number of steps."""
    in_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    in_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    queries, keys, values, q_full, q_free, k_full, k_free, v_full, v_free = shared
    items, programs = work
    out, partials, tops, arrived, starts, seq_lens, scale, window, out_row = attended
    buffer = 0
    q_phase = 0
    stage = 0  # of the next tile of keys; values are one tile behind
    phase = 0
    for turn in range(count_turns(gl.load(items) * KV_HEADS, programs)):
        item, head = take_unit(turn, items, programs, KV_HEADS)
        row = gl.load(item)
        first = gl.load(item + 1)
        begin = gl.load(item + 2)
        end = gl.load(item + 3) - begin
        count = gl.load(starts + row + 1) - gl.load(starts + row)
        before = gl.load(seq_lens + row) - count - begin  # keys of the item that come before the row's first query
        query_positions = (
            before + (first + SIDE * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, in_scores))) // GROUP
        )
        tiles = count_tiles(0, end, KEYS)
        # Both warpgroups use the first and last query of the whole tile, so that they mask the same tiles.
        whole = gl.maximum(gl.minimum(before + first // GROUP + 1, end), 0) // KEYS  # tiles whose end all queries see
        opening = 0  # tiles whose beginning some queries do not see
        if HAS_WINDOW:
            last = before + gl.minimum((first + SIDES * ROWS - 1) // GROUP, count - 1)
            opening = (gl.maximum(last - window + 1, 0) + KEYS - 1) // KEYS

        mbarrier.wait(q_full.index(buffer), q_phase)
        query = queries.index(buffer * SIDES + SIDE)
        mbarrier.wait(k_full.index(stage), phase)
        zeros = gl.zeros([ROWS, KEYS], gl.float32, in_scores)
        scores = warpgroup_mma(query, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_free.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
        scores = mask_scores(scores, query_positions, 0, end, window, HAS_WINDOW)
        top = gl.max(scores, axis=1)
        weights = gl.exp2(scores * scale - (top * scale)[:, None])
        mass = gl.sum(weights, axis=1)
        packed = pack(weights, keys.dtype)
        rescale = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, in_scores))
        total = gl.zeros([ROWS, DIM], gl.float32, in_sums)
        for tile in range(1, tiles):
            stage, phase, packed, rescale, total, top, mass = step(
                query, keys, values, k_full, k_free, v_full, v_free, stage, phase, packed, rescale, total, top, mass,
                query_positions, tile, end, window, (tile < opening) | (tile >= whole), scale, DIM, STAGES, HAS_WINDOW,
            )  # fmt: skip
        v_stage, v_phase = retreat(stage, phase, STAGES)
        total = total * gl.convert_layout(rescale, gl.SliceLayout(1, in_sums))[:, None]
        left = as_left(packed, keys.dtype, DIM)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        total = warpgroup_mma(left, values.index(v_stage), total, is_async=True)
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(v_free.index(v_stage), count=1)

        mass = gl.convert_layout(mass, gl.SliceLayout(1, in_sums))
        num_splits = gl.load(item + 5)
        is_done = num_splits == 1
        if num_splits > 1:
            stride: gl.constexpr = KV_HEADS * SIDES
            counter = gl.load(item + 6) * stride + head * SIDES + SIDE
            index = counter + gl.load(item + 4) * stride
            shift = gl.convert_layout(top * scale, gl.SliceLayout(1, in_sums))
            is_done = store_partial(partials, tops, arrived, index, counter, num_splits, shift, mass, total)
            if is_done:
                mass, total = merge_partials(partials, tops, counter, stride, num_splits, total)
        if is_done:
            # Loaded again, under other names: the same variables would occupy registers throughout the loop.
            start = starts + gl.load(item)
            token = gl.load(start)
            last_packed = (gl.load(start + 1) - token) * GROUP - 1
            target = out + gl.multiple_of(token.to(gl.int64) * out_row, 8) + head * (GROUP * DIM)
            first_packed = gl.load(item + 1) + SIDE * ROWS
            write(target, query, total * (1.0 / mass)[:, None], first_packed, last_packed, out_row, DIM, GROUP)
        mbarrier.arrive(q_free.index(buffer), count=1)
        buffer, q_phase = advance(buffer, q_phase, BUFFERS)


@gluon.jit(do_not_specialize=["programs", "window", "q_row", "out_row", "table_row", "block_rows", "head_rows"])
def _varlen(
    k_source, v_source, q, out, partials, tops, arrived, tables, seq_lens, starts, items, programs, scale, window,
    q_row, out_row, table_row, block_rows, head_rows, KV_HEADS: gl.constexpr, DIM: gl.constexpr, GROUP: gl.constexpr,
    PAGE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr, HAS_WINDOW: gl.constexpr,
    REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = k_source.layout
    dtype: gl.constexpr = k_source.dtype
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(dtype, [BUFFERS * SIDES, ROWS, DIM], layout)
    keys = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], layout)
    values = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], layout)
    q_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], barrier_layout)
    q_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], barrier_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    for nth in gl.static_range(BUFFERS):
        mbarrier.init(q_full.index(nth), count=1)
        mbarrier.init(q_free.index(nth), count=SIDES)
    for nth in gl.static_range(STAGES):
        mbarrier.init(k_full.index(nth), count=1)
        mbarrier.init(k_free.index(nth), count=SIDES)
        mbarrier.init(v_full.index(nth), count=1)
        mbarrier.init(v_free.index(nth), count=SIDES)
    fence_async_shared()
    launch_dependents(PDL)
    wait_for_previous(PDL)
    shared = (queries, keys, values, q_full, q_free, k_full, k_free, v_full, v_free)
    work = (items, programs)
    attended = (out, partials, tops, arrived, starts, seq_lens, scale, window, out_row)
    paged = (tables, table_row, block_rows, head_rows)
    gl.warp_specialize(
        [
            (attend, (shared, work, attended, 0, KV_HEADS, DIM, GROUP, KEYS, STAGES, BUFFERS, HAS_WINDOW)),
            (attend, (shared, work, attended, 1, KV_HEADS, DIM, GROUP, KEYS, STAGES, BUFFERS, HAS_WINDOW)),
            (load_keys_or_values, (k_source, keys, k_full, k_free, work, paged, KV_HEADS, DIM, PAGE, KEYS, STAGES)),
            (load_keys_or_values, (v_source, values, v_full, v_free, work, paged, KV_HEADS, DIM, PAGE, KEYS, STAGES)),
            (load_queries, (q, queries, q_full, q_free, work, starts, q_row, KV_HEADS, DIM, GROUP, BUFFERS)),
        ],
        [4, 1, 1, 1],
        [REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip


def varlen_attention(
    q: Tensor, cache: LayerCache, paging: Paging, items: Tensor, out: Tensor, scoring: Scoring
) -> None:
    """Attention of the queries of the items; q and out [tokens, heads, dim]. Other rows of `out` are not written.

    The cache must be finite, even after a context's end: values that a query does not see are multiplied by zero.
    """
    kv_heads, page, dim = cache.k.shape[1:]
    tables, window = paging.block_tables[cache.group], scoring.window
    programs = min(num_programs(), (items.shape[0] - 1) // ITEM_FIELDS * kv_heads)
    assert q.stride()[1:] == out.stride()[1:] == (dim, 1)
    assert q.stride(0) % 8 == out.stride(0) % 8 == 0
    assert cache.k.stride() == cache.v.stride()
    assert cache.k.stride()[2:] == (dim, 1)
    assert cache.k.stride(0) % dim == 0
    _varlen[(programs,)](
        describe(cache.k), describe(cache.v), q, out,
        *workspace("varlen", MAX_PARTIALS * SIDES.value, ROWS.value, dim, q.device), tables, paging.seq_lens,
        paging.query_starts, items, programs, scoring.scale * LOG2_E.value, window or 0, q.stride(0),
        out.stride(0), tables.stride(0), cache.k.stride(0) // dim, cache.k.stride(1) // dim,
        KV_HEADS=kv_heads, DIM=dim, GROUP=q.shape[1] // kv_heads, PAGE=page, KEYS=KEYS, STAGES=STAGES[dim],
        BUFFERS=BUFFERS, HAS_WINDOW=window is not None, REGISTERS=240, LOAD_REGISTERS=24, num_warps=4, **pdl_options(),
    )  # fmt: skip


def describe(cache: Tensor) -> TensorDescriptor:
    """The cache as a matrix of rows of `dim`, for TMA. A box is one head's SPAN columns of a block."""
    blocks, kv_heads, page, dim = cache.shape
    rows = ((blocks - 1) * cache.stride(0) + (kv_heads - 1) * cache.stride(1)) // dim + page
    assert rows < 2**31
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(cache, [rows, dim], [dim, 1], [page, SPAN.value], layout)
