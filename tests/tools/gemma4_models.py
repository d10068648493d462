"""Tiny random models of Gemma 4, made by transformers: one for each thing that its published sizes differ in."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

LENGTH = 96
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "max_position_embeddings": LENGTH,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32}
GEMMA4_MODELS: dict[str, dict[str, Any]] = {
    "31b": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "26b-a4b": {"attention_k_eq_v": True, "num_global_key_value_heads": 1, **EXPERTS},
    "e2b": {
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 97,
        "num_key_value_heads": 1,
    },
    "rotated": {"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }},
}  # fmt: skip


def gemma4_model(name: str, **changes: Any) -> Any:
    """With random weights, the same at each call. Numbers that multiply a layer's output are around 1."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import Gemma4ForCausalLM, Gemma4TextConfig

        torch.manual_seed(0)
        config = Gemma4TextConfig(**(SIZES | GEMMA4_MODELS[name] | changes))
        config._attn_implementation = "eager"
        model = Gemma4ForCausalLM(config).eval()
    for parameter in model.parameters():
        is_factor = parameter.dim() == 1
        parameter.data.normal_(float(is_factor), 0.2)
    for key, buffer in model.named_buffers():
        if key.endswith("layer_scalar"):
            buffer.normal_(0.9, 0.1)
    return model


def save(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory
