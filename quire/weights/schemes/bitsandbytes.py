"""bitsandbytes: NF4 and FP4 in flat blocks, with scales that may be codes themselves, and LLM.int8.

    4 bits   weight [rows * cols / 2, 1] uint8, high nibble first; weight.absmax, weight.quant_map [16], and
             weight.quant_state.bitsandbytes__nf4: JSON as bytes. Double quantization: absmax is uint8, an index into
             weight.nested_quant_map [256], times weight.nested_absmax for each nested block, plus an offset
    8 bits   weight [rows, cols] int8, SCB [rows] float32: value = code * SCB / 127

quire multiplies LLM.int8 weights with all activations, so columns of outliers need no path of their own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from quire.layers.source import Shape
from quire.quant.code_format import CodeFormat, CodeRows
from quire.weights.fields import Fields
from quire.weights.safetensors import SafetensorsFiles
from quire.weights.schemes.layouts import check_types, int8
from quire.weights.schemes.scheme import CodeMatrix, Module, Rows, unpack_nibbles

STATE = "weight.quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")
MAX_STATE = 1 << 16  # bytes of JSON
MAX_OFFSET = float(np.finfo(np.float32).max)

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    kind: str | None  # nf4 or fp4; None: LLM.int8

    @classmethod
    def read(cls, fields: Fields) -> BitsAndBytes:
        if fields.flag("load_in_8bit", False):
            return cls(None)
        if not fields.flag("load_in_4bit", False):
            raise fields.bad("neither load_in_4bit nor load_in_8bit is true")
        kind = fields.text("bnb_4bit_quant_type", "fp4")
        if kind not in KINDS:
            raise fields.unsupported(f"bnb_4bit_quant_type {kind!r} is not supported; quire reads nf4 and fp4.")
        if fields.text("bnb_4bit_quant_storage", "uint8") != "uint8":
            raise fields.unsupported("bnb_4bit_quant_storage other than uint8 is not supported.")
        return cls(kind)

    def may_stay_unread(self, name: str, files: SafetensorsFiles) -> bool:
        return name.endswith(".weight_format")

    def matrix(self, module: Module) -> CodeMatrix | None:
        if self.kind is None:
            return int8(module, "SCB", None, None, factor=np.float32(1 / 127)) if module.has("SCB") else None
        state = STATE + self.kind
        if not module.has(state) and not module.has("weight.absmax"):
            return None
        return four_bits(module, state, self.kind)


@dataclass(frozen=True, slots=True)
class State:
    """What the JSON says, checked against the matrix."""

    block: int
    nested_block: int | None
    offset: np.float32

    @classmethod
    def read(cls, module: Module, kind: str, expected: str) -> State:
        raw = module.read(kind)
        try:
            fields = Fields(json.loads(raw[:MAX_STATE].tobytes()), f"{module.name}.{kind}")
            shape = fields.get("shape")
        except (ValueError, AttributeError, RecursionError) as error:
            raise module.bad(f"{kind} is no JSON object: {error}") from None
        if shape != [module.rows, module.cols]:
            raise module.bad(f"{kind} has the shape {shape} instead of [{module.rows}, {module.cols}]")
        if fields.text("quant_type") != expected:
            raise module.bad(f"{kind} is of type {fields.text('quant_type')!r} instead of {expected!r}")
        nested = fields.count("nested_blocksize") if fields.has("nested_blocksize") else None
        offset = fields.get("nested_offset") or 0.0
        if type(offset) not in (int, float) or not abs(offset) <= MAX_OFFSET:
            raise module.bad(f"{kind} has the nested_offset {offset!r}, and must have a finite number")
        return cls(fields.count("blocksize"), nested, np.float32(offset))


def four_bits(module: Module, state_kind: str, expected: str) -> CodeMatrix:
    size = module.rows * module.cols
    if not module.has(state_kind) or not module.fits(state_kind, module.shape(state_kind), ("U8",)):
        return CodeMatrix({module.stored_name(state_kind): (1,)}, CodeFormat("uint", 4, 1, "f32", zero=0), read_nothing)
    state = State.read(module, state_kind, expected)
    if size % 2 or size % state.block:
        raise module.bad(f"blocks of {state.block} do not divide the {size} values")
    num_blocks = size // state.block
    needed: dict[str, Shape] = {
        state_kind: module.shape(state_kind),
        "weight": (size // 2, 1),
        "weight.absmax": (num_blocks,),
        "weight.quant_map": (16,),
    }
    types = {"weight": ("U8",), "weight.absmax": ("F32",), "weight.quant_map": ("F32",)}
    if state.nested_block is not None:
        needed |= {"weight.nested_absmax": (-(-num_blocks // state.nested_block),), "weight.nested_quant_map": (256,)}
        types |= {"weight.absmax": ("U8",), "weight.nested_absmax": ("F32",), "weight.nested_quant_map": ("F32",)}
    check_types(module, dict(types))
    group = gcd(state.block, module.cols)  # blocks are flat: one may continue in the next row
    has_map = module.has("weight.quant_map") and module.shape("weight.quant_map") == (16,)
    table = tuple(module.read_floats("weight.quant_map").tolist()) if has_map else (0.0,) * 16
    if not np.isfinite(table).all():
        raise module.bad("weight.quant_map has values that are not finite numbers")

    def read(rows: Rows) -> CodeRows:
        raw = module.read("weight").reshape(module.rows, -1) if module.cols % 2 == 0 else odd_rows(module)
        codes = unpack_nibbles(raw[rows], high_first=True) if module.cols % 2 == 0 else raw[rows]
        starts = np.arange(module.rows)[rows][:, None] * module.cols + np.arange(0, module.cols, group)
        return CodeRows(np.ascontiguousarray(codes), read_scales(module, state, starts // state.block))

    tensors = {module.stored_name(kind): shape for kind, shape in needed.items()}
    return CodeMatrix(tensors, CodeFormat("table", 4, group, "f32", table=table), read)


def odd_rows(module: Module) -> NDArray[np.uint8]:
    """All codes of a matrix with an odd number of columns, one a byte: rows begin within bytes."""
    return unpack_nibbles(module.read("weight").reshape(1, -1), high_first=True).reshape(module.rows, module.cols)


def read_scales(module: Module, state: State, blocks: NDArray[np.int64]) -> Floats:
    absmax = module.read("weight.absmax")[blocks]
    if state.nested_block is None:
        return np.ascontiguousarray(absmax, np.float32)
    nested = module.read("weight.nested_absmax")[blocks // state.nested_block]
    scales: Floats = module.read("weight.nested_quant_map")[absmax] * nested + state.offset
    return scales


def read_nothing(rows: Rows) -> CodeRows:
    raise AssertionError("the survey refuses files that lack the state")
