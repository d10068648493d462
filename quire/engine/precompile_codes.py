"""The matrices of codes that a model has on a GPU, for the processes that compile kernels. `precompile.py` calls this.

It reads headers and loads no torch. Names of matrices are those of Llama; in models that have others nothing is found,
and their kernels are compiled when they are first launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from quire.config import EngineConfig
from quire.errors import QuireError
from quire.layers.source import Part
from quire.models.config import ModelConfig
from quire.quant.panels import join
from quire.quant.tile_format import TILE_OUTPUTS, TileFormat
from quire.weights.loader import opened
from quire.weights.tiles import format_of, rounded_format


class Product(NamedTuple):
    """One fused matrix."""

    parts: list[Part]
    cols: int
    activation: str | None = None
    is_embedding: bool = False


def find_codes(config: EngineConfig, model: ModelConfig, path: Path | None) -> tuple[list[dict[str, object]], bool]:
    """The distinct matrices of codes, as fields of `CodesOf`, and whether layers have dense ones too."""
    quantize = None if config.quantize == "none" else config.quantize
    if config.weights == "random" or path is None:
        products = list(products_of_layer(model, 0))
        return describe(
            [(each, [rounded_format(part, each.cols, quantize) for part in each.parts]) for each in products]
        )
    try:
        with opened(path) as (_, checkpoint):
            found = [
                (each, [format_of(part, checkpoint.find(part, each.cols), each.cols, quantize) for part in each.parts])
                for each in all_products(model)
            ]
    except (QuireError, KeyError):
        return [], True
    return describe(found)


def all_products(model: ModelConfig) -> Iterator[Product]:
    yield Product([Part("model.embed_tokens.weight", model.vocab_size)], model.hidden_size, is_embedding=True)
    if not model.tie_embeddings:
        yield Product([Part("lm_head.weight", model.vocab_size)], model.hidden_size)
    for layer in range(model.num_layers):
        yield from products_of_layer(model, layer)


def products_of_layer(model: ModelConfig, layer: int) -> Iterator[Product]:
    attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    width, kv_width = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    qkv = [Part(f"{attention}.{name}_proj.weight", rows) for name, rows in zip("qkv", (width, kv_width, kv_width))]  # noqa: B905
    yield Product(qkv, model.hidden_size)
    yield Product([Part(f"{attention}.o_proj.weight", model.hidden_size)], width)
    names = ("gate", "up") if model.structure.gated else ("up",)
    gate_up = [Part(f"{mlp}.{name}_proj.weight", model.intermediate_size) for name in names]
    activation = model.activation.partition("_")[0] if model.structure.gated else None
    yield Product(gate_up, model.hidden_size, activation)
    yield Product([Part(f"{mlp}.down_proj.weight", model.hidden_size)], model.intermediate_size)


def describe(found: list[tuple[Product, list[TileFormat | None]]]) -> tuple[list[dict[str, object]], bool]:
    matrices, has_plain = list[dict[str, object]](), False
    for product, formats in found:
        rows = [part.rows for part in product.parts]
        groups = join(rows, formats, TILE_OUTPUTS)
        for format, indices in groups:
            if format is None:
                has_plain |= ".layers." in product.parts[0].name
                continue
            sizes = {"num_out": sum(rows[index] for index in indices), "num_in": product.cols}
            activation = product.activation if len(groups) == 1 else None
            matrix = {**sizes, "activation": activation, "is_embedding": product.is_embedding, **asdict(format)}
            if matrix not in matrices:
                matrices.append(matrix)
    return matrices, has_plain
