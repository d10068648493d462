"""Failures of a GPU as errors with a remedy: out of memory, kernels that do not compile, a lost device.

`build.py` uses this while an engine is built, `engine.py` when a step has failed. torch is imported only for a GPU.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from quire.core.plan import Plan
from quire.engine.memory import describe_gpu_memory
from quire.errors import DeviceLost, NotEnoughMemory, UnsupportedModel
from quire.kernels import Kernels

LESS_MEMORY = "lower kv_memory, max_tokens_per_step or max_requests"


@contextmanager
def explain_out_of_memory(what: str, remedy: str, device: str) -> Iterator[None]:
    """For work on a GPU at start: raise out-of-memory errors and a lost device as quire's errors."""
    try:
        yield
    except RuntimeError as error:
        if device != "cuda":
            raise
        if is_out_of_memory(error):
            raise NotEnoughMemory(
                f"The GPU's memory is too small for {what}; {describe_gpu_memory()}. {remedy}"
            ) from error
        if loss := find_device_loss():
            raise loss from error
        raise


@contextmanager
def explain_kernel_errors(ops: Kernels) -> Iterator[None]:
    """For the first step on a GPU, in which Triton compiles the kernels: raise its errors as UnsupportedModel."""
    if ops.fused is None:
        yield
        return
    from triton import TritonError

    try:
        yield
    except (TritonError, RuntimeError) as error:
        if is_out_of_memory(error) or find_device_loss():
            raise
        raise UnsupportedModel(
            f"quire's own GPU kernels cannot run this model on this GPU: {last_line(error)} Set kernels to 'torch', "
            "which is slower, or try another dtype."
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Torch has a class for its own allocations. Errors of the driver, cuBLAS and Triton differ in their text only."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in ("out of memory", "ALLOC_FAILED"))


def find_device_loss() -> DeviceLost | None:
    """An error if the GPU has failed. After a failure every CUDA call of the process fails."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return DeviceLost(
            f"The GPU failed: {first_line(error)} This process cannot use it any more; start a new one. If that fails "
            "too, look for the GPU in nvidia-smi and the system's log."
        )
    return None


def release_memory(error: Exception) -> None:
    """Free the tensors of a failed step, and torch's cached memory, which cuBLAS and graphs cannot use."""
    import torch

    traceback.clear_frames(error.__traceback__)
    torch.cuda.empty_cache()


def describe_failure(error: Exception, plan: Plan) -> str:
    """Why a step failed, as the message for its requests."""
    if is_out_of_memory(error):
        return (
            f"The GPU ran out of memory in a step of {plan.num_tokens:,} tokens for {len(plan):,} requests. Send this "
            f"one again; if that happens often, {LESS_MEMORY}."
        )
    return f"The engine failed on this request: {error}"


def first_line(error: Exception) -> str:
    """The other lines are torch's advice on debugging."""
    return sentence(str(error).partition("\n")[0])


def last_line(error: Exception) -> str:
    """Compilers print the error in the last line."""
    return sentence(str(error).strip().rpartition("\n")[2])


def sentence(text: str) -> str:
    return text.strip().rstrip(".") + "."
