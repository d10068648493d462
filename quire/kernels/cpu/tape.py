"""Tape: a model's ops written down once, to be run every step by one call.

A model is called with `Value`s in place of tensors. Each op puts itself on the tape and answers with the value that it
will compute; `finish` gives the values memory and hands the list to the C++ program. Values that nobody refers to any
more give their memory to later ones, so Python's own reference counts are the plan of the buffers. Neighbours are fused
while they are written down: a product's bias and gate, and the rounding to int8 that a following product needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from quire.kernels.cpu.native import Native
from quire.kernels.cpu.tape_memory import Memory, Reader, Slot, padded
from quire.kernels.cpu.tape_ops import Embed, Matmul, Norm, Op, Recorded
from quire.kernels.paging import Paging

DENSE_FORMATS = ("f32", "bf16", "f16")  # of panels; the others are multiplied with activations in int8


class Buffer:
    """What one op computes: rows of `width` values, and perhaps the same in int8."""

    def __init__(self, tape: Tape, width: int, producer: Op | None) -> None:
        self.tape = tape
        self.width = width
        self.producer = producer
        self.values = Slot(tape.take(width, quantized=False))
        self.quantized = Slot(tape.take(width, quantized=True))

    def __del__(self) -> None:
        self.tape.give_back(self.values.memory, self.quantized.memory)


class Value:
    """A tensor of a step that is not there yet: `tail` is its shape behind the tokens."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, buffer: Buffer, tail: tuple[int, ...], first: int = 0) -> None:
        self.buffer = buffer
        self.tail = tail
        self.first = first

    @property
    def tape(self) -> Tape:
        return self.buffer.tape

    @property
    def width(self) -> int:
        return self.tail[0] if len(self.tail) == 1 else self.tail[0] * self.tail[1]

    @property
    def whole(self) -> bool:
        return self.first == 0 and self.width == self.buffer.width

    def read(self) -> Reader:
        self.buffer.values.needed = True
        return Reader(self.buffer.values, self.first)

    def view(self, tokens: int, heads: int, head_dim: int) -> Value:
        assert tokens == -1, tokens
        assert heads * head_dim == self.width, (heads, head_dim, self.width)
        return Value(self.buffer, (heads, head_dim), self.first)

    def flatten(self, start: int) -> Value:
        assert start == 1, start
        return Value(self.buffer, (self.width,), self.first)

    def split_with_sizes(self, sizes: Sequence[int], dim: int) -> list[Value]:
        assert dim == 1, dim
        parts, first = [], self.first
        for size in sizes:
            parts.append(Value(self.buffer, (size, *self.tail[1:]), first))
            first += parts[-1].width
        return parts

    def __add__(self, other: Tensor | Value) -> Value:
        """Another value of the step, or a bias."""
        return self.tape.add(self, other) if isinstance(other, Value) else self.tape.add_bias(self, other)

    def __mul__(self, factor: Tensor) -> Value:
        return self.tape.scale(self, float(factor))


@dataclass(slots=True)
class Tape:
    """The ops so far and the memory they use, for steps of up to `max_tokens` tokens."""

    native: Native
    max_tokens: int
    ops: list[Op] = field(default_factory=list)
    _free: dict[tuple[int, bool], list[Memory]] = field(default_factory=dict)
    _slots: list[Slot] = field(default_factory=list)
    _program: Any = None
    _multiplied: Buffer | None = None  # by the last op: not to be given to the gate that may yet join it

    def take(self, width: int, *, quantized: bool) -> Memory:
        free = self._free.setdefault((width, quantized), [])
        if free:
            return free.pop()
        row_bytes = self.native.module.quantized_row_bytes(width) if quantized else 4 * padded(width)
        return Memory(width, row_bytes)

    def give_back(self, values: Memory, quantized: Memory) -> None:
        self._free[values.width, False].append(values)
        self._free[quantized.width, True].append(quantized)

    def new(self, tail: tuple[int, ...], producer: Op | None = None) -> Value:
        value = Value(Buffer(self, tail[0] if len(tail) == 1 else tail[0] * tail[1], producer), tail)
        self._slots += [value.buffer.values, value.buffer.quantized]
        return value

    def put(self, op: Op) -> None:
        self.ops.append(op)
        self._multiplied = None

    def embed(self, weight: Any, *, by_position: bool = False) -> Value:
        out = self.new((weight.cols,))
        out.buffer.producer = Embed(weight, by_position, out.buffer.values)
        self.put(out.buffer.producer)
        return out

    def scale(self, x: Value, factor: float) -> Value:
        assert isinstance(x.buffer.producer, Embed)
        x.buffer.producer.scale *= factor
        return x

    def norm(
        self,
        x: Value,
        weight: Tensor,
        eps: float,
        residual: Value | None,
        *,
        bias: Tensor | None = None,
        centered: bool = False,
    ) -> tuple[Value, Value]:
        """The norm of x, or of x and a residual, and what was normed."""
        groups = x.tail[0] if len(x.tail) == 2 else 1
        out, total = self.new(x.tail), x if residual is None else self.new(x.tail)
        sources = (x.read(), residual.read() if residual else None, total.read() if residual else None)
        op = Norm(*sources, weight, bias, centered, eps, groups, out.buffer.values, out.buffer.quantized)
        out.buffer.producer = op
        self.put(op)
        return out, total

    def matmul(self, x: Value, weights: Sequence[Any]) -> Value:
        """The products with several matrices, side by side."""
        out = self.new((sum(weight.rows for weight in weights),))
        first = 0
        for weight in weights:
            op = self._product(x, weight, out, first)
            self.put(op)
            first += weight.rows
        if len(weights) == 1:
            out.buffer.producer = op
            self._multiplied = x.buffer
        return out

    def _product(self, x: Value, weight: Any, out: Value, first: int) -> Matmul:
        quantize = False
        if weight.format in DENSE_FORMATS:
            x.buffer.values.needed = True
        else:
            quantize = self._round(x)
        reader = Reader(x.buffer.values, x.first)
        return Matmul(weight, reader, x.buffer.quantized, quantize, out.buffer.values, first)

    def _round(self, x: Value) -> bool:
        """Have x in int8; True if that is left to the product itself, False if an op before it does it."""
        assert x.whole
        if x.buffer.quantized.needed:
            return False
        x.buffer.quantized.needed = True
        if isinstance(x.buffer.producer, (Norm, Matmul)) and x.buffer.producer.rounds:
            return False
        x.buffer.values.needed = True
        return True

    def add_bias(self, x: Value, bias: Tensor) -> Value:
        producers = [op for op in self.ops if isinstance(op, Matmul) and op.y is x.buffer.values]
        assert producers
        for op in producers:
            assert op.bias is None
            op.bias = bias[op.first : op.first + op.weight.rows]
        return x

    def add(self, x: Value, y: Value) -> Value:
        """The sum of two values. A norm that follows adds them by itself: `norm` with a residual."""
        assert x.tail == y.tail, (x.tail, y.tail)
        out = self.new(x.tail)
        self.put(Recorded("add", {"a": x.read(), "b": y.read(), "y": out.read(), "size": x.width}))
        return out

    def activate(self, x: Value, activation: str) -> Value:
        out = self.new(x.tail)
        self.put(self._activation(x, out, activation, gated=False))
        return out

    def _activation(self, x: Value, out: Value, activation: str, *, gated: bool) -> Recorded:
        arguments = {"x": x.read(), "y": out.read(), "size": out.width, "activation": activation, "gated": gated}
        return Recorded("activate", arguments)

    def gate(self, x: Value, activation: str) -> Value:
        """A single product right before becomes a gated one: its raw outputs are then never written.

        Not one further back: what lies between may use the memory that is free for the gate now.
        """
        size = x.width // 2
        out = self.new((size,))
        producer = x.buffer.producer
        fits = size % 32 == 0 and not x.buffer.values.needed
        if isinstance(producer, Matmul) and producer is self.ops[-1] and fits:
            producer.activation = activation
            producer.y, producer.gated = out.buffer.values, out.buffer.quantized
            out.buffer.producer = producer
        else:
            self.put(self._activation(x, out, activation, gated=True))
        return out

    def finish(self) -> None:
        """Give memory to what is needed and build the program."""
        self._multiplied = None
        for slot in self._slots:
            if slot.needed and slot.memory.tensor is None:
                slot.memory.allocate(self.max_tokens)
        self._program = self.native.module.Program(self.native.isa)
        for op in self.ops:
            op.emit(self._program)

    def run(self, tokens: Tensor | None, positions: Tensor | None, paging: Paging | None, num_tokens: int) -> None:
        assert num_tokens <= self.max_tokens, num_tokens
        self._program.run(self.native.threads, *step_arguments(tokens, positions, paging, num_tokens))

    def run_timed(self, tokens: Tensor, positions: Tensor, paging: Paging) -> list[tuple[str, int]]:
        """The same, answering with each op's kind and nanoseconds."""
        arguments = step_arguments(tokens, positions, paging, len(tokens))
        return list(self._program.run_timed(self.native.threads, *arguments))

    def result(self, value: Value, num_tokens: int) -> Tensor:
        """What a value became in the last run; good until the next."""
        address = value.buffer.values.memory
        assert address.tensor is not None
        rows = address.tensor.view(torch.float32).view(-1, address.row_bytes // 4)
        return rows[:num_tokens, value.first : value.first + value.width]


def step_arguments(tokens: Tensor | None, positions: Tensor | None, paging: Paging | None, num_tokens: int) -> Any:
    at, turned = (0 if tensor is None else tensor.data_ptr() for tensor in (tokens, positions))
    if paging is None:
        return (num_tokens, 0, at, turned, 0, 0, [], 0, 0)
    groups = [
        (table.data_ptr(), table.stride(0), 0 if slots is None else slots.data_ptr())
        for table, slots in zip_longest(paging.block_tables, paging.slot_mapping)  # fixed groups have no slots
    ]
    mask = paging.ancestors
    return (
        num_tokens,
        len(paging.host_seq_lens),
        at,
        turned,
        paging.query_starts.data_ptr(),
        paging.seq_lens.data_ptr(),
        groups,
        mask.data_ptr() if mask is not None else 0,
        mask.stride(0) if mask is not None else 0,
    )
