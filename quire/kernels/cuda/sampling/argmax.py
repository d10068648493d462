"""The argmax of each row of the head's products, without a float32 copy of the logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous

WIDTH = 4096
MAX_SPLITS = 16
PROGRAMS = 132 * 8  # that run at once on an H200


@triton.jit(do_not_specialize=["splits"])
def _argmax(
    logits,
    entries,
    tokens,
    max_logits,
    last_tokens,
    split_tops,
    split_ids,
    arrived,
    row_stride,
    size,
    splits,
    WIDTH: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    share = tl.cdiv(tl.cdiv(size, splits), 16) * 16  # whole vector loads
    begin = split * share
    end = tl.minimum(begin + share, size)
    best = tl.full([WIDTH], float("-inf"), tl.float32)
    ids = tl.zeros([WIDTH], tl.int32)
    for start in range(begin, end, WIDTH):
        columns = start + tl.arange(0, WIDTH)
        value = tl.load(logits + row * row_stride + columns, mask=columns < end, other=float("-inf")).to(tl.float32)
        value = tl.where(value != value, float("inf"), value)
        higher = value > best
        best = tl.where(higher, value, best)
        ids = tl.where(higher, columns, ids)
    top = tl.max(best, axis=0)
    best_id = tl.min(tl.where(best == top, ids, size), axis=0)
    tl.store(split_tops + row * MAX_SPLITS + split, top)
    tl.store(split_ids + row * MAX_SPLITS + split, best_id)
    tl.debug_barrier()
    before = tl.atomic_add(arrived + row, 1, sem="acq_rel")
    if before == splits - 1:
        lanes = tl.arange(0, MAX_SPLITS)
        tops = tl.load(
            split_tops + row * MAX_SPLITS + lanes, mask=lanes < splits, other=float("-inf"), cache_modifier=".cg"
        )
        all_ids = tl.load(split_ids + row * MAX_SPLITS + lanes, mask=lanes < splits, other=size, cache_modifier=".cg")
        top = tl.max(tops, axis=0)
        token = tl.min(tl.where(tops == top, all_ids, size), axis=0).to(tl.int64)
        tl.store(max_logits + row, top)
        tl.store(tokens + row, token)
        tl.store(last_tokens + tl.load(entries + row), token)
        tl.store(arrived + row, 0)


class Argmax:
    """Finds the largest logit of each row, the first of equals. NaN counts as infinity."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._split_tops = torch.empty(max_rows * MAX_SPLITS, dtype=torch.float32, device=device)
        self._split_ids = torch.empty(max_rows * MAX_SPLITS, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def __call__(
        self, logits: Tensor, entries: Tensor, tokens: Tensor, max_logits: Tensor, last_tokens: Tensor
    ) -> None:
        """logits [rows, vocab], entries [rows] -> the first `rows` of tokens and max_logits; last_tokens[entries]."""
        rows, size = logits.shape
        assert logits.stride(1) == 1
        splits = max(1, min(MAX_SPLITS, PROGRAMS // rows))
        _argmax[(rows, splits)](
            logits, entries, tokens, max_logits, last_tokens, self._split_tops, self._split_ids, self._arrived,
            logits.stride(0), size, splits, WIDTH=WIDTH, MAX_SPLITS=MAX_SPLITS, num_warps=8, **pdl_options(),
        )  # fmt: skip
