"""Arrays: how a backend allocates, fills and copies its arrays.

The engine's own code works on numpy arrays and on torch tensors alike: it only indexes them. Where they differ, it
calls these methods. `NumpyArrays` is for quire's CPU kernels, which need no torch. `TorchArrays` (`torch_arrays.py`) is
for torch's ops and for GPUs. Types are named by strings, because numpy has no bfloat16.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = Any  # a numpy array or a torch tensor, by backend
Shape = tuple[int, ...]

ITEM_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "int8": 1, "uint8": 1,
    "float8_e4m3fn": 1,
}  # fmt: skip
HUGE_PAGE = 1 << 21


class Arrays(Protocol):
    """Arrays on one device."""

    @property
    def device(self) -> str:
        """cpu or cuda"""
        ...

    def zeros(self, shape: Shape, dtype: str) -> Array: ...

    def empty(self, shape: Shape, dtype: str) -> Array: ...

    def put(self, numbers: Any, dtype: str) -> Array:
        """Copy numbers (a sequence or a numpy array) to the device, asynchronously on a GPU."""
        ...

    def fill(self, target: Array, index: Array, value: float) -> None:
        """target[index] = value, for a target of one dimension."""
        ...

    def copy(self, target: Array, source: Array) -> None:
        """Copy between arrays of one shape, asynchronously on a GPU."""
        ...

    def map_bytes(self, shape: Shape) -> Array:
        """Zeroed bytes. On a CPU a page takes memory when it is first written."""
        ...

    def view_as(self, data: Array, dtype: str) -> Array:
        """The same memory in another type. The last axis of `data` is contiguous and changes its length."""
        ...

    def view_bytes(self, data: Array, dtype: str, shape: Shape) -> Array:
        """Bytes [n, bytes] as [n, *shape] of another type, without a copy."""
        ...

    def host_empty(self, shape: Shape, dtype: str) -> Array:
        """Memory of the host that the device can copy from and to asynchronously."""
        ...

    def to_numpy(self, data: Array) -> NDArray[Any]:
        """The numbers on the host, after the device has computed them. May share memory with `data`."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all work."""
        ...


class NumpyArrays:
    """Arrays of the host. Types that numpy lacks are held as unsigned integers of the same size."""

    device = "cpu"

    def zeros(self, shape: Shape, dtype: str) -> Array:
        return np.zeros(shape, numpy_type(dtype))

    def empty(self, shape: Shape, dtype: str) -> Array:
        return np.empty(shape, numpy_type(dtype))

    host_empty = empty

    def put(self, numbers: Any, dtype: str) -> Array:
        return np.array(numbers, numpy_type(dtype))

    def fill(self, target: Array, index: Array, value: float) -> None:
        target[index] = value

    def copy(self, target: Array, source: Array) -> None:
        target[...] = source

    def map_bytes(self, shape: Shape) -> Array:
        return map_pages(math.prod(shape), huge=False).reshape(shape)

    def view_as(self, data: Array, dtype: str) -> Array:
        return data.view(numpy_type(dtype))

    def view_bytes(self, data: Array, dtype: str, shape: Shape) -> Array:
        view = self.view_as(data, dtype).reshape(len(data), *shape)
        assert np.may_share_memory(view, data)
        return view

    def to_numpy(self, data: Array) -> NDArray[Any]:
        return np.asarray(data)

    def synchronize(self) -> None:
        pass


def numpy_type(name: str) -> np.dtype[Any]:
    return np.dtype({"bfloat16": "uint16", "float8_e4m3fn": "uint8"}.get(name, name))


def map_pages(num_bytes: int, *, huge: bool) -> NDArray[np.uint8]:
    """Zeroed bytes, aligned to 2 MiB. A page takes memory when it is first written.

    `huge` is for memory that is used from its beginning on. A short request in a cache writes to a page in each layer,
    and with huge pages each would take 2 MiB.
    """
    pages = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and num_bytes >= HUGE_PAGE:
        with suppress(AttributeError, OSError):  # macOS has no such advice, and some kernels refuse it
            pages.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(pages, np.uint8)
    first = -whole.ctypes.data % HUGE_PAGE
    return whole[first : first + num_bytes]
