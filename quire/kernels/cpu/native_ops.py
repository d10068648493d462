"""The ops of `reference` on the C++ kernels, with numpy arrays in place of tensors. Called with `Value`s, an op is
recorded on their tape. Called with arrays, it is recorded on a new tape, which runs once. Tests use this to compare
each op with the reference.

Activations are float32. The cache is float32, bfloat16, int8 or fp8, in the layout of `csrc/attention.h`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.kernels.arrays import ITEM_BYTES
from quire.kernels.cache_spec import BlockShape, KVCacheSpec
from quire.kernels.cpu.native import Native
from quire.kernels.cpu.recorded import RecordedModel
from quire.kernels.cpu.tape import Tape, Value, address
from quire.kernels.cpu.tape_experts import record_experts, record_route
from quire.kernels.cpu.tape_latent import record_head_linear, record_rope_latent
from quire.kernels.cpu.tape_ops import Blocks, Floats, Recorded
from quire.kernels.paging import LayerCache, Paging
from quire.kernels.routing import ExpertWeights, Routing
from quire.kernels.sampling import IN_PROMPT, NUM_SETTINGS

LANES = 16  # tokens in a vector of keys
PARTIALS = 1 << 18  # floats for partial results of contexts that several threads share: 1 MiB
CACHE_TYPES = {"float32": "float32", "uint16": "bfloat16", "int8": "int8", "uint8": "fp8"}  # by the numpy type

Ids = NDArray[np.int64]


class NativeOps:
    """`reference`'s ops, on one instruction set and number of threads."""

    def __init__(self, native: Native) -> None:
        self.native = native
        self._partials = np.empty(PARTIALS, np.float32)
        self._layers: Sequence[LayerCache] = ()  # of the last `move_kv`, and their descriptions for C++
        self._described: list[Any] = []

    def rms_norm(self, x: Any, weight: Floats, eps: float, residual: Any = None) -> Any:
        if not isinstance(x, Value):
            inputs = (x,) if residual is None else (x, residual)
            results = self._at_once(lambda *values: self.rms_norm(values[0], weight, eps, *values[1:]), inputs)
            return results[0] if residual is None else results
        normed, total = x.tape.norm(x, floats(weight), eps, residual)
        return normed if residual is None else (normed, total)

    def layer_norm(self, x: Any, weight: Floats, bias: Floats | None, eps: float, residual: Any = None) -> Any:
        if not isinstance(x, Value):
            inputs = (x,) if residual is None else (x, residual)
            results = self._at_once(lambda *values: self.layer_norm(values[0], weight, bias, eps, *values[1:]), inputs)
            return results[0] if residual is None else results
        bias = None if bias is None else floats(bias)
        normed, total = x.tape.norm(x, floats(weight), eps, residual, bias=bias, centered=True)
        return normed if residual is None else (normed, total)

    def add(self, x: Any, y: Any, factor: float = 1.0) -> Any:
        if not isinstance(x, Value):
            return self._at_once(lambda x, y: self.add(x, y, factor), (x, y))[0]
        return x.tape.add(x, y, factor)

    def multiply(self, x: Any, y: Any) -> Any:
        return x.tape.multiply(x, y) if isinstance(x, Value) else self._at_once(self.multiply, (x, y))[0]

    def rope(self, q: Any, k: Any, positions: Any, table: Floats, interleaved: bool) -> Any:
        if not isinstance(q, Value):
            return self._at_once(lambda q, k: self.rope(q, k, None, table, interleaved), (q, k), positions=positions)
        spans = [q, k]
        if q.buffer is k.buffer and k.first == q.first + q.width:
            spans = [Value(q.buffer, (q.tail[0] + k.tail[0], q.tail[1]), q.first)]
        for x in spans:
            heads, head_dim = x.tail
            arguments = {"x": x.read(), "heads": heads, "head_dim": head_dim, "table": table}
            x.tape.put(Recorded("rope", {**arguments, "dim": table.shape[1], "interleaved": interleaved}))
        return q, k

    def store_kv(self, k: Any, v: Any, cache: LayerCache, slots: Any) -> None:
        if not isinstance(k, Value):
            paging = step_of_slots(cache, slots)
            self._at_once(lambda k, v: self.store_kv(k, v, cache, None), (k, v), paging=paging)
            return
        k.tape.put(Recorded("store", {**describe_cache(cache, k.tail[1]), "k": k.read(), "v": v.read()}))

    def move_kv(self, layers: Sequence[LayerCache], moves: Sequence[tuple[Ids, Ids]]) -> None:
        if layers is not self._layers:
            self._layers, self._described = layers, [layer_arguments(layer) for layer in layers]
        assert all(slots.dtype == np.int64 and slots.flags.c_contiguous for pair in moves for slots in pair)
        groups = [(address(sources), address(targets), len(sources)) for sources, targets in moves]
        self.native.module.move_kv(self.native.threads, self._described, groups)

    def attention(
        self,
        q: Any,
        cache: LayerCache,
        paging: Any,
        *,
        scale: float,
        window: int | None = None,
        slopes: Floats | None = None,
        softcap: float | None = None,
        sinks: Floats | None = None,
    ) -> Any:
        options: dict[str, Any] = {
            "scale": scale, "window": window, "slopes": slopes, "softcap": softcap, "sinks": sinks
        }  # fmt: skip
        if not isinstance(q, Value):
            return self._at_once(lambda value: self.attention(value, cache, None, **options), (q,), paging=paging)[0]
        out = q.tape.new((q.tail[0], dims_of(cache)[1]))
        arguments = {
            "q": q.read(),
            "out": out.read(),
            "heads": q.tail[0],
            "scale": scale,
            "window": window or 0,
            "softcap": softcap or 0.0,
            "slopes": 0 if slopes is None else floats(slopes),
            "sinks": 0 if sinks is None else floats(sinks),
            "partials": self._partials,
            "num_partials": PARTIALS,
        }
        q.tape.put(Recorded("attention", {**describe_cache(cache, q.tail[1]), **arguments}))
        return out

    def activate(self, x: Any, activation: str) -> Any:
        if not isinstance(x, Value):
            return self._at_once(lambda value: self.activate(value, activation), (x,))[0]
        return x.tape.activate(x, activation)

    def silu_mul(self, gate_up: Any) -> Any:
        return self._gate(gate_up, "silu")

    def gelu_mul(self, gate_up: Any) -> Any:
        return self._gate(gate_up, "gelu_tanh")

    def _gate(self, gate_up: Any, activation: str) -> Any:
        if not isinstance(gate_up, Value):
            flat = gate_up.reshape(-1, gate_up.shape[-1])
            out = self._at_once(lambda value: self._gate(value, activation), (flat,))[0]
            return out.reshape(*gate_up.shape[:-1], out.shape[-1])
        return gate_up.tape.gate(gate_up, activation)

    def route(self, logits: Any, bias: Floats | None, routing: Routing, factors: Floats | None = None) -> Any:
        """On a tape one value, which `experts` takes."""
        bias, factors = (None if each is None else floats(each) for each in (bias, factors))
        if isinstance(logits, Value):
            return record_route(logits, bias, routing, factors)
        (routes,) = self._at_once(lambda value: record_route(value, bias, routing, factors), (logits,))
        weights, ids = np.split(routes, 2, axis=1)
        return ids.astype(np.int64), weights

    def experts(self, x: Any, routes: Any, weights: ExpertWeights, shared: Any = None, shared_gate: Any = None) -> Any:
        if isinstance(x, Value):
            return record_experts(x, routes, weights, shared, shared_gate)
        ids, factors = routes
        inputs = [x, np.concatenate((factors, ids.astype(np.float32)), axis=1)]
        inputs += [each for each in (shared, shared_gate) if each is not None]
        return self._at_once(lambda x, routes, *more: record_experts(x, routes, weights, *pad(more)), inputs)[0]

    def rope_latent(
        self, q: Any, kv: Any, weight: Floats, eps: float, positions: Any, table: Floats, interleaved: bool
    ) -> Any:
        weight = floats(weight)
        if isinstance(q, Value):
            return record_rope_latent(q, kv, weight, eps, table, interleaved)
        return self._at_once(
            lambda q, kv: record_rope_latent(q, kv, weight, eps, table, interleaved), (q, kv), positions=positions
        )

    def store_latent(self, kv: Any, rank: int, cache: LayerCache, slots: Any) -> None:
        """The values are stored a second time, token by token."""
        values = Value(kv.buffer, (1, rank), kv.first) if isinstance(kv, Value) else kv[..., :rank]
        self.store_kv(kv, values, cache, slots)

    def head_linear(self, x: Any, weight: Any) -> Any:
        if isinstance(x, Value):
            return record_head_linear(x, weight)
        return self._at_once(lambda value: record_head_linear(value, weight), (x,))[0]

    def cache_shapes(self, spec: KVCacheSpec, dtype: str, block_size: int) -> BlockShape:
        """The shape of a block. The values of a latent are stored a second time: keys lie dimension by dimension."""
        assert spec.is_latent or spec.value_dim in (None, spec.head_dim), "these kernels take values as large as keys"
        dtype, heads = spec.dtype or dtype, spec.num_kv_heads
        value_dim = spec.value_dim or spec.head_dim
        sizes = self.native.module.cache_bytes(dtype, block_size, heads, spec.head_dim, value_dim)
        dtype = "float8_e4m3fn" if dtype == "fp8" else dtype
        k, v = ((heads, num_bytes // ITEM_BYTES[dtype]) for num_bytes in sizes)
        return BlockShape(k, v, dtype)

    def record(
        self, model: Any, kv: Sequence[LayerCache], max_tokens: int, tap_layers: Sequence[int] = ()
    ) -> RecordedModel:
        return RecordedModel(model, kv, self.native, max_tokens, tap_layers)

    def logits(self, products: Floats, softcap: float | None) -> Floats:
        """In place."""
        if softcap is not None:
            self.native.module.softcap(
                self.native.isa, self.native.threads, rows_of(products), *products.shape, softcap
            )
        return products

    def sample(self, logits: Floats, settings: NDArray[np.float64], seeds: Ids, lengths: Ids) -> tuple[Ids, Floats]:
        assert settings.dtype == np.float64
        assert seeds.dtype == lengths.dtype == np.int64
        rows, size = logits.shape
        columns = [np.ascontiguousarray(x) for x in (settings, seeds, lengths)]
        assert settings.shape == (rows, NUM_SETTINGS)
        assert seeds.shape == lengths.shape == (rows,)
        tokens, largest = np.empty(rows, np.int64), np.empty(rows, np.float32)
        self.native.module.sample(
            self.native.isa, self.native.threads, rows_of(logits), rows, size,
            *map(address, (*columns, tokens, largest)),
        )  # fmt: skip
        return tokens, largest

    def gumbel(self, seeds: Ids, lengths: Ids, ids: Ids) -> Floats:
        assert seeds.dtype == lengths.dtype == ids.dtype == np.int64
        assert seeds.shape == lengths.shape == ids.shape[:1]
        columns = [np.ascontiguousarray(x) for x in (seeds, lengths, ids)]
        noise = np.empty(ids.shape, np.float32)
        self.native.module.gumbel(*map(address, columns), *ids.shape, address(noise))
        return noise

    def logprobs(self, logits: Floats, tokens: Ids, num_top: int) -> tuple[Floats, Ids, Ids, Floats]:
        rows, size = logits.shape
        assert tokens.dtype == np.int64
        assert tokens.shape == (rows,)
        tokens, num_top = np.ascontiguousarray(tokens), min(num_top, size)
        own, ranks = np.empty(rows, np.float32), np.empty(rows, np.int64)
        top, top_logprobs = np.empty((rows, num_top), np.int64), np.empty((rows, num_top), np.float32)
        self.native.module.logprobs(
            self.native.isa, self.native.threads, rows_of(logits), rows, size, address(tokens), num_top,
            *map(address, (own, ranks, top, top_logprobs)),
        )  # fmt: skip
        return own, ranks, top, top_logprobs

    def beam_candidates(
        self, logits: Floats, processed: Floats | None, count: int, num_top: int
    ) -> tuple[Ids, Floats, Ids, Ids, Floats]:
        rows, size = logits.shape
        count, num_top = min(count, size), min(num_top, size)
        tokens, ranks = np.empty((rows, count), np.int64), np.empty((rows, count), np.int64)
        values = np.empty((rows, count), np.float32)
        top, top_logprobs = np.empty((rows, num_top), np.int64), np.empty((rows, num_top), np.float32)
        self.native.module.beam_candidates(
            self.native.isa, self.native.threads, rows_of(logits), (0, 0) if processed is None else rows_of(processed),
            rows, size, count, num_top, *map(address, (tokens, values, ranks, top, top_logprobs)),
        )  # fmt: skip
        return tokens, values, ranks, top, top_logprobs

    def apply_token_bitmask(self, logits: Floats, rows: Ids, bits: NDArray[np.uint8]) -> None:
        assert rows.dtype == np.int64
        assert bits.dtype == np.uint8
        assert bits.shape[0] == len(rows)
        rows, bits = np.ascontiguousarray(rows), np.ascontiguousarray(bits)
        self.native.module.apply_token_bitmask(
            self.native.isa,
            self.native.threads,
            rows_of(logits),
            *logits.shape,
            address(rows),
            len(rows),
            (address(bits), bits.shape[1]),
            bits.shape[1],
        )

    def count_tokens(self, counts: NDArray[np.int32], rows: Ids, tokens: Ids) -> None:
        assert counts.dtype == np.int32
        assert counts.strides[1] == 4
        assert rows.dtype == tokens.dtype == np.int64
        assert rows.shape == tokens.shape
        rows, tokens = np.ascontiguousarray(rows), np.ascontiguousarray(tokens)
        self.native.module.count_tokens(
            (address(counts), counts.strides[0] // 4), *counts.shape, address(rows), address(tokens), len(rows)
        )

    def penalize(self, logits: Floats, counts: NDArray[np.int32], index: Ids, penalties: Floats) -> None:
        assert penalties.dtype == np.float32
        assert counts.dtype == np.int32
        assert counts.strides[1] == 4
        assert index.dtype == np.int64
        assert logits.shape[1] == counts.shape[1]
        index, penalties = np.ascontiguousarray(index), np.ascontiguousarray(penalties)
        self.native.module.penalize(
            rows_of(logits), len(logits), (address(counts), counts.strides[0] // 4), *counts.shape,
            (address(index), index.strides[0] // 8), index.shape[1] - 2, address(penalties), len(index), IN_PROMPT,
        )  # fmt: skip

    def _at_once(
        self,
        record: Callable[..., Any],
        inputs: Sequence[Floats],
        *,
        positions: Ids | None = None,
        paging: Paging | None = None,
    ) -> tuple[Floats, ...]:
        """Record ops over arrays [tokens, ...], run them once, and return their results."""
        assert all(x.dtype == np.float32 for x in inputs)
        num_tokens = len(inputs[0])
        tape = Tape(self.native, max(num_tokens, 1))
        values = [tape.new(tuple(x.shape[1:])) for x in inputs]
        for value in values:
            value.read()
        results = record(*values)
        results = () if results is None else results if isinstance(results, tuple) else (results,)
        for result in results:
            result.read()
        tape.finish()
        for value, x in zip(values, inputs, strict=True):
            tape.result(value, num_tokens)[...] = x.reshape(num_tokens, value.width)
        if num_tokens:
            tape.run(None, positions, paging, num_tokens)
        return tuple(tape.result(result, num_tokens).reshape(num_tokens, *result.tail) for result in results)


def pad(values: Sequence[Any]) -> tuple[Any, Any]:
    """Up to two values, filled up with None."""
    first, second = (*values, None, None)[:2]
    return first, second


def floats(values: Floats) -> Floats:
    return np.ascontiguousarray(values, np.float32)


def rows_of(values: Floats) -> tuple[int, int]:
    """The address of float32 rows, and the values from one row to the next."""
    assert values.dtype == np.float32
    assert values.strides[1] == 4 or values.size <= len(values)
    return address(values), values.strides[0] // 4


def step_of_slots(cache: LayerCache, slots: Any) -> Paging:
    """A Paging that has only the slots of tokens."""
    empty = np.zeros((0, 0), np.int32)
    tables = [empty for _ in range(cache.group + 1)]
    return Paging(empty, empty, tables, [slots for _ in tables], cache.block_size, [0], [])


def layer_arguments(cache: LayerCache) -> tuple[Any, ...]:
    """A layer as an argument of `move_kv` in C++."""
    kind, (heads, _) = CACHE_TYPES[cache.k.dtype.name], cache.k.shape[1:]
    dims = dims_of(cache)
    return kind, cache.block_size, heads, *dims, Blocks(cache.k).view(), Blocks(cache.v).view(), cache.group


def dims_of(cache: LayerCache) -> tuple[int, int]:
    """The dimensions of a key's head and of a value's. Behind the codes of a head are the scales of all lanes."""
    lanes = -(-cache.block_size // LANES) * LANES
    scales = 4 * lanes if cache.k.dtype.itemsize == 1 else 0
    return (cache.k.shape[2] - scales) // lanes, (cache.v.shape[2] - scales) // cache.block_size


def describe_cache(cache: LayerCache, head_dim: int) -> dict[str, Any]:
    key_dim, value_dim = dims_of(cache)
    assert key_dim == head_dim, (key_dim, head_dim)
    return {
        "type": CACHE_TYPES[cache.k.dtype.name],
        "block_size": cache.block_size,
        "kv_heads": cache.k.shape[1],
        "head_dim": head_dim,
        "value_dim": value_dim,
        "keys": Blocks(cache.k),
        "values": Blocks(cache.v),
        "group": cache.group,
    }
