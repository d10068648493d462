"""compressed-tensors: groups of modules, each with its own number format, and modules that stay plain.

    pack-quantized   weight_packed [rows, cols * bits / 32] int32, weight_scale [rows, groups], weight_shape [2],
                     weight_zero_point [rows * bits / 32, groups] int32 if not symmetric, weight_g_idx [cols]
    int-quantized    weight [rows, cols] int8, weight_scale, weight_zero_point int8 if not symmetric
    float-quantized  weight [rows, cols] float8 e4m3, weight_scale: for the tensor, a channel or a block
    mxfp4, nvfp4     weight_packed [rows, cols / 2], weight_scale [rows, groups], weight_global_scale [1] (nvfp4)

Scales of activations stay unread: quire rounds activations for each 32 values, which is finer.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from quire.layers.source import Shape
from quire.quant.code_format import CodeFormat, CodeRows
from quire.weights.fields import Fields
from quire.weights.safetensors import FLOATS, SafetensorsFiles
from quire.weights.schemes.gptq import compile_pattern, read_order
from quire.weights.schemes.layouts import float8, int8, mxfp4, nvfp4, shape_in_file
from quire.weights.schemes.scheme import FLOAT_SCALES, CodeMatrix, Module, Rows, unpack_bits

FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision",
)  # fmt: skip
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
UNREAD = re.compile(
    r".*\.(input_scale|input_zero_point|input_global_scale|output_scale|output_zero_point|weight_shape|"
    r"[qkv]_scale|[qkv]_zero_point)"
)

Target = str | re.Pattern[str]


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """How the weights of some modules are stored."""

    targets: tuple[Target, ...]
    layout: str  # pack, int, float, nvfp4, mxfp4
    bits: int
    strategy: str
    group: int | None
    block: tuple[int, int] | None
    symmetric: bool


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    groups: tuple[WeightGroup, ...]
    ignore: tuple[Target, ...]

    @classmethod
    def read(cls, fields: Fields) -> CompressedTensors:
        if fields.text("quantization_status", "compressed") not in ("compressed", "frozen"):
            raise fields.unsupported("the weights are not compressed (quantization_status).")
        sparsity = fields.section("sparsity_config")
        if sparsity is not None and sparsity.text("format", "dense") != "dense":
            raise fields.unsupported(f"sparsity_config of format {sparsity.get('format')!r} is not supported.")
        section = fields.section("config_groups")
        if section is None or not section.values:
            raise fields.bad("config_groups is missing")
        groups = [read_group(Fields(section.values, section.where).section(name), fields) for name in section.values]
        return cls(tuple(groups), read_targets(fields, "ignore"))

    def may_stay_unread(self, name: str, files: SafetensorsFiles) -> bool:
        return bool(UNREAD.fullmatch(name))

    def matrix(self, module: Module) -> CodeMatrix | None:
        if matches(self.ignore, module.names) or is_plain(module):
            return None
        is_linear = module.name != "model.embed_tokens"
        for group in self.groups:
            if matches(group.targets, module.names) or (is_linear and "Linear" in group.targets):
                return stored(group, module)
        return None


def is_plain(module: Module) -> bool:
    return module.has("weight") and module.dtype("weight") in FLOATS and not module.has("weight_scale")


def matches(targets: tuple[Target, ...], names: Collection[str]) -> bool:
    return any(
        target == name if isinstance(target, str) else target.match(name) for target in targets for name in names
    )


def read_targets(fields: Fields, key: str) -> tuple[Target, ...]:
    values = fields.get(key) or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise fields.bad(f"{key} must be a list of strings")
    return tuple(
        compile_pattern(fields, value.removeprefix("re:")) if value.startswith("re:") else value for value in values
    )


def read_group(group: Fields | None, top: Fields) -> WeightGroup:
    weights = None if group is None else group.section("weights")
    if group is None or weights is None:
        raise top.unsupported("a group without weights in config_groups is not supported.")
    stored_as = group.text("format", top.text("format", ""))
    if stored_as not in FORMATS or stored_as == "mixed-precision":
        raise top.unsupported(f"format {stored_as!r} is not supported; quire reads {', '.join(FORMATS[:-1])}.")
    bits, kind = weights.count("num_bits"), weights.text("type", "int")
    strategy = weights.text("strategy", "group" if weights.has("group_size") else "tensor")
    if strategy not in STRATEGIES:
        raise top.unsupported(
            f"strategy {strategy!r} of weights is not supported; quire reads {', '.join(STRATEGIES)}."
        )
    layout = choose_layout(stored_as, kind)
    if bits not in {"pack": (2, 3, 4, 8), "int": (8,), "float": (8,)}.get(layout, (4,)):
        raise top.unsupported(f"{bits}-bit {kind} weights as {stored_as} are not supported.")
    size = weights.count("group_size", -1, least=-1)
    if size == 0 or (strategy == "group" and size == -1):
        raise weights.bad(f"group_size is {size}, and must be above 0")
    symmetric = weights.flag("symmetric", True)
    if layout not in ("pack", "int") and not symmetric:
        raise top.unsupported(f"weights that are not symmetric as {stored_as} are not supported.")
    block = read_block(weights) if strategy == "block" else None
    grouped = size if strategy in ("group", "tensor_group") else None
    return WeightGroup(read_targets(group, "targets"), layout, bits, strategy, grouped, block, symmetric)


def choose_layout(stored_as: str, kind: str) -> str:
    if stored_as == "naive-quantized":
        return "float" if kind == "float" else "int"
    return stored_as.partition("-")[0]


def read_block(weights: Fields) -> tuple[int, int]:
    block = weights.get("block_structure")
    if not isinstance(block, list) or len(block) != 2 or any(type(n) is not int or n < 1 for n in block):
        raise weights.bad(f"block_structure is {block!r}, and must be two numbers above 0")
    return block[0], block[1]


def stored(group: WeightGroup, module: Module) -> CodeMatrix:
    if group.layout == "pack":
        return packed(group, module)
    if group.layout == "int":
        return int8(module, "weight_scale", group.group, None if group.symmetric else "weight_zero_point")
    if group.layout == "nvfp4":
        return nvfp4(module, "weight_packed", "weight_scale", "weight_global_scale", divide=True)
    if group.layout == "mxfp4":
        return mxfp4(module, "weight_packed", "weight_scale")
    block = group.block or (None if group.group is None else (1, group.group))
    return float8(module, "weight_scale", block)


def packed(group: WeightGroup, module: Module) -> CodeMatrix:
    bits, size = group.bits, group.group or module.cols
    groups = module.num_groups(size)
    words, row_words = -(-module.cols * bits // 32), -(-module.rows * bits // 32)
    needed: dict[str, tuple[Shape, tuple[str, ...]]] = {
        "weight_packed": ((module.rows, words), ("I32",)),
        "weight_scale": ((module.rows, groups), FLOAT_SCALES),
    }
    if group.strategy == "tensor":
        needed["weight_scale"] = shape_in_file(module, "weight_scale", [(1,), (), (1, 1)]), FLOAT_SCALES
    if not group.symmetric:
        needed["weight_zero_point"] = ((row_words, groups), ("I32",))
    if module.has("weight_g_idx"):
        needed["weight_g_idx"] = ((module.cols,), ("I32", "I64"))
    fits = [module.fits(kind, *what) for kind, what in needed.items()]
    if module.has("weight_shape") and module.fits("weight_shape", (2,), ("I64", "I32")):
        shape = tuple(module.read("weight_shape").tolist())
        if shape != (module.rows, module.cols):
            raise module.bad(f"weight_shape is {list(shape)} instead of [{module.rows}, {module.cols}]")
    order = read_order(module, groups, "weight_g_idx") if module.has("weight_g_idx") and all(fits) else None
    zero = 1 << (bits - 1) if group.symmetric else None
    format = CodeFormat("uint", bits, size, module.scale_type("weight_scale"), zero=zero, has_zeros=zero is None)

    def read(rows: Rows) -> CodeRows:
        codes = unpack_bits(module.read("weight_packed")[rows].view(np.uint32), bits)[:, : module.cols]
        codes = codes if order is None else codes[:, order]
        index, scales = np.arange(module.rows)[rows], module.read_floats("weight_scale")
        scales = scales[rows] if scales.size > 1 else np.full((len(index), 1), scales.reshape(-1)[0], np.float32)
        zeros = None if zero is not None else module_zeros(module, bits)[rows]
        return CodeRows(np.ascontiguousarray(codes), np.ascontiguousarray(scales), zeros)

    return CodeMatrix({module.stored_name(k): shape for k, (shape, _) in needed.items()}, format, read, order)


def module_zeros(module: Module, bits: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """[rows, groups]"""
    words = np.ascontiguousarray(module.read("weight_zero_point").T).view(np.uint32)
    return np.ascontiguousarray(unpack_bits(words, bits)[:, : module.rows].T)
