"""Kernels around an EAGLE head that drafts behind a step: the places of the drafted tokens, which only the device knows
yet, the drafts as input of the next step, and what is kept of a step behind which nothing is drafted.
`engine/gpu_drafter.py` calls them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.attention.split_kv import FIELDS as SPLIT_FIELDS
from quire.kernels.cuda.attention.split_kv import PADDING_ROW, UNIT
from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous
from quire.kernels.cuda.sampling.accept import FIELDS


@triton.jit(do_not_specialize=["num_rows", "padding_entry"])
def _place(
    rows, num_accepted, starts, seq_lens, entries, table, indices, row_entries, positions, slots, lengths, splits,
    num_rows, padding_entry, block_size, table_row, depth,
    SPLITS: tl.constexpr, UNIT: tl.constexpr, FIELDS: tl.constexpr, SPLIT_FIELDS: tl.constexpr,
    PADDING_ROW: tl.constexpr,
):  # fmt: skip
    nth = tl.program_id(0)
    fields = rows + nth * FIELDS
    row = tl.load(fields)
    is_row = row >= 0
    row = tl.maximum(row, 0).to(tl.int64)
    accepted = tl.load(num_accepted + row)
    context = tl.load(seq_lens + row) - tl.load(starts + row + 1) + tl.load(starts + row)
    first, first_token, capacity = tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 4)
    tl.store(indices + nth, tl.where(is_row, first_token + accepted, 0).to(tl.int64))
    entry = tl.load(entries + tl.maximum(first, 0), mask=is_row, other=0)
    tl.store(row_entries + nth, tl.where(is_row, entry, padding_entry).to(tl.int64))
    for step in range(depth):
        wanted = context + accepted + 1 + step
        position = tl.maximum(tl.minimum(wanted, capacity - 1), 0)  # without a block a draft is wrong, and harmless
        has_slot = is_row & (wanted < capacity)
        block = tl.load(table + row * table_row + position // block_size, mask=has_slot, other=0)
        slot = block.to(tl.int64) * block_size + position % block_size
        length = tl.where(is_row, position + 1, 0)
        index = step * num_rows + nth
        tl.store(positions + index, position.to(tl.int64))
        tl.store(slots + index, tl.where(has_slot, slot, -1))
        tl.store(lengths + index, length)
        each = tl.cdiv(tl.cdiv(length, UNIT), SPLITS) * UNIT
        count = tl.cdiv(length, tl.maximum(each, 1))
        for split in tl.static_range(SPLITS):
            out = splits + (index * SPLITS + split) * SPLIT_FIELDS
            tl.store(out, tl.where(split < count, nth, PADDING_ROW))
            tl.store(out + 1, split * each)
            tl.store(out + 2, tl.minimum(split * each + each, length))
            tl.store(out + 3, nth * SPLITS + split)
            tl.store(out + 4, nth * SPLITS)
            tl.store(out + 5, count)
            tl.store(out + 6, length)
            tl.store(out + 7, nth)


class Places(NamedTuple):
    """Where the head computes drafted tokens, for each row of a step, and in which splits attention reads its context.
    The first dimension is that of the tokens after the first draft, but for `indices` and `entries`."""

    indices: Tensor  # [rows] int64: the row's last right token in the step
    entries: Tensor  # [rows] int64: in the sampling state
    positions: Tensor  # [depth, rows] int64
    slots: Tensor  # [depth, rows] int64
    lengths: Tensor  # [depth, rows] int32
    splits: Tensor  # [depth, rows * splits, SPLIT_FIELDS] int32

    @classmethod
    def allocate(cls, num_rows: int, depth: int, num_splits: int, device: torch.device) -> Places:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            zeros(num_rows), zeros(num_rows), zeros(depth, num_rows), zeros(depth, num_rows),
            zeros(depth, num_rows, dtype=torch.int32),
            zeros(depth, num_rows * num_splits, SPLIT_FIELDS, dtype=torch.int32),
        )  # fmt: skip


def place_drafts(
    rows: Tensor, num_accepted: Tensor, starts: Tensor, seq_lens: Tensor, entries: Tensor, table: Tensor,
    block_size: int, padding_entry: int, places: Places,
) -> None:  # fmt: skip
    """rows [n, FIELDS]: all rows of a step, as `accept_drafts` takes them; padding rows are -1. The others as there and
    in `Paging`. It is launched without PDL: what comes later may read its lists of work before it waits."""
    depth, num_rows = places.positions.shape
    num_splits = places.splits.shape[1] // num_rows
    _place[(num_rows,)](
        rows, num_accepted, starts, seq_lens, entries, table, places.indices, places.entries, places.positions,
        places.slots, places.lengths, places.splits, num_rows, padding_entry, block_size, table.stride(0), depth,
        SPLITS=num_splits, UNIT=UNIT, FIELDS=FIELDS, SPLIT_FIELDS=SPLIT_FIELDS, PADDING_ROW=PADDING_ROW, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_drafts"])
def _fill(tokens, starts, entries, drafts, num_drafts, drafts_row, DEPTH: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    entry = tl.load(entries + row)
    if entry >= 0:
        start = tl.load(starts + row)
        nth = tl.arange(0, DEPTH)
        exists = (nth < tl.load(starts + row + 1) - start - 1) & (nth < num_drafts)
        token = tl.load(drafts + nth.to(tl.int64) * drafts_row + entry, mask=exists, other=0)
        tl.store(tokens + start + 1 + nth, token, mask=exists)


def fill_drafts(tokens: Tensor, starts: Tensor, entries: Tensor, drafts: Tensor, num_rows: int) -> None:
    """The tokens after each row's first are drafts[:, entries[row]], for rows whose entry is not -1.

    drafts [depth, entries] int64; starts [rows + 1] int32; entries [rows] int32."""
    depth = drafts.shape[0]
    _fill[(num_rows,)](
        tokens, starts, entries, drafts, depth, drafts.stride(0), DEPTH=triton.next_power_of_2(depth), num_warps=1,
        **pdl_options(),
    )  # fmt: skip


KEPT_COLUMNS = 4096  # of a token's states, for one program


@triton.jit(do_not_specialize=["first_kept"])
def _keep(
    rows, num_accepted, paths, path_row, tokens, positions, slots, entries, last_tokens, states, kept_states,
    kept_tokens, kept_positions, kept_slots, first_kept, width,
    IS_DECODE: tl.constexpr, FIELDS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    wait_for_previous(PDL)
    nth, depth = tl.program_id(0), tl.program_id(1)  # of a row: its last right token before this step, and right drafts
    first_token, first_sample, before, accepted, count, path = nth, nth, nth, 0, 0, paths
    if not IS_DECODE:
        fields = rows + nth * FIELDS
        row = tl.load(fields).to(tl.int64)
        first_sample, first_token, count = tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3)
        before = tl.load(fields + 5)
        accepted = tl.load(num_accepted + row)
        path = paths + row * path_row
    out = (first_kept + before + depth).to(tl.int64)
    if depth <= count:
        if depth > accepted:
            tl.store(kept_slots + out, -1)
        else:
            source = first_token
            if depth > 0:
                source = first_token + 1 + tl.load(path + depth - 1)
            columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
            inside = columns < width
            state = tl.load(states + source.to(tl.int64) * width + columns, mask=inside, other=0.0)
            tl.store(kept_states + out * width + columns, state, mask=inside)
            if depth < accepted:
                following = tl.load(tokens + first_token + 1 + tl.load(path + depth))
            else:
                following = tl.load(last_tokens + tl.load(entries + first_sample))
            tl.store(kept_tokens + out, following)
            tl.store(kept_positions + out, tl.load(positions + first_token) + depth)
            tl.store(kept_slots + out, tl.load(slots + first_token + depth))


class Kept(NamedTuple):
    """Tokens whose states are kept until a head computes their keys. Those whose slot is -1 do not count."""

    states: Tensor  # [tokens, width]: the features of the head
    tokens: Tensor  # [tokens] int64: the token after each
    positions: Tensor  # [tokens] int64
    slots: Tensor  # [tokens] int64

    @classmethod
    def allocate(cls, count: int, width: int, dtype: torch.dtype, device: torch.device) -> Kept:
        tokens, positions = (torch.zeros(count, dtype=torch.int64, device=device) for _ in range(2))
        slots = torch.full((count,), -1, dtype=torch.int64, device=device)
        return cls(torch.zeros(count, width, dtype=dtype, device=device), tokens, positions, slots)


def keep_states(
    kept: Kept, first: int, rows: Tensor | None, num_rows: int, max_drafts: int, num_accepted: Tensor, paths: Tensor,
    tokens: Tensor, positions: Tensor, slots: Tensor, entries: Tensor, last_tokens: Tensor, states: Tensor,
) -> None:  # fmt: skip
    """Keep the right tokens of a step, from index `first` on. The tokens of rows that are not right take room too.

    rows [num_rows, FIELDS] as `accept_drafts` takes them, None for a step of single tokens; num_accepted, paths and
    last_tokens as that leaves them; the others are of the step. An accepted side branch is kept as the chain that it
    has become."""
    width = states.shape[1]
    _keep[(num_rows, 1 + max_drafts, triton.cdiv(width, KEPT_COLUMNS))](
        num_accepted if rows is None else rows, num_accepted, paths, paths.stride(0), tokens, positions, slots, entries,
        last_tokens, states, *kept, first, width, IS_DECODE=rows is None, FIELDS=FIELDS, COLUMNS=KEPT_COLUMNS,
        num_warps=8, **pdl_options(),
    )  # fmt: skip
