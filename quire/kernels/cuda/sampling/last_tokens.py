"""Copies each request's last token from the sampling state to the step's tokens. The host may not have it yet."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous

ROWS = 256


@triton.jit(do_not_specialize=["num_rows"])
def _fill_last_tokens(tokens, starts, entries, last_tokens, num_rows, ROWS: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    wait_for_previous(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    entry = tl.load(entries + rows, mask=rows < num_rows, other=-1)
    has_entry = entry >= 0
    token = tl.load(last_tokens + entry, mask=has_entry, other=0)
    tl.store(tokens + tl.load(starts + rows, mask=has_entry, other=0), token, mask=has_entry)


def fill_last_tokens(tokens: Tensor, starts: Tensor, entries: Tensor, last_tokens: Tensor, num_rows: int) -> None:
    """tokens[starts[row]] = last_tokens[entries[row]], for rows whose entry is not -1."""
    _fill_last_tokens[(triton.cdiv(num_rows, ROWS),)](
        tokens, starts, entries, last_tokens, num_rows, ROWS=ROWS, num_warps=2, **pdl_options()
    )
