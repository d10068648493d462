"""GPTQ: codes packed along the inputs, scales and zeros of groups of inputs, and with desc_act inputs in another order.

    qweight [cols * bits / 32, rows] int32, qzeros [groups, rows * bits / 32] int32, scales [groups, rows], g_idx [cols]

Version 1 (`checkpoint_format` "gptq") stores zeros minus one, subtracted from whole words; version 2 stores the zeros.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.layers.source import Shape
from quire.quant.code_format import CodeFormat, CodeRows
from quire.weights.fields import Fields
from quire.weights.safetensors import SafetensorsFiles
from quire.weights.schemes.scheme import FLOAT_SCALES, CodeMatrix, Module, Rows, unpack_bits

BITS = (2, 3, 4, 8)
INTEGERS = ("I32", "U32")


@dataclass(frozen=True, slots=True)
class GPTQ:
    bits: int
    group: int | None  # None: all inputs of a matrix
    stores_zeros_minus_one: bool
    rules: tuple[tuple[re.Pattern[str], Mapping[str, Any] | None], ...] = ()  # by module; None: not quantized
    where: str = ""

    @classmethod
    def read(cls, fields: Fields) -> GPTQ:
        version = fields.text("checkpoint_format", "gptq")
        if version not in ("gptq", "gptq_v2"):
            raise fields.unsupported(f"checkpoint_format {version!r} is not supported; quire reads gptq and gptq_v2.")
        return cls(*read_sizes(fields), version == "gptq", read_rules(fields), fields.where)

    def matrix(self, module: Module) -> CodeMatrix | None:
        if not any(module.has(kind) for kind in ("qweight", "qzeros", "scales", "g_idx")):
            return None
        return self.for_module(module.names).stored(module)

    def for_module(self, names: Collection[str]) -> GPTQ:
        """With the sizes of the first rule that names the module."""
        for pattern, changes in self.rules:
            if changes is not None and any(map(pattern.match, names)):
                given = {"bits": self.bits, "group_size": self.group or -1, **changes}
                bits, group = read_sizes(Fields(given, f"{self.where}, dynamic"))
                return replace(self, bits=bits, group=group)
        return self

    def may_stay_unread(self, name: str, files: SafetensorsFiles) -> bool:
        """AutoGPTQ writes biases of zeros for layers that have none."""
        return name.endswith("_proj.bias") and not files.read_floats(name).any()

    def stored(self, module: Module) -> CodeMatrix:
        group, words = self.group or module.cols, 32 // np.gcd(32, self.bits)
        groups = module.num_groups(group)
        if module.cols % words or module.rows % words:
            raise module.bad(
                f"{module.cols} inputs and {module.rows} outputs are no whole words of {self.bits}-bit codes"
            )
        needed: dict[str, tuple[Shape, tuple[str, ...]]] = {
            "qweight": ((module.cols * self.bits // 32, module.rows), INTEGERS),
            "qzeros": ((groups, module.rows * self.bits // 32), INTEGERS),
            "scales": ((groups, module.rows), FLOAT_SCALES),
        }
        if module.has("g_idx"):
            needed["g_idx"] = ((module.cols,), INTEGERS)
        fits = [module.fits(kind, *what) for kind, what in needed.items()]
        zeros = self.zeros(module) if all(fits) else np.zeros((1, 1), np.uint8)
        zero = int(zeros[0, 0]) if (zeros == zeros[0, 0]).all() else None
        order = read_order(module, groups) if module.has("g_idx") and all(fits) else None
        scale = module.scale_type("scales")
        format = CodeFormat("uint", self.bits, group, scale, zero=zero, has_zeros=zero is None)

        def read(rows: Rows) -> CodeRows:
            words = np.ascontiguousarray(module.read("qweight")[:, rows].T).view(np.uint32)
            codes = unpack_bits(words, self.bits)
            codes = codes if order is None else np.ascontiguousarray(codes[:, order])
            scales = np.ascontiguousarray(module.read_floats("scales")[:, rows].T)
            return CodeRows(codes, scales, None if zero is not None else np.ascontiguousarray(zeros[:, rows].T))

        return CodeMatrix({module.stored_name(k): shape for k, (shape, _) in needed.items()}, format, read, order)

    def zeros(self, module: Module) -> NDArray[np.uint8]:
        """[groups, rows]"""
        words = module.read("qzeros").view(np.uint32)
        if self.stores_zeros_minus_one and self.bits != 3:
            words = words + np.uint32(0xFFFFFFFF // ((1 << self.bits) - 1))
        zeros = unpack_bits(words, self.bits)
        return (zeros + np.uint8(1)) & np.uint8(7) if self.stores_zeros_minus_one and self.bits == 3 else zeros


def read_sizes(fields: Fields) -> tuple[int, int | None]:
    bits = fields.count("bits")
    if bits not in BITS:
        raise fields.unsupported(f"{bits}-bit GPTQ is not supported; quire reads 2, 3, 4 and 8 bits.")
    group = fields.count("group_size", -1, least=-1)
    if group == 0:
        raise fields.bad("group_size is 0, and must be -1 or above 0")
    return bits, None if group == -1 else group


def read_rules(fields: Fields) -> tuple[tuple[re.Pattern[str], Mapping[str, Any] | None], ...]:
    """`dynamic`: "-:pattern" keeps modules plain, "+:pattern" or "pattern" gives them other sizes."""
    section = fields.section("dynamic")
    rules = []
    for text, changes in section.values.items() if section is not None else ():
        pattern = compile_pattern(fields, text.removeprefix("-:").removeprefix("+:"))
        if not text.startswith("-:") and not isinstance(changes, Mapping):
            raise fields.bad(f"dynamic has {changes!r} for {text!r}, and must have an object")
        rules.append((pattern, None if text.startswith("-:") else changes))
    return tuple(rules)


def compile_pattern(fields: Fields, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise fields.bad(f"{text!r} is no regular expression: {error}") from None


def read_order(module: Module, groups: int, kind: str = "g_idx") -> NDArray[np.int64] | None:
    """The inputs sorted by their group, or None if they are in order."""
    index = module.read(kind).astype(np.int64)
    if index.min() < 0 or index.max() >= groups:
        wrong = index.min() if index.min() < 0 else index.max()
        raise module.bad(f"{kind} names group {wrong}, and there are {groups} groups")
    if (np.bincount(index, minlength=groups) != len(index) // groups).any():
        raise module.bad(f"{kind} does not have {len(index) // groups} inputs for each of {groups} groups")
    order = np.argsort(index, kind="stable")
    return None if (order == np.arange(len(order))).all() else order
