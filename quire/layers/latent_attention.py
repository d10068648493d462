"""LatentAttention: multi-head latent attention (MLA) of DeepSeek-V2 and V3.

Keys and values of all heads are projections of one latent a token, which is all that the cache holds, with the part of
the keys that rotates. The projections are absorbed: queries are projected to the latent, all heads attend to the latent
as to one key head, and the outputs are projected back. Values are the first numbers of the keys. A GPU does not absorb
the projections in steps of whole prompts, which takes fewer operations. Each of several ranks has all heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.kernels import Kernels
from quire.kernels.cache_spec import KVCacheSpec
from quire.kernels.paging import Ends, LayerCache, Paging
from quire.layers.linear import Linear, output_linear
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryTable
from quire.layers.source import Part, Source

if TYPE_CHECKING:
    from torch import Tensor

    from quire.models.config import LatentConfig


class LatentAttention:
    """Under `name` in the checkpoint. `scale` is that of a head's own queries and keys."""

    window = softcap = slopes = None

    def __init__(
        self,
        source: Source,
        ops: Kernels,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        config: LatentConfig,
        scale: float,
        eps: float,
        rotary: RotaryTable,
        bias: bool = False,
    ) -> None:
        self.heads, self.head_dim = [num_heads, 1, 1], config.head_dim
        self.config, self.scale, self.rotary, self.ops = config, scale, rotary, ops
        query = Part(f"{name}.q_proj", num_heads * config.query_dim, split="rows", unit=config.query_dim)
        self.query_norm = self.query_output = None
        if config.query_rank:
            output = Part(f"{name}.q_b_proj", query.rows, split="rows", unit=config.query_dim)
            self.query_norm = RMSNorm(source, ops, f"{name}.q_a_layernorm", size=config.query_rank, eps=eps)
            self.query_output = Linear(source, [output], config.query_rank)
            query = Part(f"{name}.q_a_proj", config.query_rank)
        latent = Part(f"{name}.kv_a_proj_with_mqa", config.head_dim)
        has_query_bias = bias and bool(config.query_rank)
        self.inputs: list[Linear]  # of query and latent: one matrix on a GPU, where each product is a launch
        if ops.fused is not None and has_query_bias == bias:
            self.inputs = [Linear(source, [query, latent], hidden_size, bias=bias)]
        else:
            self.inputs = [
                Linear(source, [query], hidden_size, bias=has_query_bias),
                Linear(source, [latent], hidden_size, bias=bias),
            ]
        self.kv_norm = RMSNorm(source, ops, f"{name}.kv_a_layernorm", size=config.rank, eps=eps)
        self.absorb = source.matrix(*key_parts(f"{name}.kv_b_proj.weight", num_heads, config))
        self.values = source.matrix(*value_parts(f"{name}.kv_b_proj.weight", num_heads, config))
        output = Part(f"{name}.o_proj", hidden_size, split="columns", unit=config.value_dim)
        width = num_heads * config.value_dim
        self.output = output_linear(source, ops, output, width, inputs=range(width), unit=width, bias=bias)

    @property
    def cache_spec(self) -> KVCacheSpec:
        return KVCacheSpec(1, self.head_dim, value_dim=self.config.rank, is_latent=True)

    def __call__(
        self, x: Any, positions: Tensor, paging: Paging, cache: LayerCache, ends: Ends | None = None
    ) -> Tensor:
        """As `Attention`."""
        ops, config = self.ops, self.config
        q, kv = self._project(x)
        q, kv = q.view(-1, self.heads[0], config.query_dim), kv.view(-1, 1, config.head_dim)
        table, interleaved = self.rotary.table, self.rotary.interleaved
        slots, norm = paging.slot_mapping[cache.group], (self.kv_norm.weight, self.kv_norm.eps)
        if ops.fused is not None:
            q = ops.fused.rope_store_latent(q, kv, *norm, positions, table, interleaved, cache, slots)
        else:
            q, kv = ops.rope_latent(q, kv, *norm, positions, table, interleaved)
            ops.store_latent(kv, config.rank, cache, slots)
        if ops.fused is not None and ends is None:
            found = ops.fused.attend_to_prompts(q, kv.flatten(1), self.absorb, self.values, paging, self.scale)
            if found is not None:
                return self.output(found.flatten(1))
        if ends is not None:
            q, paging = q[ends.tokens], ends.paging
        out = ops.attention(ops.head_linear(q, self.absorb), cache, paging, scale=self.scale)
        return self.output(ops.head_linear(out, self.values).flatten(1))

    def _project(self, x: Any) -> tuple[Any, Any]:
        """Queries [tokens, heads * query_dim], and latents with what is rotated, [tokens, head_dim]."""
        if len(self.inputs) == 1:
            joined, dim = self.inputs[0](x), self.config.head_dim
            q, kv = joined[:, :-dim], joined[:, -dim:]
        else:
            q, kv = (linear(x) for linear in self.inputs)
        if self.query_norm is not None and self.query_output is not None:
            q = self.query_output(self.query_norm(q))
        return q, kv


def key_parts(name: str, num_heads: int, config: LatentConfig) -> tuple[list[Part], int]:
    """The transposed projections of keys, [rank, key_dim] of each head, and the columns of the transposed tensor.

    The stored tensor has for each head the rows of its keys and then those of its values.
    """
    stride = config.key_dim + config.value_dim
    starts = range(0, num_heads * stride, stride)
    parts = [
        Part(
            name,
            config.rank,
            transposed=True,
            columns=range(start, start + config.key_dim),
            expert=(head, num_heads),
        )
        for head, start in enumerate(starts)
    ]
    return parts, num_heads * stride


def value_parts(name: str, num_heads: int, config: LatentConfig) -> tuple[list[Part], int]:
    """The projections of values, [value_dim, rank] of each head, and their columns."""
    stride = config.key_dim + config.value_dim
    parts = [
        Part(
            name,
            config.value_dim,
            offset=head * stride + config.key_dim,
            fused_rows=num_heads * stride,
            expert=(head, num_heads),
        )
        for head in range(num_heads)
    ]
    return parts, config.rank
