"""The files of a Hugging Face directory, from another directory or from a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import UnsupportedModel
from quire.models.config import ModelConfig, Rope
from quire.text.tokenizers.tokenizer import Tokenizer, load_tokenizer
from quire.weights.fields import read_json

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
TORCH_TYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


def copied_config(directory: Path) -> dict[str, Any]:
    """The config.json of a directory, of its text model if it has several."""
    config = read_json(directory / "config.json")
    if isinstance(config.get("text_config"), dict):
        config = {"model_type": "gemma3_text", **config["text_config"], "architectures": ["Gemma3ForCausalLM"]}
    return {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}


def copied_files(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in TOKENIZER_FILES if (directory / name).is_file()}


def made_config(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """A config.json from what a GGUF file says."""
    if config.family not in ARCHITECTURES:
        raise UnsupportedModel(
            f"quire cannot write the config.json of a {config.family} model from a GGUF file. Choose gguf:..., or "
            "start from the model's directory."
        )
    windows = {window for window in config.windows if window is not None}
    family = "mistral" if config.family == "llama" and windows else config.family
    model_type, architecture = ARCHITECTURES[family]
    document: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_len,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "torch_dtype": "float16",
        **rope_fields(config.rope),
    }
    activation = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[config.activation]
    document["hidden_activation" if family == "gemma3" else "hidden_act"] = activation
    if family in ("llama", "qwen3"):
        document["attention_bias"] = config.attention_bias
    if family == "llama":
        document["mlp_bias"] = config.mlp_bias
    return document | window_fields(config, family)


def window_fields(config: ModelConfig, family: str) -> dict[str, Any]:
    windows = sorted({window for window in config.windows if window is not None})
    if family == "mistral":
        return {"sliding_window": windows[0]}
    if family != "gemma3":
        return {}
    assert config.local_rope is not None
    types = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
    return {
        "sliding_window": windows[0] if windows else None,
        "layer_types": types,
        "rope_local_base_freq": config.local_rope.theta,
        "query_pre_attn_scalar": config.scale**-2,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "attention_bias": config.attention_bias,
    }


def rope_fields(rope: Rope) -> dict[str, Any]:
    if rope.divisors is not None:
        raise UnsupportedModel(
            "The GGUF file has its rotation's scaling as a table (rope_freqs.weight), and a config.json has no place "
            "for it. Choose gguf:..., or start from the model's directory."
        )
    fields: dict[str, Any] = {"rope_theta": rope.theta}
    scaling = rope.scaling
    if scaling is None:
        return fields
    if scaling.kind not in ("linear", "yarn"):  # what a GGUF file of these families can name
        raise UnsupportedModel(
            f"quire does not write rope scaling {scaling.kind!r} into a config.json. Choose gguf:...."
        )
    scaled: dict[str, Any] = {"rope_type": scaling.kind, "type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "yarn":
        scaled |= {
            "original_max_position_embeddings": scaling.original_max_len,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
        }
        if scaling.attention_factor is not None:
            scaled["attention_factor"] = scaling.attention_factor
    return fields | {"rope_scaling": scaled}


def made_files(path: Path, config: ModelConfig) -> tuple[Tokenizer, dict[str, bytes]]:
    """The tokenizer's files and generation_config.json, from a GGUF file."""
    tokenizer = load_tokenizer(path)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_len,
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens,
    }
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template
    generation: dict[str, Any] = {"eos_token_id": list(config.eos_token_ids) or tokenizer.eos_token_id}
    if config.sampling.from_model:
        generation |= {"do_sample": True, **config.sampling.as_params()}
    files = {
        "tokenizer.json": tokenizer.backend.to_str().encode(),
        "tokenizer_config.json": encoded(settings),
        "generation_config.json": encoded(generation),
    }
    return tokenizer, files


def encoded(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
