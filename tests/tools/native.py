"""What the tests of the C++ kernels share: which instruction sets run here, matrices in panels, the paged cache in the
kernels' own layout, and tiny models that fit them. Importing this skips the module where the kernels cannot run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels import Kernels, isa, select_native
from quire.kernels.cache_spec import KVCacheSpec
from quire.kernels.cpu.native import Missing, Native, load, usable
from quire.kernels.cpu.native_ops import NativeOps
from quire.kernels.paging import LayerCache, Paging
from quire.kernels.torch_arrays import TorchArrays
from quire.layers.source import Part
from quire.models.config import ModelConfig, Rope
from quire.models.decoder import Decoder
from quire.models.registry import MODELS
from quire.models.structure import Structure
from quire.quant.code_format import E2M1, IQ4, NF4, CodeFormat, CodeRows, pack_codes
from quire.quant.dense import Dense
from quire.quant.ggml_types import GGMLType
from quire.quant.panels import PanelWeight, join
from quire.quant.weight import Weight
from quire.weights.random_tensors import RandomTensors
from tests.tools.paged import PagedCache
from tests.tools.tiny import FAMILIES

MODULE: Any = load()
if isinstance(MODULE, Missing):
    pytest.skip(MODULE.reason, allow_module_level=True)
ISAS = usable(isa.prepare(), MODULE.built())
if not ISAS:
    pytest.skip(
        "this CPU runs none of the instruction sets that the C++ kernels are built for", allow_module_level=True
    )

CPU = "cpu"
THREADS = (1, 2, 5)
CACHE_TYPES = ("float32", "bfloat16", "int8", "fp8")

each_isa = pytest.mark.parametrize("name", ISAS)
each_thread_count = pytest.mark.parametrize("threads", THREADS)
each_cache_type = pytest.mark.parametrize("kind", CACHE_TYPES)


def native_of(name: str = ISAS[0], threads: int = 2, few_rows: int = 32) -> Native:
    return Native(MODULE, name, threads, dict.fromkeys((*QUANTIZED, *GROUPED), few_rows))


def as_arrays(x: Any) -> Any:
    """Tensors, also those of caches and of paging, as numpy arrays over the same memory."""
    if isinstance(x, Tensor):
        held_as = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}.get(x.dtype)
        return (x if held_as is None else x.view(held_as)).numpy()
    if isinstance(x, LayerCache):
        return replace(x, k=as_arrays(x.k), v=as_arrays(x.v))
    if isinstance(x, Paging):
        names = ("query_starts", "seq_lens", "block_tables", "slot_mapping", "paths", "encoder_lens")
        return replace(x, **{name: as_arrays(getattr(x, name)) for name in names})
    return type(x)(map(as_arrays, x)) if type(x) in (list, tuple) else x


def as_tensors(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return torch.from_numpy(x)
    return tuple(map(as_tensors, x)) if type(x) is tuple else x


class OnTensors:
    """An object whose methods take and return tensors in place of numpy arrays."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.inner, name)
        if not callable(member):
            return member
        return lambda *arguments, **options: as_tensors(
            member(*map(as_arrays, arguments), **{key: as_arrays(value) for key, value in options.items()})
        )


def ops_of(name: str = ISAS[0], threads: int = 2) -> Any:
    """NativeOps on tensors, as the reference's are."""
    return OnTensors(NativeOps(native_of(name, threads)))


def weight_of(panels: Sequence[Any], native: Native) -> Any:
    """A PanelWeight on tensors, as Dense is."""
    return OnTensors(PanelWeight(panels, native))


def kernels_of(name: str = ISAS[0], threads: int = 2) -> Kernels:
    return select_native(native_of(name, threads))


def tensor_kernels_of(name: str = ISAS[0], threads: int = 2) -> Kernels:
    """The same on tensors. A model on them runs op by op."""
    kernels, ops = kernels_of(name, threads), ops_of(name, threads)
    names = [field.name for field in fields(Kernels) if callable(getattr(kernels, field.name))]
    wrapped = {each: getattr(ops, each) for each in names if each != "record"}
    return replace(kernels, arrays=TorchArrays("cpu"), **wrapped)


class RecordedOnTensors:
    """A model recorded on a tape over a cache of tensors, called with tensors."""

    def __init__(
        self, ops: Kernels, model: Any, cache: PagedCache, max_tokens: int, tap_layers: Sequence[int] = ()
    ) -> None:
        self.layers = [as_arrays(layer) for layer in cache.layers]
        self.recorded = ops.record(model, self.layers, max_tokens, tap_layers)

    def __call__(self, tokens: Tensor, positions: Tensor, paging: Paging, kv: Any) -> Tensor:
        return as_tensors(self.recorded(*map(as_arrays, (tokens, positions, paging)), self.layers))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded_activations(x: Tensor) -> Tensor:
    """What `csrc/quantize.inl` makes of activations, in float64: blocks of 32 in int8."""
    extreme = x.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
    # A number divided by a tensor would be multiplied with its reciprocal, which is not the same.
    inverse = torch.where(extreme >= 1e-36, torch.tensor(127.0) / extreme, 0.0)
    codes = (x.unflatten(-1, (-1, 32)) * inverse).round()
    return (codes * (extreme * torch.tensor(1.0 / 127.0)).double()).flatten(-2)


def kept(x: Tensor, kind: str) -> Tensor:
    """What a cache of that type gives back for keys or values [tokens, heads, head_dim]."""
    if kind == "bfloat16":
        return x.bfloat16().float()
    if kind == "float32":
        return x
    scale = x.abs().amax(-1, keepdim=True) / (448.0 if kind == "fp8" else 127.0)
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    if kind == "fp8":
        return (x * inverse).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return (x * inverse).clamp(-127, 127).round() * scale


def side_by_side(count: int, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, value: float) -> list[Tensor]:
    """Blocks of keys and of values, of which each holds both, and something else behind them."""
    sizes = [math.prod(shape) for shape in shapes]
    whole = torch.full((count, sum(sizes) + 64), value).to(dtype)
    parts = whole.split([*sizes, 64], dim=1)
    return [part.view(count, *shape) for part, shape in zip(parts, shapes, strict=False)]


class NativePagedCache(PagedCache):
    """The same tables as a PagedCache of the same seed, over caches that `cache_shapes` describes. Four -1 of int8
    are NaN where a scale stands, as are four NaN of float8."""

    def __init__(
        self,
        ops: Any,
        kind: str = "float32",
        *,
        kv_heads: int,
        head_dim: int,
        num_blocks: int = 64,
        block_size: int = 4,
        **options: Any,
    ) -> None:
        super().__init__(kv_heads=kv_heads, head_dim=head_dim, num_blocks=num_blocks, block_size=block_size, **options)
        k, v, dtype = ops.cache_shapes(KVCacheSpec(kv_heads, head_dim), kind, block_size)
        assert v is not None
        self.poison = -1 if dtype == "int8" else float("nan")
        self.layers = [
            LayerCache(*side_by_side(num_blocks, (k, v), getattr(torch, dtype), self.poison), layer.group, block_size)
            for layer in self.layers
        ]

    def _drop(self, group: int, table: list[int], index: int) -> None:
        for layer in self.layers:
            if layer.group == group:
                layer.k[table[index]] = layer.v[table[index]] = self.poison
        table[index] = 0


# Where the float16 scales of a block lie.
SCALES_AT = {
    GGMLType.Q4_0: (0,),
    GGMLType.Q4_1: (0, 2),
    GGMLType.Q5_0: (0,),
    GGMLType.Q5_1: (0, 2),
    GGMLType.Q8_0: (0,),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
}
QUANTIZED = [kind.name.lower() for kind in SCALES_AT]
# What quantization packages write, in panels.
GROUPED = {
    "int4-g32": CodeFormat("uint", 4, 32, "f16", zero=8),
    "int4z-g64": CodeFormat("uint", 4, 64, "f16", has_zeros=True),
    "int2z-g32": CodeFormat("uint", 2, 32, "f16", has_zeros=True),
    "int3z-g64": CodeFormat("uint", 3, 64, "f16", has_zeros=True),
    "int8z-g128": CodeFormat("uint", 8, 128, "f16", has_zeros=True),
    "int8-row": CodeFormat("uint", 8, 1 << 20, "f32", zero=128),
    "mxfp4-g32": CodeFormat("table", 4, 32, "bf16", table=E2M1),
    "nvfp4-g16": CodeFormat("table", 4, 16, "f32", table=E2M1),
    "nf4-g64": CodeFormat("table", 4, 64, "f32", table=NF4),
    "iq4-g32": CodeFormat("table", 4, 32, "f32", table=IQ4),
    "fp8-g128": CodeFormat("e4m3", 8, 128, "f32"),
}
DENSE = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def random_panels(format: str, rows: int, cols: int, seed: int = 0, codes: int | None = None) -> Any:
    """A matrix in panels: random blocks with scales around 0.01, all codes alike if `codes` gives their byte."""
    panels = MODULE.Panels(format, rows, cols)
    generator = torch.Generator().manual_seed(seed)
    if format in DENSE:
        values = (0.1 * torch.randn(rows, cols, generator=generator)).to(DENSE[format])
        panels.pack_dense(format, values.data_ptr(), cols, 0, rows)
        return panels
    if format in GROUPED:
        pack_codes(panels, 0, *random_codes(format, rows, cols, seed, codes))
        return panels
    kind = GGMLType[format.upper()]
    data = torch.randint(
        0, 256, (rows * cols // kind.block_size, kind.type_size), dtype=torch.uint8, generator=generator
    )
    if codes is not None:
        data.fill_(codes)
    for at in SCALES_AT[kind]:
        scales = 0.01 * (1 + torch.rand(len(data), 1, generator=generator))
        data[:, at : at + 2] = scales.half().view(torch.uint8)
    panels.pack_gguf(kind.number, data.data_ptr(), 0, rows)
    return panels


def random_codes(
    name: str, rows: int, cols: int, seed: int = 0, code: int | None = None
) -> tuple[CodeFormat, CodeRows]:
    """Codes, all alike if `code` is given, with zeros and with scales that are multiples of 2^-14 up to 2^-4."""
    format, rng = GROUPED[name], np.random.default_rng(seed)
    format = replace(format, group=min(format.group, cols))
    shape, limit = (rows, format.num_groups(cols)), 1 << format.bits
    codes = rng.integers(0, limit, (rows, cols), dtype=np.uint8)
    if format.codes == "e4m3":
        codes[(codes & 127) == 127] = 5
    if code is not None:
        codes.fill(code % limit)
    scales = rng.integers(1, 1 << 10, shape).astype(np.float32) * np.float32(2**-14)
    zeros = rng.integers(0, limit, shape, dtype=np.uint8) if format.has_zeros else None
    return format, CodeRows(codes, scales, zeros)


Formats = Callable[[str], str]


def all_of(format: str) -> Formats:
    return lambda name: format


def mixed(name: str) -> str:
    """Formats side by side in one product, and the ends of the model in 8 bits."""
    kinds = {"q_proj": "q8_0", "k_proj": "q4_1", "v_proj": "f32", "o_proj": "bf16", "down_proj": "q4_1"}
    return next((kind for part, kind in kinds.items() if part in name), "q8_0")


class PanelSource:
    """RandomWeights rounded to formats and packed into panels or, for the reference, the same numbers unpacked."""

    def __init__(self, native: Native, formats: Formats, *, dense: bool = False, seed: int = 0) -> None:
        self.native = native
        self.formats = formats
        self.dense = dense
        self.plain = RandomTensors(seed, torch.float32, CPU)

    def matrix(self, parts: Sequence[Part], cols: int) -> Weight:
        joined = join([part.rows for part in parts], [self.formats(part.name) for part in parts])
        panels = [self._panels(kind, [parts[index] for index in own], cols) for kind, own in joined]
        weight = PanelWeight(panels, self.native)
        return Dense(torch.from_numpy(weight.dense())) if self.dense else weight

    def vector(self, parts: Sequence[Part], *, plus_one: bool = False) -> Any:
        values = self.plain.vector(parts, plus_one=plus_one)
        return values if self.dense else values.numpy()

    def scalar(self, value: float) -> Any:
        return self.plain.scalar(value) if self.dense else value

    def _panels(self, kind: str, parts: Sequence[Part], cols: int) -> Any:
        width = parts[0].width(cols)
        panels = MODULE.Panels(kind, sum(part.rows for part in parts), width)
        first = 0
        for part in parts:
            values = self.plain.matrix([part], cols).dense()
            panels.pack_dense("f32", values.data_ptr(), width, first, part.rows)
            first += part.rows
        return panels


class TensorSource:
    """A source of panels and arrays, for models that run op by op on tensors."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def matrix(self, parts: Sequence[Part], cols: int) -> Any:
        return OnTensors(self.inner.matrix(parts, cols))

    def vector(self, parts: Sequence[Part], *, plus_one: bool = False) -> Tensor:
        return torch.from_numpy(self.inner.vector(parts, plus_one=plus_one))

    def scalar(self, value: float) -> Any:
        return self.inner.scalar(value)


def fitting(config: ModelConfig, head_dim: int = 16) -> ModelConfig:
    """A tiny configuration with sizes that the kernels serve and every format can hold."""
    local = replace(config.local_rope, dim=head_dim) if config.local_rope else None
    rope = replace(config.rope, dim=head_dim)
    return replace(config, hidden_size=64, intermediate_size=96, head_dim=head_dim, rope=rope, local_rope=local)


FITTING = {family: fitting(config) for family, config in FAMILIES.items()} | {
    "cohere2": replace(
        fitting(FAMILIES["llama"]),
        family="cohere2",
        windows=(9, None, 9),
        structure=Structure(norm="layer", parallel=True, shared_norm=True, unrotated=(1,), logit_scale=0.5),
    ),
    "odd": replace(
        fitting(FAMILIES["qwen3"], 32),
        num_heads=3,
        num_kv_heads=1,
        rope=Rope(16, interleaved=True),
        output_bias=True,
        attention_bias=True,
        mlp_bias=True,
        attention_softcap=2.0,
        logit_softcap=9.0,
    ),
}


def native_model(config: ModelConfig, ops: Kernels, formats: Formats = mixed, seed: int = 0) -> Decoder:
    assert ops.native is not None
    source: Any = PanelSource(ops.native, formats, seed=seed)
    return MODELS[config.family](config, TensorSource(source) if isinstance(ops.arrays, TorchArrays) else source, ops)
