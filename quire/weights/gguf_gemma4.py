"""Gemma 4 from the metadata of a GGUF file. `gguf_config.py` calls it.

Sizes of heads are stored twice: of layers without a window, and with the suffix `_swa` of the others. Numbers of key
heads and sizes of MLPs may be a value for each layer. The tensor rope_freqs is for layers without a window.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.kernels.routing import Routing
from quire.models.config import ExpertsConfig, Gemma4Config, ModelConfig, Rope
from quire.models.structure import Structure
from quire.weights.fields import Fields, check_heads
from quire.weights.json_experts import MAX_EXPERTS
from quire.weights.json_plain import Windows
from quire.weights.rope import check_divisors

Shapes = Mapping[str, tuple[int, ...]]
BY_LAYER = ("attention.head_count_kv", "feed_forward_length")
HEADS = ("attention.key_length", "attention.value_length", "rope.dimension_count")


def read_gemma4(
    plain_config: Callable[..., ModelConfig],
    windows_of: Callable[[Fields, int], Windows],
    fields: Fields,
    shapes: Shapes,
    divisors: Sequence[float] | None,
) -> ModelConfig:
    """`plain_config` reads what all architectures share, here of layers with a window."""
    num_layers = fields.count("block_count")
    windows = windows_of(fields, num_layers)
    if None not in windows or set(windows) == {None}:
        raise fields.unsupported("it has layers of one kind of attention only, which is no Gemma 4.")
    local, full = windows.index(next(filter(None, windows))), windows.index(None)
    plain = plain_config(local_fields(fields, local), shapes, "gemma4", None)
    head_dim = fields.count("attention.key_length")
    details = read_details(fields, shapes, plain, local, full, head_dim)
    dim = fields.count("rope.dimension_count", head_dim, least=2, most=head_dim)
    return replace(
        plain,
        windows=windows,
        rope=Rope(dim, fields.number("rope.freq_base", 1e6), divisors=read_divisors(fields, divisors, dim)),
        local_rope=Rope(plain.rope.dim, fields.number("rope.freq_base_swa", 10_000.0)),
        activation="gelu_tanh",
        attention_scale=1.0,
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        structure=Structure(qk_norm="head"),
        gemma4=details,
        experts=read_experts(fields, num_layers) if fields.count("expert_count", 0, least=0) else None,
    )


def read_details(
    fields: Fields, shapes: Shapes, plain: ModelConfig, local: int, full: int, head_dim: int
) -> Gemma4Config:
    """`local` and `full` are the first layers with and without a window."""
    last = plain.num_layers - 1
    num_sharing = fields.count("attention.shared_kv_layers", 0, least=0, most=last)
    if max(local, full) >= plain.num_layers - num_sharing:
        raise fields.bad(f"attention.shared_kv_layers is {num_sharing}, and no layer of one kind has keys of its own")
    per_layer = shapes.get("per_layer_token_embd.weight", (0, 0))
    size = fields.count("embedding_length_per_layer_input", 0, least=0)
    if size and not per_layer[0]:
        raise fields.bad("it has embedding_length_per_layer_input and no per_layer_token_embd.weight")
    if size and per_layer[0] < plain.vocab_size:
        raise fields.bad(f"per_layer_token_embd.weight has {per_layer[0]} rows, for a vocabulary of {plain.vocab_size}")
    return Gemma4Config(
        head_dim,
        check_heads(fields, plain.num_heads, value_of(fields, "attention.head_count_kv", full)),
        f"blk.{full}.attn_v.weight" not in shapes,
        num_sharing,
        value_of(fields, "feed_forward_length", last) if num_sharing else 0,
        size,
        per_layer[0] if size else 0,
    )


def read_experts(fields: Fields, num_layers: int) -> ExpertsConfig:
    num_experts = fields.count("expert_count", most=MAX_EXPERTS)
    routing = Routing(num_experts, fields.count("expert_used_count", most=num_experts))
    size = fields.count("expert_feed_forward_length")
    return ExpertsConfig(routing, size, layers=(True,) * num_layers, activation="gelu_tanh")


def local_fields(fields: Fields, layer: int) -> Fields:
    """The fields with the values of one layer, which has a window."""
    own: dict[str, Any] = {key: value_of(fields, key, layer) for key in BY_LAYER}
    own |= {key: fields.count(f"{key}_swa", fields.count(key)) for key in HEADS}
    return Fields(
        {**fields.values, **{fields.prefix + key: value for key, value in own.items()}}, fields.where, fields.prefix
    )


def value_of(fields: Fields, key: str, layer: int) -> int:
    """A layer's value, where a key may have one for each."""
    value = fields.get(key)
    if not isinstance(value, array):
        return fields.count(key)
    if layer >= len(value):
        raise fields.bad(f"{fields.prefix}{key} has {len(value)} entries, and there is a layer {layer}")
    return Fields({key: int(value[layer])}, fields.where).count(key)


def read_divisors(fields: Fields, divisors: Sequence[float] | None, dim: int) -> tuple[float, ...] | None:
    if divisors is None:
        return None
    check_divisors(fields, divisors, dim)
    return tuple(divisors)
