"""The ops that models are made of, chosen for a device by `select`.

`reference` is the interface. A backend is a module with functions of the same names and meanings. An op that a backend
lacks is taken from the reference. Importing this package loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.kernels.cache_spec import BlockShape, KVCacheSpec
    from quire.kernels.cpu.native import Native

__all__ = ["Kernels", "select"]


@dataclass(frozen=True, slots=True)
class Fused:
    """Fusions of several ops, for backends that launch kernels."""

    rope_store: Callable[..., tuple[Tensor, Tensor]]  # rope and store_kv
    rope_attention: Callable[..., Tensor]  # rope, store_kv and attention
    gated_linear: Callable[[Tensor, Tensor, str], Tensor]  # linear and silu_mul or gelu_mul


@dataclass(frozen=True, slots=True)
class Kernels:
    """One device's ops; `reference` documents their arguments and results."""

    device: torch.device
    rms_norm: Callable[..., Any]  # a tensor, or (normed, sum) where a residual is passed
    layer_norm: Callable[..., Any]  # as rms_norm
    add: Callable[[Tensor, Tensor], Tensor]
    rope: Callable[..., tuple[Tensor, Tensor]]
    store_kv: Callable[..., None]
    attention: Callable[..., Tensor]
    activate: Callable[[Tensor, str], Tensor]
    silu_mul: Callable[..., Tensor]
    gelu_mul: Callable[..., Tensor]
    apply_token_bitmask: Callable[[Tensor, Tensor, Tensor], None]
    penalize: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    sample: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    cache_shapes: Callable[[KVCacheSpec, str, int], BlockShape]
    record: Callable[..., Any]
    linear: Callable[[Tensor, Tensor], Tensor]
    fused: Fused | None = None  # set on GPUs with Triton kernels
    native: Native | None = None  # set if weights must be packed for the C++ kernels
    exact: bool = False  # set on GPUs if a row's results must not depend on the other rows

    @property
    def row_unit(self) -> int:
        """A matmul of n rows takes as long as one of n rounded up to this multiple."""
        return 1 if self.fused is None else 128


def select(
    device: str | torch.device, native: Native | None = None, *, plain: bool = False, exact: bool = False
) -> Kernels:
    """The ops for a device. On a CPU: the C++ kernels if `native` is given, else torch's. On a GPU: Triton kernels;
    with `exact`, those that give the same bits in any batch; with `plain`, the reference."""
    import torch

    from quire.kernels import reference

    device = torch.device(device)
    backend = reference if plain and device.type != "cpu" else _backend(device.type, native, exact)
    names = [field.name for field in fields(Kernels) if field.name not in ("device", "fused", "native", "exact")]
    chosen = {name: getattr(backend, name, getattr(reference, name)) for name in names}
    return Kernels(device, **chosen, fused=getattr(backend, "fused", None), native=native, exact=exact)


def _backend(kind: str, native: Native | None, exact: bool) -> Any:
    if native is not None:
        assert kind == "cpu", kind
        from quire.kernels.cpu.native_ops import NativeOps

        return NativeOps(native)
    if kind == "cpu":
        from quire.kernels.cpu import ops

        return ops
    if kind == "cuda":
        from quire.kernels.cuda import exact as exact_ops
        from quire.kernels.cuda import ops as triton_ops
        from quire.kernels.cuda.attention.varlen_items import is_hopper

        if is_hopper() and not exact:
            from quire.kernels.cuda.attention import varlen  # noqa: F401  fails here if Triton lacks Gluon

        return exact_ops if exact else triton_ops
    from quire.kernels import reference

    return reference
