"""Tokens of the last step, put where the next one reads them: the host need not have seen them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.chain import after_last, chained, let_next

ROWS = 256


@triton.jit(do_not_specialize=["num_rows"])
def _feed(tokens, starts, feeds, sampled, num_rows, ROWS: tl.constexpr, CHAINED: tl.constexpr):
    let_next(CHAINED)
    after_last(CHAINED)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    feed = tl.load(feeds + rows, mask=rows < num_rows, other=-1)
    wanted = feed >= 0
    token = tl.load(sampled + feed, mask=wanted, other=0)
    tl.store(tokens + tl.load(starts + rows, mask=wanted, other=0), token, mask=wanted)


def feed(tokens: Tensor, starts: Tensor, feeds: Tensor, sampled: Tensor, num_rows: int) -> None:
    _feed[(triton.cdiv(num_rows, ROWS),)](tokens, starts, feeds, sampled, num_rows, ROWS=ROWS, num_warps=2, **chained())
