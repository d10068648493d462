"""Kernels that follow each other without a gap: programmatic dependent launch, on GPUs that have it.

A kernel's programs are started while the one before it still runs. Each waits with `after_last` before it touches what
an earlier kernel of the same step writes or reads; what does not change within a step, such as weights, lists of work,
block tables and the keys of earlier steps, may be loaded before that. `deliver.py` begins each step and is not chained,
so all kernels of earlier steps have ended and the step's numbers have arrived. One program of each kernel has to wait,
even if none has anything to do, or the next kernel would be let go too soon.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next(CHAINED: tl.constexpr):
    """The next kernel may be started."""
    if CHAINED:
        gdc_launch_dependents()


@triton.jit
def after_last(CHAINED: tl.constexpr):
    """All earlier kernels have ended."""
    if CHAINED:
        gdc_wait()


@triton.jit
def after_last_once(CHAINED: tl.constexpr):
    """For programs that have nothing to do: the first one waits for all. The others would only be in the way of the
    next kernel's."""
    if tl.program_id(0) == 0:
        after_last(CHAINED)


@cache
def is_chained() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def chained() -> dict[str, bool]:
    """What a launch of such a kernel is given."""
    return {"CHAINED": is_chained(), "launch_pdl": is_chained()}
