"""PDL, programmatic dependent launch: kernels that follow each other without a gap, on GPUs that have it (Hopper on).

The programs of a kernel start while the kernel before it still runs. A program calls `wait_for_previous` before it
touches what an earlier kernel of the same step writes or reads. It may load before that what does not change within a
step: weights, lists of work, block tables and the keys of earlier steps. `upload.py` begins each step and is launched
without PDL, so by then all kernels of earlier steps have ended and the step's numbers have arrived. At least one
program of each kernel must wait, even if no program has work: otherwise the kernel after it starts too early.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Allow the next kernel to start."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until all earlier kernels have ended."""
    if PDL:
        gdc_wait()


@triton.jit
def wait_for_previous_once(PDL: tl.constexpr):
    """For programs without work: only the first one waits. The others exit, so that they take no room from the next
    kernel's programs."""
    if tl.program_id(0) == 0:
        wait_for_previous(PDL)


@cache
def has_pdl() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def pdl_options() -> dict[str, bool]:
    """Options for the launch of a kernel that takes PDL."""
    return {"PDL": has_pdl(), "launch_pdl": has_pdl()}
