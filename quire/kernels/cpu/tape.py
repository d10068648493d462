"""Tape: a model's ops, recorded once and run every step by one call.

A model is called with `Value`s in place of tensors. Each op is appended to the tape and returns the value that it
computes. `finish` allocates memory and builds the C++ program. The memory of a buffer is reused after Python has
dropped the last reference to it. Neighbouring ops are fused while they are recorded: a product with its bias and its
gate, and an op with the rounding to int8 that the next product needs.

With several ranks (`ranks.py`) each records the same ops with its own share of the weights. `all_gather` places the
columns of all ranks side by side in shared memory, where the ops behind a meeting read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.kernels.cpu.native import Native, multiplies_floats
from quire.kernels.cpu.ranks import Command, step_arguments_of, step_words
from quire.kernels.cpu.tape_memory import Columns, Memory, MemoryKind, Storage, padded
from quire.kernels.cpu.tape_ops import Embed, Floats, Matmul, Meet, Norm, Op, Recorded, Round
from quire.kernels.paging import MAX_TREE_NODES, Paging

if TYPE_CHECKING:
    from quire.kernels.cpu.ranks import CpuRanks

Ids = NDArray[np.int64]
Order = NDArray[np.int64]


class Buffer:
    """The output of one op: rows of `width` values in float32 and in int8. Each is written only if it is needed."""

    def __init__(
        self,
        tape: Tape,
        width: int,
        producer: Op | None,
        *,
        shares_values: bool = False,
        shares_quantized: bool = False,
    ) -> None:
        self.tape = tape
        self.width = width
        self.producer = producer
        self.values = Storage(tape.acquire(MemoryKind(width, shared=shares_values)))
        self.quantized = Storage(tape.acquire(MemoryKind(width, quantized=True, shared=shares_quantized)))
        self._owned = [self.values.memory, self.quantized.memory]

    def move(self, storage: Storage, other: Storage, first: int) -> None:
        """A storage of this buffer becomes columns of another buffer's, from `first` on."""
        assert not self.quantized.needed
        self._owned.remove(storage.memory)
        self.tape.release(storage.memory)
        storage.memory, storage.first, storage.needed = other.memory, first, True

    def __del__(self) -> None:
        for memory in self._owned:
            self.tape.release(memory)


class Value:
    """Stands in for a tensor [tokens, *tail] while a model is recorded: columns of a buffer from `first` on."""

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

    def read(self) -> Columns:
        """Mark the values as needed and return their columns. Ops call this for their inputs and outputs."""
        self.buffer.values.needed = True
        return Columns(self.buffer.values, self.first)

    def view(self, tokens: int, heads: int, head_dim: int) -> Value:
        assert tokens == -1, tokens
        assert heads * head_dim == self.width, (heads, head_dim, self.width)
        return Value(self.buffer, (heads, head_dim), self.first)

    def flatten(self, start: int) -> Value:
        assert start == 1, start
        return Value(self.buffer, (self.width,), self.first)

    def split_with_sizes(self, sizes: Sequence[int], dim: int) -> list[Value]:
        assert dim == 1, dim
        values, first = [], self.first
        for size in sizes:
            values.append(Value(self.buffer, (size, *self.tail[1:]), first))
            first += values[-1].width
        return values

    def __add__(self, other: Floats | Value) -> Value:
        """Add another value of the step, or a bias."""
        return self.tape.add(self, other) if isinstance(other, Value) else self.tape.add_bias(self, other)

    def __mul__(self, factor: float) -> Value:
        return self.tape.scale(self, factor)


@dataclass(slots=True)
class Tape:
    """The ops so far and the memory they use, for steps of up to `max_tokens` tokens."""

    native: Native
    max_tokens: int
    ops: list[Op] = field(default_factory=list)
    few_rows: bool = False  # each of several ranks computes all of a norm, and no meeting follows
    _free: dict[MemoryKind, list[Memory]] = field(default_factory=dict)
    _unmet: list[Memory] = field(default_factory=list)  # shared: other ranks may read it until the next meeting
    _storages: list[Storage] = field(default_factory=list)
    _program: Any = None
    _matmul_input: Buffer | None = None  # of the last op: a gate that fuses with it must not reuse this memory
    _ranks: CpuRanks | None = None  # set by the first gather
    _paths: Any = None  # with ranks: shared memory for the paths of draft trees

    def acquire(self, kind: MemoryKind) -> Memory:
        free = self._free.setdefault(kind, [])
        if free:
            return free.pop()
        return Memory(
            kind, self.native.module.quantized_row_bytes(kind.width) if kind.quantized else 4 * padded(kind.width)
        )

    def release(self, memory: Memory) -> None:
        (self._unmet if memory.kind.shared else self._free[memory.kind]).append(memory)

    def new(self, tail: tuple[int, ...], producer: Op | None = None, **shares: bool) -> Value:
        """`shares` are those of `Buffer`."""
        value = Value(Buffer(self, tail[0] if len(tail) == 1 else tail[0] * tail[1], producer, **shares), tail)
        self._storages += [value.buffer.values, value.buffer.quantized]
        return value

    def put(self, op: Op) -> None:
        self.ops.append(op)
        self._matmul_input = None

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
        weight: Floats,
        eps: float,
        residual: Value | None,
        *,
        bias: Floats | None = None,
        centered: bool = False,
    ) -> tuple[Value, Value]:
        """The norm of x, or of x + residual, and the norm's input.

        If x is in shared memory, so that all ranks have all of it, each of them computes a part.
        """
        groups = x.tail[0] if len(x.tail) == 2 else 1
        ranks = self._ranks if x.buffer.values.memory.kind.shared else None
        shared = ranks is not None and ranks.equal_threads and not self.few_rows
        out = self.new(x.tail, shares_values=shared, shares_quantized=shared)
        total = x if residual is None else self.new(x.tail, shares_values=shared)
        columns = (x.read(), residual.read() if residual else None, total.read() if residual else None)
        op = Norm(*columns, weight, bias, centered, eps, groups, out.buffer.values, out.buffer.quantized)
        out.buffer.producer = op
        self.put(op)
        if ranks is not None and shared:
            op.rank, op.ranks = ranks.rank, ranks.size
            self._meet(ranks)
        return out, total

    def matmul(self, x: Value, weights: Sequence[Any], orders: Sequence[Order | None] = ()) -> Value:
        """The products with several matrices, side by side. Matrix i takes the inputs in the order of orders[i]."""
        out = self.new((sum(weight.rows for weight in weights),))
        first, gathered, gathered_order = 0, x, None
        for weight, order in zip_longest(weights, orders):
            if order is not None and order is not gathered_order:
                gathered, gathered_order = self.gather(x, order), order
            source = x if order is None else gathered
            op = self._product(source, weight, out, first)
            self.put(op)
            first += weight.rows
        if len(weights) == 1:
            out.buffer.producer = op
            self._matmul_input = source.buffer
        return out

    def gather(self, x: Value, order: Order) -> Value:
        """Column i of the result is column order[i] of x."""
        out = self.new(x.tail)
        self.put(Recorded("gather", {"x": x.read(), "y": out.read(), "size": out.width, "order": order}))
        return out

    def _product(self, x: Value, weight: Any, out: Value, first: int) -> Matmul:
        quantize = False
        if multiplies_floats(weight.format):
            x.buffer.values.needed = True
        else:
            quantize = self._round(x)
        columns = Columns(x.buffer.values, x.first)
        few_rows = self.native.few_rows(weight.format)
        return Matmul(weight, columns, x.buffer.quantized, quantize, out.buffer.values, first, few_rows)

    def _round(self, x: Value) -> bool:
        """Make x available in int8. True: the product rounds x itself. False: an earlier op does."""
        assert x.whole
        if x.buffer.quantized.needed:
            return False
        x.buffer.quantized.needed = True
        if isinstance(x.buffer.producer, (Norm, Matmul)) and x.buffer.producer.rounds:
            return False
        x.buffer.values.needed = True
        return True

    def add_bias(self, x: Value, bias: Floats) -> Value:
        producers = [op for op in self.ops if isinstance(op, Matmul) and op.y is x.buffer.values]
        assert producers
        for op in producers:
            assert op.bias is None
            op.bias = bias[op.first : op.first + op.weight.rows]
        return x

    def add(self, x: Value, y: Value, factor: float = 1.0) -> Value:
        """The sum of two values, times a factor. Where a norm follows, use `norm` with a residual instead."""
        return self._combine(x, y, factor=factor, multiplies=False)

    def multiply(self, x: Value, y: Value) -> Value:
        return self._combine(x, y, factor=1.0, multiplies=True)

    def _combine(self, x: Value, y: Value, **options: Any) -> Value:
        assert x.tail == y.tail, (x.tail, y.tail)
        out = self.new(x.tail)
        self.put(Recorded("add", {"a": x.read(), "b": y.read(), "y": out.read(), "size": x.width, **options}))
        return out

    def activate(self, x: Value, activation: str) -> Value:
        out = self.new(x.tail)
        self.put(self._activation(x, out, activation, gated=False))
        return out

    def _activation(self, x: Value, out: Value, activation: str, *, gated: bool) -> Recorded:
        arguments = {"x": x.read(), "y": out.read(), "size": out.width, "activation": activation, "gated": gated}
        return Recorded("activate", arguments)

    def gate(self, x: Value, activation: str) -> Value:
        """Fuse the gate into the product, if that is the last op. The product's own outputs are then never written.

        An earlier product cannot be fused: the ops after it may use the memory that the gate's output gets.
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

    def all_gather(self, ranks: CpuRanks, x: Value, first: int, width: int, *, rounded: bool = False) -> Value:
        """The columns of all ranks, [tokens, width]. x has those from `first` on, and is not used any more.

        The ops that write x write into shared memory. With `rounded`, values in int8 are shared, for a product that
        reads no others: each rank rounds its own columns.
        """
        assert x.whole
        assert x.buffer.producer is None or any(op is x.buffer.producer for op in self._since_meeting())
        out = self.new((width,), shares_values=not rounded, shares_quantized=rounded)
        if not rounded:
            x.buffer.move(x.buffer.values, out.buffer.values, first)
        elif isinstance(x.buffer.producer, Matmul) and x.buffer.producer.rounds:
            x.buffer.move(x.buffer.quantized, out.buffer.quantized, first)
        else:
            part = Storage(out.buffer.quantized.memory)
            part.first, part.needed = first, True
            self.put(Round(x.read(), part, x.width))
        out.buffer.quantized.needed = rounded
        self._meet(ranks)
        return out

    def gather_rows(self, ranks: CpuRanks, x: Value, first: int) -> Value:
        """The rows of all tokens. x is an embedding by a rank's rows, from `first` on."""
        assert isinstance(x.buffer.producer, Embed)
        x.buffer.producer.first = first
        return self.all_gather(ranks, x, 0, x.width)

    def _meet(self, ranks: CpuRanks) -> None:
        self._ranks = ranks
        self.put(Meet(ranks.native))
        for memory in self._unmet:
            self._free[memory.kind].append(memory)
        self._unmet.clear()

    def _since_meeting(self) -> list[Op]:
        last = next((nth for nth in reversed(range(len(self.ops))) if isinstance(self.ops[nth], Meet)), -1)
        return self.ops[last + 1 :]

    @property
    def shares_norms(self) -> bool:
        return any(isinstance(op, Norm) and op.ranks > 1 for op in self.ops)

    def finish(self) -> None:
        """Allocate the memory of needed storages and build the program."""
        self._matmul_input = None
        pages = None if self._ranks is None else self._ranks.pages
        for storage in self._storages:
            if storage.needed and storage.memory.data is None:
                storage.memory.allocate(self.max_tokens, pages)
        if pages is not None:
            self._paths = pages.array((self.max_tokens * (MAX_TREE_NODES + 1),), "int32")
        self._program = self.native.module.Program(self.native.isa)
        for op in self.ops:
            op.emit(self._program)

    def run(self, tokens: Ids | None, positions: Ids | None, paging: Paging | None, num_tokens: int) -> None:
        self._run(self._program.run, tokens, positions, paging, num_tokens)

    def run_timed(self, tokens: Ids, positions: Ids, paging: Paging) -> list[tuple[str, int]]:
        """As `run`; returns the kind and the nanoseconds of each op."""
        return list(self._run(self._program.run_timed, tokens, positions, paging, len(tokens)))

    def _run(
        self,
        run: Callable[..., Any],
        tokens: Ids | None,
        positions: Ids | None,
        paging: Paging | None,
        num_tokens: int,
    ) -> Any:
        assert num_tokens <= self.max_tokens, num_tokens
        if self._ranks is None:
            return run(self.native.threads, *step_arguments(tokens, positions, paging, num_tokens))
        if paging is not None and paging.paths is not None:
            paging = replace(paging, paths=self._share_paths(self._ranks, paging.paths))
        arguments = step_arguments(tokens, positions, paging, num_tokens)
        self._ranks.write(Command.STEP, step_words(arguments, self._ranks.pages.offset_of))
        # The call that gives the command also runs the program: no signal of Python comes between them.
        result = run(self.native.threads, *arguments, self._ranks.native)
        self._ranks.wait()
        return result

    def _share_paths(self, ranks: CpuRanks, paths: Any) -> Any:
        """The paths of draft trees, in shared memory."""
        ranks.wait()  # the last step may read it
        shared = self._paths[: paths.size].reshape(paths.shape)
        shared[...] = paths
        return shared

    def run_words(self, words: Sequence[int], base: int) -> None:
        """On another rank: the step of a command. The pages that rank 0 shares begin at `base`."""
        self._program.run(self.native.threads, *step_arguments_of(words, base))

    def result(self, value: Value, num_tokens: int) -> Floats:
        """The array of a value, [num_tokens, width]. The next run overwrites it."""
        memory = value.buffer.values.memory
        assert memory.data is not None
        rows = memory.data.view(np.float32).reshape(-1, memory.row_bytes // 4)
        return rows[:num_tokens, value.first : value.first + value.width]


def step_arguments(tokens: Ids | None, positions: Ids | None, paging: Paging | None, num_tokens: int) -> Any:
    token_address, position_address = (0 if x is None else address(x) for x in (tokens, positions))
    if paging is None:
        return (num_tokens, 0, token_address, position_address, 0, 0, [], 0, 0)
    groups = [
        (address(table), table.strides[0] // 4, 0 if slots is None else address(slots))
        for table, slots in zip_longest(paging.block_tables, paging.slot_mapping)  # fixed groups have no slots
    ]
    paths = paging.paths
    return (
        num_tokens,
        len(paging.host_seq_lens),
        token_address,
        position_address,
        address(paging.query_starts),
        address(paging.seq_lens),
        groups,
        address(paths) if paths is not None else 0,
        paths.strides[0] // 4 if paths is not None else 0,
    )


def address(array: Any) -> int:
    """The address of a numpy array's first element."""
    first: int = array.__array_interface__["data"][0]
    return first
