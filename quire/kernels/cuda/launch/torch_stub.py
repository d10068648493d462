"""A stub of torch for kernel launches: tensors with a shape and a type, without memory.

Importing torch takes seconds, as long as compiling all kernels. `precompile.py` compiles with this stub in processes of
its own, while the engine's process imports torch. It is the only user.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any


@dataclass(frozen=True, slots=True)
class DType:
    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"


DTYPES = {
    name: DType(name, size)
    for name, size in [
        ("float64", 8), ("float32", 4), ("float16", 2), ("bfloat16", 2), ("float8_e4m3fn", 1), ("int64", 8),
        ("int32", 4), ("uint8", 1), ("int8", 1), ("bool", 1),
    ]
}  # fmt: skip


class Tensor:
    """Shape and strides. The address is 0, which has every alignment."""

    def __init__(self, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...] | None = None) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = "meta"
        self._strides = strides or tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))

    def data_ptr(self) -> int:
        return 0

    def stride(self, axis: int | None = None) -> Any:
        return self._strides if axis is None else self._strides[axis]

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_contiguous(self) -> bool:
        return self._strides == Tensor(self.shape, self.dtype)._strides

    def element_size(self) -> int:
        return self.dtype.itemsize

    def contiguous(self) -> Tensor:
        return self if self.is_contiguous() else Tensor(self.shape, self.dtype)

    def unsqueeze(self, axis: int) -> Tensor:
        shape, strides = list(self.shape), list(self._strides)
        shape.insert(axis, 1)
        strides.insert(axis, self._strides[axis] * self.shape[axis])
        return Tensor(tuple(shape), self.dtype, tuple(strides))

    def narrow(self, axis: int, size: int) -> Tensor:
        """The first `size` entries along one dimension. The start makes no difference here."""
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
        return Tensor(shape, self.dtype, self._strides)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice) -> Tensor:
        return self.narrow(0, len(range(*index.indices(self.shape[0]))))


def empty(*shape: Any, dtype: DType = DTYPES["float32"], device: object = None) -> Tensor:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
    return Tensor(tuple(sizes), dtype)


def tensor(numbers: list[int], dtype: DType, device: object = None) -> Tensor:
    return Tensor((len(numbers),), dtype)


def install(capability: tuple[int, int]) -> None:
    """Make `import torch` find this stub, with a GPU of that compute capability."""
    torch: Any = ModuleType("torch")
    torch.__dict__.update(DTYPES, Tensor=Tensor, dtype=DType, device=str, empty=empty, zeros=empty, tensor=tensor)
    torch.cuda = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 0,
        get_device_capability=lambda device=None: capability,
        get_device_properties=lambda device: SimpleNamespace(multi_processor_count=132),
    )
    torch.nn = ModuleType("torch.nn")
    torch.nn.functional = ModuleType("torch.nn.functional")
    torch.nn.functional.linear = lambda x, weight: empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype)
    modules = {"torch": torch, "torch.nn": torch.nn, "torch.nn.functional": torch.nn.functional}
    assert not modules.keys() & sys.modules.keys(), "torch is already imported"
    sys.modules.update(modules)
