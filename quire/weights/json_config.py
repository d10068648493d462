"""ModelConfig from Hugging Face's `config.json`: one function for each family, on top of `plain_config`.

Every number is checked, and an option that quire does not support is an error. `config.py` reads the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quire.models.config import ModelConfig, Rope
from quire.weights.fields import Fields
from quire.weights.json_classics import CLASSICS
from quire.weights.json_experts import EXPERT_FAMILIES
from quire.weights.json_gemma4 import read_gemma4
from quire.weights.json_modern import MODERN
from quire.weights.json_plain import MAX_LAYERS, Windows, plain_config, qwen_windows, windows_by_type
from quire.weights.rope import gemma_ropes_from_json
from quire.weights.sampling import sampling_from_json

# Gemma 3's published configurations omit the defaults of its configuration class.
GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}


def config_from_json(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, *, where: str = "config.json"
) -> ModelConfig:
    """From a `config.json`, and the `generation_config.json` beside it."""
    top = Fields(config, where)
    model_type = top.text("model_type")
    read = FAMILIES.get(model_type)
    if read is None:
        raise top.unsupported(f"model type {model_type!r} is not supported; quire has {', '.join(FAMILIES)}.")
    text = top.section("text_config") if model_type in ("gemma3", "gemma4") else top
    if text is None:
        raise top.bad("text_config is missing")
    eos = [fields.token_ids("eos_token_id") for fields in (Fields(generation or {}, where), top, text)]
    sampling = sampling_from_json(generation or {})
    return replace(read(text), eos_token_ids=next(filter(None, eos), ()), sampling=sampling)


def read_llama(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    config = plain_config(fields, "llama")
    return replace(config, attention_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias", False))


def read_mistral(fields: Fields) -> ModelConfig:
    """A null is no window; a missing key is a window of 4096."""
    config = plain_config(fields, "mistral")
    has_window = fields.has("sliding_window") or "sliding_window" not in fields.values
    window = fields.count("sliding_window", 4096) if has_window else None
    by_type = windows_by_type(fields, config.num_layers, window)
    return replace(config, windows=by_type or (window,) * config.num_layers)


def read_qwen2(fields: Fields) -> ModelConfig:
    config = plain_config(fields, "qwen2")
    return replace(config, windows=qwen_windows(fields, config.num_layers), attention_bias=True)


def read_mimo(fields: Fields) -> ModelConfig:
    num_mtp_layers = fields.count("num_nextn_predict_layers", 0, least=0, most=MAX_LAYERS)
    return replace(
        read_qwen2(fields),
        family="mimo",
        attention_bias=fields.flag("attention_bias", True),
        num_mtp_layers=num_mtp_layers,
    )


def read_qwen3(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    config = plain_config(fields, "qwen3", head_dim=128)
    windows = qwen_windows(fields, config.num_layers)
    structure = replace(config.structure, qk_norm="head")
    return replace(config, windows=windows, attention_bias=bias, output_bias=bias, structure=structure)


def read_gemma3(fields: Fields) -> ModelConfig:
    given = {key: value for key, value in fields.values.items() if value is not None}
    fields = Fields(GEMMA3_DEFAULTS | given, fields.where)
    if fields.flag("use_bidirectional_attention", False):
        raise fields.unsupported("use_bidirectional_attention is set; quire supports causal attention only.")
    bias = fields.flag("attention_bias", False)
    config = plain_config(fields, "gemma3", activation_key="hidden_activation", read_rope=gemma_global_rope)
    return replace(
        config,
        local_rope=gemma_ropes_from_json(fields, head_dim=config.head_dim, max_len=config.max_len)[1],
        windows=gemma_windows(fields, config.num_layers),
        attention_bias=bias,
        output_bias=bias,
        norm_offset=True,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        structure=replace(config.structure, qk_norm="head"),
    )


FAMILIES: dict[str, Callable[[Fields], ModelConfig]] = {
    "llama": read_llama,
    "mistral": read_mistral,
    "qwen2": read_qwen2,
    "qwen3": read_qwen3,
    "gemma3_text": read_gemma3,
    "gemma3": read_gemma3,
    "gemma4_text": read_gemma4,
    "gemma4": read_gemma4,
    "mimo": read_mimo,
    **CLASSICS,
    **MODERN,
    **EXPERT_FAMILIES,
}


def gemma_global_rope(fields: Fields, *, head_dim: int, max_len: int) -> Rope:
    return gemma_ropes_from_json(fields, head_dim=head_dim, max_len=max_len)[0]


def gemma_windows(fields: Fields, num_layers: int) -> Windows:
    window, pattern = fields.count("sliding_window"), fields.count("sliding_window_pattern")
    by_type = windows_by_type(fields, num_layers, window)
    return by_type or tuple(window if (index + 1) % pattern else None for index in range(num_layers))
