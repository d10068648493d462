"""What goes wrong on a GPU, and what it means: too little memory, kernels that cannot be built, a GPU that is gone.

`engine.py` asks here, while an engine is built and when a step has failed.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire.core.plan import Plan
from quire.engine.memory import describe_free
from quire.errors import DeviceLost, NotEnoughMemory, UnsupportedModel
from quire.kernels import Kernels

LESS_WORK = "lower kv_memory, max_tokens_per_step or max_requests"


@contextmanager
def explain_out_of_memory(what: str, remedy: str, device: torch.device) -> Iterator[None]:
    """Around what is done on a GPU at start: its failures, as errors that say what to do."""
    try:
        yield
    except RuntimeError as error:
        if device.type != "cuda":
            raise
        if is_out_of_memory(error):
            raise NotEnoughMemory(
                f"The GPU's memory is too small for {what}; {describe_free(device)}. {remedy}"
            ) from error
        if loss := find_loss(device):
            raise loss from error
        raise


@contextmanager
def explain_kernel_errors(ops: Kernels) -> Iterator[None]:
    """Around a first step on a GPU: there Triton compiles our own kernels, for this GPU and these shapes."""
    if ops.fused is None:
        yield
        return
    from triton import TritonError

    try:
        yield
    except (TritonError, RuntimeError) as error:
        if is_out_of_memory(error) or find_loss(ops.device):
            raise
        raise UnsupportedModel(
            f"quire's own GPU kernels cannot run this model on this GPU: {last_line(error)} Set kernels to 'torch', "
            "which is slower, or try another dtype."
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Torch has a class for its own allocations; those of the driver, of cuBLAS and of Triton only say so."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in ("out of memory", "ALLOC_FAILED"))


def find_loss(device: torch.device) -> DeviceLost | None:
    """Whether a GPU is of no more use. One that has failed fails from then on, whatever it is asked."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return DeviceLost(
            f"The GPU failed: {first_line(error)} This process cannot use it any more; start a new one. If that fails "
            "too, look for the GPU in nvidia-smi and the system's log."
        )
    return None


def give_back_memory(error: Exception) -> None:
    """What a step that failed has left on the GPU; what torch keeps for later, cuBLAS and graphs could not use."""
    traceback.clear_frames(error.__traceback__)
    torch.cuda.empty_cache()


def explain(error: Exception, plan: Plan) -> str:
    """Why a step failed, for those who were in it."""
    if is_out_of_memory(error):
        return (
            f"The GPU ran out of memory in a step of {plan.num_tokens:,} tokens for {len(plan):,} requests. Send this "
            f"one again; if that happens often, {LESS_WORK}."
        )
    return f"The engine failed on this request: {error}"


def first_line(error: Exception) -> str:
    """The others are torch's advice on debugging it."""
    return sentence(str(error).partition("\n")[0])


def last_line(error: Exception) -> str:
    """Compilers print the place first and the trouble last."""
    return sentence(str(error).strip().rpartition("\n")[2])


def sentence(text: str) -> str:
    return text.strip().rstrip(".") + "."
