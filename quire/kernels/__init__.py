"""The ops that models are made of, chosen for a device by `select_native` or `select_torch`.

`reference` is the interface. A backend is a module (or an object) with functions of the same names and meanings. Torch
backends take an op that they lack from the reference. quire's CPU kernels need no torch: importing this package, and
`select_native`, load none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.arrays import Array, Arrays
    from quire.kernels.cache_spec import BlockShape, KVCacheSpec
    from quire.kernels.cpu.native import Native
    from quire.kernels.paging import LayerCache
    from quire.kernels.shares import Ranks

__all__ = ["Kernels", "select_native", "select_torch"]


@dataclass(frozen=True, slots=True)
class Fused:
    """Fusions of several ops, for backends that launch kernels."""

    rope_store: Callable[..., tuple[Tensor, Tensor]]  # rope and store_kv
    rope_attention: Callable[..., Tensor]  # rope, store_kv and attention
    gated_linear: Callable[[Tensor, Tensor, str], Tensor]  # linear and silu_mul or gelu_mul
    rope_store_latent: Callable[..., Tensor]  # rope_latent and store_latent, in place; returns the queries
    # Latent attention un-absorbed, in steps of whole prompts; None for any other step, or where a backend lacks it.
    attend_to_prompts: Callable[..., Tensor | None] = lambda *_: None


@dataclass(frozen=True, slots=True)
class Kernels:
    """One device's ops; `reference` documents their arguments and results."""

    arrays: Arrays
    rms_norm: Callable[..., Any]  # a tensor, or (normed, sum) where a residual is passed
    layer_norm: Callable[..., Any]  # as rms_norm
    add: Callable[..., Tensor]
    multiply: Callable[[Tensor, Tensor], Tensor]
    rope: Callable[..., tuple[Tensor, Tensor]]
    store_kv: Callable[..., None]
    move_kv: Callable[[Sequence[LayerCache], Sequence[tuple[Array, Array]]], None]
    attention: Callable[..., Tensor]
    activate: Callable[[Tensor, str], Tensor]
    silu_mul: Callable[..., Tensor]
    gelu_mul: Callable[..., Tensor]
    route: Callable[..., Any]  # (ids, weights), or on a tape a value that only `experts` takes
    experts: Callable[..., Any]
    rope_latent: Callable[..., tuple[Any, Any]]
    store_latent: Callable[..., None]
    head_linear: Callable[..., Any]
    logits: Callable[[Array, float | None], Array]
    apply_token_bitmask: Callable[[Array, Array, Array], None]
    count_tokens: Callable[[Array, Array, Array], None]
    penalize: Callable[[Array, Array, Array, Array], None]
    sample: Callable[[Array, Array, Array, Array], tuple[Array, Array]]
    logprobs: Callable[[Array, Array, int], tuple[Array, Array, Array, Array]]
    beam_candidates: Callable[..., tuple[Array, Array, Array, Array, Array]]
    gumbel: Callable[..., Any]  # of numpy arrays
    cache_shapes: Callable[[KVCacheSpec, str, int], BlockShape]
    record: Callable[..., Any]
    fused: Fused | None = None  # set on GPUs with Triton kernels
    native: Native | None = None  # set if weights must be packed for the C++ kernels
    linear: Callable[[Tensor, Tensor], Tensor] | None = None  # of dense matrices; not set if `native` is
    exact: bool = False  # set on GPUs if a row's results must not depend on the other rows
    ranks: Ranks | None = None  # set with tensor parallelism

    @property
    def device(self) -> str:
        return self.arrays.device

    @property
    def row_unit(self) -> int:
        """A matmul of n rows takes as long as one of n rounded up to this multiple."""
        return 1 if self.fused is None else 128


OPTIONS = ("arrays", "fused", "native", "exact", "ranks")  # the fields that are no ops


def select_native(native: Native, ranks: Ranks | None = None) -> Kernels:
    """quire's own CPU kernels. `ranks` are set with tensor parallelism."""
    from quire.kernels.arrays import NumpyArrays
    from quire.kernels.cpu.native_ops import NativeOps

    backend = NativeOps(native)
    names = [field.name for field in fields(Kernels) if field.name not in (*OPTIONS, "linear")]
    return Kernels(NumpyArrays(), **{name: getattr(backend, name) for name in names}, native=native, ranks=ranks)


def select_torch(device: str, *, plain: bool = False, exact: bool = False) -> Kernels:
    """Ops on torch tensors. On a CPU: torch's own. On a GPU: Triton kernels; with `exact`, those that give the same
    bits in any batch; with `plain`, the reference."""
    from quire.kernels import reference

    backend = reference if plain and device != "cpu" else _backend(device, exact)
    names = [field.name for field in fields(Kernels) if field.name not in OPTIONS]
    chosen = {name: getattr(backend, name, getattr(reference, name)) for name in names}
    return Kernels(reference.arrays(device), **chosen, fused=getattr(backend, "fused", None), exact=exact)


def _backend(device: str, exact: bool) -> Any:
    if device == "cpu":
        from quire.kernels.cpu import ops

        return ops
    if device == "cuda":
        from quire.kernels.cuda import exact as exact_ops
        from quire.kernels.cuda import ops as triton_ops
        from quire.kernels.cuda.attention.varlen_items import is_hopper

        if is_hopper() and not exact:
            from quire.kernels.cuda.attention import varlen  # noqa: F401  fails here if Triton lacks Gluon

        return exact_ops if exact else triton_ops
    from quire.kernels import reference

    return reference
