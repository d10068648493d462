"""Tiny random models with experts, made by transformers and saved as it saves them: a Hugging Face directory."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
QWEN = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}

# The names of a configuration and a model in transformers, and what differs from SIZES.
EXPERT_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        QWEN | {"shared_expert_intermediate_size": 64, "mlp_only_layers": [1]},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", QWEN | {"head_dim": 16, "norm_topk_prob": True}),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", QWEN | {"num_key_value_heads": 4, "intermediate_size": 32}),
    "granitemoe": (
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 6.0,
            "tie_word_embeddings": True,
        },
    ),
}


def transformers_model(name: str, **changes: Any) -> Any:
    """With random weights, the same at each call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import transformers

    config_name, model_name, options = EXPERT_MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**(SIZES | options | changes))
    config._attn_implementation = "eager"
    model = getattr(transformers, model_name)(config).eval()
    for key, parameter in model.named_parameters():
        is_norm = key.endswith("norm.weight")
        parameter.data.normal_(float(is_norm), 0.2)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.2)
    return model


def save(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory


def expected_logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(tokens[None], use_cache=False).logits[0].float()
    return logits
