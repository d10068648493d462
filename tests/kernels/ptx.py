"""Inline PTX in Triton's interpreter, which has none: the few instructions that quire's kernels use, on numpy arrays.

`use` installs it. A register holds the words of all threads: an array of uint32.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from triton.runtime import interpreter

Words = NDArray[np.uint32]


def run(asm: str, inputs: list[Words], num_outputs: int) -> list[Words]:
    """The registers $0, $1, ... after the inputs, which have the numbers behind the outputs."""
    registers: dict[str, Any] = {f"${num_outputs + i}": words for i, words in enumerate(inputs)}
    for statement in re.split(r"[;{}]", asm):
        if not (statement := statement.strip()) or statement.startswith(".reg"):
            continue
        name, _, rest = statement.partition(" ")
        target, *operands = (each.strip() for each in rest.split(","))
        if name.startswith("prefetch"):
            continue
        values = [registers[each] if each in registers else np.uint32(int(each, 0)) for each in operands]
        registers[target] = np.broadcast_to(OPERATIONS[name](*values), inputs[0].shape).astype(np.uint32)
    return [registers[f"${i}"] for i in range(num_outputs)]


def lop3(a: Any, b: Any, c: Any, table: Any) -> Any:
    out = np.zeros(np.broadcast(a, b, c).shape, np.uint32)
    for index in range(8):
        if table >> index & 1:
            chosen = [x if index >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0))]
            out |= chosen[0] & chosen[1] & chosen[2]
    return out


def prmt(a: Any, b: Any, selector: Any) -> Any:
    both = np.uint64(b) << np.uint64(32) | np.uint64(a)
    out = np.zeros(np.broadcast(a, b, selector).shape, np.uint32)
    for place in range(4):
        pick = (selector >> np.uint32(4 * place)) & np.uint32(15)
        assert (pick < 8).all(), "the sign of a byte is not copied"
        byte = (both >> (np.uint64(8) * np.uint64(pick))) & np.uint64(255)
        out |= (byte.astype(np.uint32)) << np.uint32(8 * place)
    return out


def halves(words: Any, dtype: torch.dtype) -> torch.Tensor:
    raw = np.ascontiguousarray(np.atleast_1d(np.asarray(words, np.uint32))).view(np.int16)
    return torch.from_numpy(raw.copy()).view(dtype)


def on_halves(dtype: torch.dtype, function: Any) -> Any:
    def apply(*operands: Any) -> Any:
        operands = np.broadcast_arrays(*operands)
        exact = function(*(halves(each, dtype).double() for each in operands))
        return exact.to(dtype).view(torch.int16).numpy().view(np.uint32).reshape(operands[0].shape)

    return apply


OPERATIONS = {
    "mov.b32": lambda a: a, "mov.u32": lambda a: a, "and.b32": lambda a, b: a & b, "lop3.b32": lop3, "prmt.b32": prmt,
    "shr.u32": lambda a, b: a >> b, "shl.b32": lambda a, b: a << b,
    "fma.rn.bf16x2": on_halves(torch.bfloat16, lambda a, b, c: a * b + c),
    "fma.rn.f16x2": on_halves(torch.float16, lambda a, b, c: a * b + c),
    "add.rn.f16x2": on_halves(torch.float16, lambda a, b: a + b),
    "mul.rn.f16x2": on_halves(torch.float16, lambda a, b: a * b),
}  # fmt: skip


def create_inline_asm(
    self: Any, asm: str, constraints: str, values: list[Any], types: list[Any], is_pure: bool, pack: int
) -> Any:
    """Of arguments and results whose `pack` neighbours fill whole registers."""
    num_outputs = constraints.count("=")
    if "l" in constraints.split(","):  # an address: only a prefetch has one
        return SimpleNamespace(get_result=lambda i: values[0])
    assert pack == 1, "of several elements in one call only their registers' order says which they are"
    inputs = [np.ascontiguousarray(each.data).view(np.uint32) for each in values]
    out = run(asm, inputs, num_outputs)
    results = [
        interpreter.TensorHandle(words.view(np.int32), type.scalar) for words, type in zip(out, types, strict=True)
    ]
    return SimpleNamespace(get_result=lambda i: results[i])


def use() -> None:
    interpreter.InterpreterBuilder.create_inline_asm = create_inline_asm
