"""Tiny random models of Gemma 4, made by transformers: one for each thing that its published sizes differ in."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
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


def save_gguf(model: Any, path: Path, *, quantized: bool = False) -> Path:
    """In the layout of llama.cpp's converter, by the gguf package's names. Matrices may be in Q8_0."""
    config = model.config
    writer = gguf.GGUFWriter(path, "gemma4")
    full, heads = gguf.MODEL_ARCH.GEMMA4, config.per_layer_config
    kinds = [kind == "sliding_attention" for kind in config.layer_types]
    num_sharing = config.num_kv_shared_layers
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([heads[index].num_key_value_heads for index in range(len(kinds))])
    writer.add_feed_forward_length([layer.mlp.intermediate_size for layer in model.model.layers])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(kinds)
    writer.add_shared_kv_layers(num_sharing)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    for add, dim in (
        (writer.add_key_length, 32), (writer.add_value_length, 32), (writer.add_rope_dimension_count, 32),
        (writer.add_key_length_swa, 16), (writer.add_value_length_swa, 16), (writer.add_rope_dimension_count_swa, 16),
    ):  # fmt: skip
        add(dim)
    ropes = config.rope_parameters
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    names = gguf.get_tensor_name_map(full, config.num_hidden_layers)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * 4 + [1e30] * 12, np.float32))
    for key, value in model.state_dict().items():
        if key != "lm_head.weight":
            name, values = gguf_tensor_name(names, key), value.float().numpy()
            if quantized and values.ndim > 1 and values.shape[-1] % 32 == 0:
                blocks = gguf.GGMLQuantizationType.Q8_0
                writer.add_tensor(name, gguf.quantize(values, blocks), raw_dtype=blocks)
            else:
                writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensor_name(names: Any, key: str) -> str:
    """The router's scale and the experts' factors have another suffix than weights."""
    layer = key.split(".")[2]
    if key.endswith("router.scale"):
        return f"blk.{layer}.ffn_gate_inp.scale"
    if key.endswith("per_expert_scale"):
        return f"blk.{layer}.ffn_down_exps.scale"
    if not key.endswith(".weight"):  # layer_scalar, and the experts' stacks
        key += ".weight"
    found = names.get_name(key, (".weight",))
    assert found is not None, key
    return str(found)


def save(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory
