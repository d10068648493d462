"""TorchArrays: the `Arrays` of torch's ops and of GPUs."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.arrays import Shape, numpy_type


class TorchArrays:
    """Tensors on one device. Host memory of a GPU is pinned, so that copies are asynchronous."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._is_gpu = device == "cuda"

    def zeros(self, shape: Shape, dtype: str) -> Tensor:
        return torch.zeros(shape, dtype=torch_type(dtype), device=self.device)

    def empty(self, shape: Shape, dtype: str) -> Tensor:
        return torch.empty(shape, dtype=torch_type(dtype), device=self.device)

    def host_empty(self, shape: Shape, dtype: str) -> Tensor:
        return torch.empty(shape, dtype=torch_type(dtype), pin_memory=self._is_gpu)

    def put(self, numbers: Any, dtype: str) -> Tensor:
        """The pinned source is new memory, so the copy needs no synchronization."""
        on_host = torch.from_numpy(np.array(numbers, numpy_type(dtype)))
        return on_host.pin_memory().to(self.device, non_blocking=True) if self._is_gpu else on_host

    def fill(self, target: Tensor, index: Tensor, value: float) -> None:
        target.index_fill_(0, index, value)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def map_bytes(self, shape: Shape) -> Tensor:
        if self._is_gpu:
            return torch.zeros(shape, dtype=torch.uint8, device=self.device)
        return torch.frombuffer(mmap.mmap(-1, math.prod(shape)), dtype=torch.uint8).view(shape)

    def view_as(self, data: Tensor, dtype: str) -> Tensor:
        return data.view(torch_type(dtype))

    def view_bytes(self, data: Tensor, dtype: str, shape: Shape) -> Tensor:
        return self.view_as(data, dtype).view(-1, *shape)

    def to_numpy(self, data: Tensor) -> NDArray[Any]:
        numbers: NDArray[Any] = data.cpu().numpy()
        return numbers

    def synchronize(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize()


def torch_type(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
