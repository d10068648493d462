"""The ops of `reference` on the C++ kernels. Called with `Value`s, an op is recorded on their tape. Called with
tensors, it is recorded on a new tape, which runs once. Tests use this to compare each op with the reference.

Activations are float32. The cache is float32, bfloat16 or int8, in the layout of `csrc/attention.h`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.cache_spec import BlockShape, KVCacheSpec
from quire.kernels.cpu import ops
from quire.kernels.cpu.native import Native
from quire.kernels.cpu.recorded import RecordedModel
from quire.kernels.cpu.tape import Tape, Value
from quire.kernels.cpu.tape_ops import Blocks, Recorded
from quire.kernels.paging import LayerCache, Paging
from quire.kernels.sampling import IN_PROMPT, NUM_SETTINGS

PARTIALS = 1 << 18  # floats for partial results of contexts that several threads share: 1 MiB
CACHE_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int8: "int8"}


class NativeOps:
    """`reference`'s ops, on one instruction set and number of threads."""

    def __init__(self, native: Native) -> None:
        self.native = native
        self._partials = torch.empty(PARTIALS, dtype=torch.float32)

    apply_token_bitmask = staticmethod(ops.apply_token_bitmask)

    def rms_norm(self, x: Any, weight: Tensor, eps: float, residual: Any = None) -> Any:
        if isinstance(x, Tensor):
            inputs = (x,) if residual is None else (x, residual)
            results = self._at_once(lambda *values: self.rms_norm(values[0], weight, eps, *values[1:]), inputs)
            return results[0] if residual is None else results
        normed, total = x.tape.norm(x, weight.float().contiguous(), eps, residual)
        return normed if residual is None else (normed, total)

    def layer_norm(self, x: Any, weight: Tensor, bias: Tensor | None, eps: float, residual: Any = None) -> Any:
        if isinstance(x, Tensor):
            inputs = (x,) if residual is None else (x, residual)
            results = self._at_once(lambda *values: self.layer_norm(values[0], weight, bias, eps, *values[1:]), inputs)
            return results[0] if residual is None else results
        bias = None if bias is None else bias.float().contiguous()
        normed, total = x.tape.norm(x, weight.float().contiguous(), eps, residual, bias=bias, centered=True)
        return normed if residual is None else (normed, total)

    def add(self, x: Any, y: Any) -> Any:
        if isinstance(x, Tensor):
            return self._at_once(self.add, (x, y))[0]
        return x.tape.add(x, y)

    def rope(self, q: Any, k: Any, positions: Any, table: Tensor, interleaved: bool) -> Any:
        if isinstance(q, Tensor):
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
        if isinstance(k, Tensor):
            paging = step_of_slots(cache, slots)
            self._at_once(lambda k, v: self.store_kv(k, v, cache, None), (k, v), paging=paging)
            return
        k.tape.put(Recorded("store", {**describe_cache(cache, k.tail[1]), "k": k.read(), "v": v.read()}))

    def attention(
        self,
        q: Any,
        cache: LayerCache,
        paging: Any,
        *,
        scale: float,
        window: int | None = None,
        slopes: Tensor | None = None,
        softcap: float | None = None,
    ) -> Any:
        options: dict[str, Any] = {"scale": scale, "window": window, "slopes": slopes, "softcap": softcap}
        if isinstance(q, Tensor):
            return self._at_once(lambda value: self.attention(value, cache, None, **options), (q,), paging=paging)[0]
        out = q.tape.new(q.tail)
        arguments = {
            "q": q.read(),
            "out": out.read(),
            "heads": q.tail[0],
            "scale": scale,
            "window": window or 0,
            "softcap": softcap or 0.0,
            "slopes": 0 if slopes is None else slopes.float().contiguous(),
            "partials": self._partials,
            "num_partials": PARTIALS,
        }
        q.tape.put(Recorded("attention", {**describe_cache(cache, q.tail[1]), **arguments}))
        return out

    def activate(self, x: Any, activation: str) -> Any:
        if isinstance(x, Tensor):
            return self._at_once(lambda value: self.activate(value, activation), (x,))[0]
        return x.tape.activate(x, activation)

    def silu_mul(self, gate_up: Any) -> Any:
        return self._gate(gate_up, "silu")

    def gelu_mul(self, gate_up: Any) -> Any:
        return self._gate(gate_up, "gelu_tanh")

    def _gate(self, gate_up: Any, activation: str) -> Any:
        if isinstance(gate_up, Tensor):
            flat = gate_up.flatten(0, -2)
            out = self._at_once(lambda value: self._gate(value, activation), (flat,))[0]
            return out.view(*gate_up.shape[:-1], out.shape[-1])
        return gate_up.tape.gate(gate_up, activation)

    def cache_shapes(self, spec: KVCacheSpec, dtype: str, block_size: int) -> BlockShape:
        """The shape of a block. A latent has the shape of the reference, because no C++ kernel reads latents."""
        if spec.is_latent:
            return reference.cache_shapes(spec, dtype, block_size)
        assert spec.value_dim in (None, spec.head_dim), "these kernels take keys and values of one size"
        dtype, heads = spec.dtype or dtype, spec.num_kv_heads
        kept = next(kind for kind, name in CACHE_TYPES.items() if name == dtype)
        sizes = self.native.module.cache_bytes(dtype, block_size, heads, spec.head_dim)
        k, v = ((heads, num_bytes // kept.itemsize) for num_bytes in sizes)
        return BlockShape(k, v, kept)

    def record(self, model: Any, kv: Sequence[LayerCache], max_tokens: int) -> RecordedModel:
        return RecordedModel(model, kv, self.native, max_tokens)

    def sample(self, logits: Tensor, settings: Tensor, seeds: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        assert logits.dtype == torch.float32
        assert settings.dtype == torch.float64
        assert seeds.dtype == lengths.dtype == torch.int64
        rows, size = logits.shape
        logits, settings, seeds, lengths = (x.contiguous() for x in (logits, settings, seeds, lengths))
        assert settings.shape == (rows, NUM_SETTINGS)
        assert seeds.shape == lengths.shape == (rows,)
        tokens, largest = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
        self.native.module.sample(
            self.native.isa, self.native.threads, (logits.data_ptr(), logits.stride(0)), rows, size,
            *(x.data_ptr() for x in (settings, seeds, lengths, tokens, largest)),
        )  # fmt: skip
        return tokens, largest

    def penalize(self, logits: Tensor, counts: Tensor, index: Tensor, penalties: Tensor) -> None:
        assert logits.dtype == penalties.dtype == torch.float32
        assert counts.dtype == torch.int32
        assert index.dtype == torch.int64
        assert logits.stride(1) == counts.stride(1) == 1
        assert logits.shape[1] == counts.shape[1]
        index, penalties = index.contiguous(), penalties.contiguous()
        self.native.module.penalize(
            (logits.data_ptr(), logits.stride(0)), (counts.data_ptr(), counts.stride(0)), logits.shape[1],
            (index.data_ptr(), index.stride(0)), index.shape[1] - 2, penalties.data_ptr(), len(index), IN_PROMPT,
        )  # fmt: skip

    def _at_once(
        self,
        record: Callable[..., Any],
        inputs: Sequence[Tensor],
        *,
        positions: Tensor | None = None,
        paging: Paging | None = None,
    ) -> tuple[Tensor, ...]:
        """Record ops over tensors [tokens, ...], run them once, and return their results."""
        assert all(x.dtype == torch.float32 for x in inputs)
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
            tape.result(value, num_tokens).copy_(x.flatten(1))
        if num_tokens:
            tape.run(None, positions, paging, num_tokens)
        return tuple(tape.result(result, num_tokens).reshape(num_tokens, *result.tail) for result in results)


def step_of_slots(cache: LayerCache, slots: Tensor) -> Paging:
    """A Paging that has only the slots of tokens."""
    empty = torch.zeros(0, 0, dtype=torch.int32)
    tables = [empty for _ in range(cache.group + 1)]
    return Paging(empty, empty, tables, [slots for _ in tables], cache.block_size, [0], [])


def describe_cache(cache: LayerCache, head_dim: int) -> dict[str, Any]:
    return {
        "type": CACHE_TYPES[cache.k.dtype],
        "block_size": cache.block_size,
        "kv_heads": cache.k.shape[1],
        "head_dim": head_dim,
        "keys": Blocks(cache.k),
        "values": Blocks(cache.v),
        "group": cache.group,
    }
