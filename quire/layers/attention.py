"""Attention: project to queries, keys and values, rotate, store, attend over the paged cache, project back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.kernels import Kernels
from quire.kernels.cache_spec import KVCacheSpec
from quire.kernels.paging import Ends, LayerCache, Paging
from quire.kernels.shares import own_heads
from quire.layers.linear import JoinedLinear, Linear, output_linear
from quire.layers.norm import Norm, UnitNorm
from quire.layers.rotary import RotaryTable
from quire.layers.source import Part, Source

if TYPE_CHECKING:
    from torch import Tensor


class Attention:
    """Grouped-query attention under `name` in the checkpoint.

    `window` is the number of tokens that a token sees, itself included. `qk_norm`, one norm for queries and one for
    keys, is applied to each head, or with `wide_norm` to all heads together, before rotation. Without `rotary` nothing
    is rotated. `slopes` [num_heads] float32 are ALiBi's. With `sinks`, each head's softmax has one more term. `qkv` and
    `output` name the stored projections, if they do not have the usual names. With `joined` the input is two tensors
    [tokens, hidden_size], whose projection is that of both side by side. Of several ranks each computes and caches its
    own heads; with `wide_norm`, which needs all of them, each has all.

    Gemma 4: with `keys_are_values` there is no projection to values, which are the keys before norm and rotation.
    `value_norm` is applied to each head of values. A layer that `shares` projects to queries only, stores nothing, and
    is called with the cache of the layer so many layers before it.
    """

    def __init__(
        self,
        source: Source,
        ops: Kernels,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        rotary: RotaryTable | None,
        slopes: Tensor | None = None,
        window: int | None = None,
        softcap: float | None = None,
        bias: bool = False,
        output_bias: bool = False,
        qk_norm: tuple[Norm, Norm | None] | None = None,
        wide_norm: bool = False,
        sinks: bool = False,
        qkv: Sequence[Part] | None = None,
        output: Part | None = None,
        joined: bool = False,
        keys_are_values: bool = False,
        value_norm: UnitNorm | None = None,
        shares: int | None = None,
    ) -> None:
        own = own_heads(num_heads, num_kv_heads, None if wide_norm else ops.ranks)
        self.heads = [len(own.queries), len(own.keys), len(own.keys)]
        num_parts = 1 if shares else 2 if keys_are_values else 3
        self.projected = [*self.heads[:num_parts], *([0] if shares else [])]
        qkv = qkv or [
            Part(f"{name}.{letter}_proj", heads * head_dim, split="rows", unit=head_dim)
            for letter, heads in zip("qkv"[:num_parts], (num_heads, num_kv_heads, num_kv_heads), strict=False)
        ]
        columns = [range(heads.start * head_dim, heads.stop * head_dim) for heads in (own.queries, own.keys, own.keys)]
        qkv = [part.only(rows) for part, rows in zip(qkv, columns, strict=False)]  # a layer that shares has no keys
        output = output or Part(f"{name}.o_proj", hidden_size, split="columns", unit=head_dim)
        self.qkv: Linear | JoinedLinear = (
            JoinedLinear(source, ops, qkv, hidden_size, bias=bias)
            if joined
            else Linear(source, qkv, hidden_size, bias=bias)
        )
        width = num_heads * head_dim
        self.output = output_linear(source, ops, output, width, inputs=columns[0], unit=head_dim, bias=output_bias)
        self.head_dim = head_dim
        self.scale = scale
        self.rotary = rotary
        self.slopes = None if slopes is None else slopes[own.queries.start : own.queries.stop]
        self.window = window
        self.softcap = softcap
        self.qk_norm = qk_norm
        self.wide_norm = wide_norm
        self.value_norm = value_norm
        self.shares = shares
        sink = Part(f"{name}.sinks.weight", num_heads, split="rows")
        self.sinks = source.vector([sink.only(own.queries)]) if sinks else None
        self.ops = ops
        fuses = num_parts == 3 and value_norm is None  # the fused ops take queries, keys and values of one product
        self.fused = ops.fused if fuses and rotary is not None else None

    @property
    def cache_spec(self) -> KVCacheSpec:
        return KVCacheSpec(self.heads[1], self.head_dim, window=self.window, shares=self.shares)

    def __call__(
        self, x: Any, positions: Tensor, paging: Paging, cache: LayerCache, ends: Ends | None = None
    ) -> Tensor:
        """x [tokens, hidden_size], positions [tokens] -> [tokens, hidden_size]; with `ends`, those tokens' rows only"""
        q, k, v = self._project(x)
        options = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
        if ends is None and self.fused is not None and self.rotary is not None and self.slopes is None:
            table, interleaved = self.rotary.table, self.rotary.interleaved
            out = self.fused.rope_attention(
                q, k, v, positions, table, interleaved, cache, paging, **options, **self._more_options()
            )
            return self.output(out.flatten(1))
        q, k = self._rope_and_store(q, k, v, positions, paging.slot_mapping[cache.group], cache)
        if ends is not None:
            q, paging = q[ends.tokens], ends.paging
        out = self.ops.attention(q, cache, paging, **options, slopes=self.slopes, **self._more_options())
        return self.output(out.flatten(1))

    def store(self, x: Any, positions: Tensor, slots: Tensor, cache: LayerCache) -> None:
        """Store the keys and values of tokens, as a call does, without attending."""
        self._rope_and_store(*self._project(x), positions, slots, cache)

    def _project(self, x: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Normed queries, keys and values, before rotation. A layer that shares has no keys: [tokens, 0, head_dim]."""
        heads = self.qkv(x).view(-1, sum(self.projected), self.head_dim)
        q, k, *rest = heads.split_with_sizes(self.projected, dim=1)
        v = rest[0] if rest else k
        if self.shares:
            return (q if self.qk_norm is None else self._norm(q, 0)), k, v
        if self.value_norm is not None:
            v = self.value_norm(v)
        if self.qk_norm is not None:
            q, k = self._norm(q, 0), self._norm(k, 1)
        return q, k, v

    def _more_options(self) -> dict[str, Any]:
        """Options that not every backend's kernels take."""
        return {} if self.sinks is None else {"sinks": self.sinks}

    def _norm(self, x: Any, index: int) -> Any:
        """Queries (index 0) or keys (1), [tokens, heads, head_dim]."""
        assert self.qk_norm is not None
        norm = self.qk_norm[index]
        assert norm is not None
        return norm(x.flatten(1)).view(-1, self.heads[index], self.head_dim) if self.wide_norm else norm(x)

    def _rope_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, slots: Tensor, cache: LayerCache
    ) -> tuple[Tensor, Tensor]:
        ops = self.ops
        if self.rotary is not None:
            table, interleaved = self.rotary.table, self.rotary.interleaved
            if self.fused is not None:
                return self.fused.rope_store(q, k, v, positions, table, interleaved, cache, slots)
            q, k = ops.rope(q, k, positions, table, interleaved)
        if not self.shares:
            ops.store_kv(k, v, cache, slots)
        return q, k
