"""Tiny random models with experts, made by transformers, and saved as it saves them."""

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
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}
GPT_OSS: dict[str, Any] = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "head_dim": 32,
    "sliding_window": 7,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}
QWEN = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}

# The names of a configuration and a model in transformers, and what differs from SIZES.
EXPERT_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        QWEN | {"shared_expert_intermediate_size": 64},
    ),
    "dense layers": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        QWEN | {"shared_expert_intermediate_size": 64, "mlp_only_layers": [1]},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", QWEN | {"head_dim": 16, "norm_topk_prob": True}),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", QWEN | {"num_key_value_heads": 4, "intermediate_size": 32}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", GPT_OSS),
    "tight gpt_oss": ("GptOssConfig", "GptOssForCausalLM", GPT_OSS | {"swiglu_limit": 1.5}),
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        LATENT
        | {
            "q_lora_rank": None,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.5,
            "rope_parameters": DEEPSEEK_YARN,
        },
    ),
    "deepseek_v2 groups": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        LATENT | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        LATENT | {"n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0, "num_mtp_layers": 0},
    ),
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
