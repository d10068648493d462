"""What the readers of `config.json` share: the values that all families have, activations, and windows by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.models.config import Activation, ModelConfig, Rope
from quire.weights.fields import Fields, check_heads, default_head_dim
from quire.weights.rope import rope_from_json

MAX_LAYERS = 4096
GATES: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
ACTIVATIONS: dict[str, Activation] = {
    **GATES,
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}

Windows = tuple[int | None, ...]


def plain_config(
    fields: Fields,
    family: str,
    *,
    head_dim: int | None = None,
    activation_key: str = "hidden_act",
    read_rope: Callable[..., Rope] = rope_from_json,
) -> ModelConfig:
    """The values that all families share. `head_dim` is the family's default."""
    num_heads, hidden_size = fields.count("num_attention_heads"), fields.count("hidden_size")
    num_layers, max_len = fields.count("num_hidden_layers", most=MAX_LAYERS), fields.count("max_position_embeddings")
    head_dim = fields.count("head_dim", head_dim or default_head_dim(hidden_size, num_heads))
    return ModelConfig(
        family=family,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=check_heads(fields, num_heads, fields.count("num_key_value_heads", num_heads)),
        head_dim=head_dim,
        max_len=max_len,
        rope=read_rope(fields, head_dim=head_dim, max_len=max_len),
        windows=(None,) * num_layers,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        activation=read_activation(fields, activation_key),
    )


def read_activation(
    fields: Fields, key: str, default: str = "silu", names: Mapping[str, Activation] = GATES
) -> Activation:
    name = fields.text(key, default)
    if name not in names:
        raise fields.unsupported(f"{key} {name!r} is not supported; quire has {', '.join(names)}.")
    return names[name]


def windows_by_type(fields: Fields, num_layers: int, window: int | None) -> Windows | None:
    """The window of each layer from `layer_types`, or None if the configuration has no such list."""
    types = fields.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.bad(f"layer_types must be a list with an entry for each of {num_layers} layers")
    if unknown := [kind for kind in types if kind not in ("full_attention", "sliding_attention")]:
        raise fields.unsupported(f"layer type {unknown[0]!r} is not supported; quire has full and sliding_attention.")
    if window is None and "sliding_attention" in types:
        raise fields.bad("layer_types has sliding_attention, and sliding_window is missing")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def qwen_windows(fields: Fields, num_layers: int) -> Windows:
    if not fields.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = fields.count("sliding_window", 4096)
    first = fields.count("max_window_layers", 28, least=0)
    by_type = windows_by_type(fields, num_layers, window)
    return by_type or tuple(window if index >= first else None for index in range(num_layers))
