"""Transformer: one model for all families that differ from Llama by switches (`Structure`): the classics from GPT-2
on, and many later ones.

`registry.py` lists the families. `weights/` reads their configurations, and translates their names of tensors.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from quire.kernels import Kernels
from quire.kernels.paging import Ends, LayerCache, Paging
from quire.layers.attention import Attention
from quire.layers.latent_attention import LatentAttention
from quire.layers.norm import Norm
from quire.layers.rotary import RotaryTable
from quire.layers.source import Part, Source, fused_parts
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder, build_attention, build_mlp, build_norm
from quire.models.rope import rotary_table
from quire.quant.weight import Weight

if TYPE_CHECKING:
    from torch import Tensor


class Block:
    """One layer. What it computes is in `_sequential` and `_parallel`."""

    def __init__(
        self, config: ModelConfig, source: Source, ops: Kernels, index: int, rotary: RotaryTable | None
    ) -> None:
        name, structure = f"model.layers.{index}", config.structure
        norm = partial(build_norm, config, source, ops, size=config.hidden_size)
        self.attention = build_wired_attention(config, source, ops, index, rotary)
        self.mlp = build_mlp(config, source, ops, index)
        self.ops = ops
        after = structure.norms != "before"
        mlp_norm = "pre_feedforward_layernorm" if after else "post_attention_layernorm"
        has_mlp_norm = structure.norms != "after" and not structure.shared_norm
        self.input_norm = None if structure.norms == "after" else norm(f"{name}.input_layernorm")
        self.mlp_norm = norm(f"{name}.{mlp_norm}") if has_mlp_norm else None
        self.attention_out_norm = norm(f"{name}.post_attention_layernorm") if after else None
        self.mlp_out_norm = norm(f"{name}.post_feedforward_layernorm") if after else None
        self._run = self._parallel if structure.parallel else self._sequential

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        paging: Paging,
        cache: LayerCache,
        ends: Ends | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self._run(x, residual, positions, paging, cache, ends)

    def _sequential(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        paging: Paging,
        cache: LayerCache,
        ends: Ends | None,
    ) -> tuple[Tensor, Tensor]:
        """x = x + attention(norm(x)); x = x + mlp(norm(x)). Each of the norms may be missing, or follow instead."""
        x, residual = self._join(self.input_norm, x, residual)
        x = self.attention(x, positions, paging, cache, ends)
        if ends is not None:
            residual = residual[ends.tokens]
        if self.attention_out_norm is not None:
            x = self.attention_out_norm(x)
        x, residual = self._join(self.mlp_norm, x, residual)
        x = self.mlp(x)
        return x if self.mlp_out_norm is None else self.mlp_out_norm(x), residual

    def _parallel(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        paging: Paging,
        cache: LayerCache,
        ends: Ends | None,
    ) -> tuple[Tensor, Tensor]:
        """x = x + attention(norm(x)) + mlp(norm(x)), with one norm or two."""
        x, residual = self._join(self.input_norm, x, residual)
        attended = self.attention(x, positions, paging, cache, ends)
        if ends is not None:
            x, residual = x[ends.tokens], residual[ends.tokens]
        x = self.mlp(x if self.mlp_norm is None else self.mlp_norm(residual))
        return self.ops.add(attended, x), residual

    def _join(self, norm: Norm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The input of attention or MLP, and the sum of both."""
        if norm is not None:
            return norm.add(x, residual)
        total = x if residual is None else self.ops.add(x, residual)
        return total, total


class Transformer(Decoder):
    """A Decoder of Blocks."""

    def __init__(self, config: ModelConfig, source: Source, ops: Kernels) -> None:
        structure = config.structure
        rotaries = build_rotaries(config, ops)
        layers = [Block(config, source, ops, index, rotary) for index, rotary in enumerate(rotaries)]
        super().__init__(config, source, ops, layers, embedding_scale=structure.embedding_scale)
        self.positions = build_positions(config, source)
        norm = partial(build_norm, config, source, ops, "model.embed_norm", config.hidden_size)
        self.embedding_norm = norm() if structure.embedding_norm else None
        self.ops = ops

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = self.ops.add(x, self.positions.rows(positions))
        return x if self.embedding_norm is None else self.embedding_norm(x)


def build_rotaries(config: ModelConfig, ops: Kernels) -> list[RotaryTable | None]:
    """The rotation of each layer. Layers with a window may have their own."""
    structure = config.structure
    if not structure.rotates:
        return [None] * config.num_layers
    table = rotary_table(config.rope, config.max_len, ops.arrays)
    local = rotary_table(config.local_rope, config.max_len, ops.arrays) if config.local_rope else table
    return [
        None if index in structure.unrotated else table if window is None else local
        for index, window in enumerate(config.windows)
    ]


def build_positions(config: ModelConfig, source: Source) -> Weight | None:
    """The table of learned positions. Rows before that of position 0 are not read."""
    rows, offset = config.structure.num_positions, config.structure.position_offset
    if not rows:
        return None
    part = Part("model.embed_positions.weight", rows - offset, offset=offset, fused_rows=rows)
    return source.matrix([part], config.hidden_size)


def build_wired_attention(
    config: ModelConfig, source: Source, ops: Kernels, index: int, rotary: RotaryTable | None
) -> Attention | LatentAttention:
    structure, dim = config.structure, config.head_dim
    name = f"model.layers.{index}.self_attn"
    stored: dict[str, Any] = {"transposed": structure.transposed, "unit": dim}
    qkv = None
    if structure.qkv_groups:
        sizes = [heads * dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        qkv = fused_parts(Part(f"{name}.qkv_proj", 0, split="rows", **stored), sizes, structure.qkv_groups)
    output = Part(f"{name}.o_proj", config.hidden_size, split="columns", **stored)
    slopes = None if structure.slopes is None else ops.arrays.put(structure.slopes, "float32")
    return build_attention(config, source, ops, index, rotary, slopes=slopes, qkv=qkv, output=output)
