"""The tiny models of `family_cases.py` as GGUF files, in the layout of llama.cpp's converters. The names of tensors are
the gguf package's, and its writer writes the files: nothing of quire's own naming is involved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.tools.family_cases import reference

ARCHITECTURES = {
    "gpt2": "gpt2",
    "gpt_neox": "gptneox",
    "gpt_neox-sequential": "gptneox",
    "falcon-7b": "falcon",
    "falcon-40b": "falcon",
    "bloom": "bloom",
    "bloom-odd": "bloom",
    "gpt_bigcode": "starcoder",
    "starcoder2": "starcoder2",
    "mpt": "mpt",
    "phi": "phi2",
    "phi3": "phi3",
    "phi3-short": "phi3",
    "phi3-long": "phi3",
    "gemma2": "gemma2",
    "glm": "chatglm",
    "glm4": "glm4",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "smollm3": "smollm3",
    "granite": "granite",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "seed_oss": "seed_oss",
}
GROUPED_QKV = ("gpt_neox", "falcon", "bloom")  # files of Hugging Face hold q, k and v head by head
PAIRED_ROTATION = ("smollm3", "granite")  # converters permute q and k


def write(name: str, path: Path) -> Path:
    model, architecture = reference(name), ARCHITECTURES[name]
    writer = gguf.GGUFWriter(path, architecture)
    add_metadata(writer, name, model.config)
    names = gguf.get_tensor_name_map(number_of(architecture), model.config.num_hidden_layers)
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state = {key: value for key, value in state.items() if not key.startswith(("lm_head", "embed_out"))}
    for key, value in state.items():
        suffixes = (".weight", ".bias")
        found = names.get_name(key, suffixes) or names.get_name(key.removeprefix("transformer."), suffixes)
        assert found is not None, key
        writer.add_tensor(found, np.ascontiguousarray(converted(name, key, value, model.config)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def number_of(architecture: str) -> Any:
    return next(number for number, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)


def converted(name: str, key: str, value: torch.Tensor, config: Any) -> np.ndarray:
    family = name.partition("-")[0]
    if family == "gpt2" and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        value = value.T
    if family in GROUPED_QKV and "query_key_value" in key and name != "falcon-7b":
        value = concatenated(value, config)
    if family in PAIRED_ROTATION and ("q_proj" in key or "k_proj" in key):
        value = neighbours(value, config.num_attention_heads if "q_proj" in key else config.num_key_value_heads)
    if family == "gemma2" and "norm" in key:
        value = value + 1
    return value.float().numpy()


def concatenated(value: torch.Tensor, config: Any) -> torch.Tensor:
    heads = config.num_attention_heads
    groups = getattr(config, "num_kv_heads", None) or heads
    dim, queries = config.hidden_size // heads, heads // groups
    grouped = value.view(groups, (queries + 2) * dim, *value.shape[1:])
    return torch.cat([part.flatten(0, 1) for part in grouped.split([queries * dim, dim, dim], dim=1)])


def neighbours(value: torch.Tensor, heads: int) -> torch.Tensor:
    """Dimensions i and i + dim / 2 of each head become neighbours."""
    return value.view(heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


def add_metadata(writer: gguf.GGUFWriter, name: str, config: Any) -> None:
    family = name.partition("-")[0]
    heads, size = config.num_attention_heads, config.hidden_size
    dim = getattr(config, "head_dim", None) or size // heads
    writer.add_context_length(getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", 64))
    writer.add_embedding_length(size)
    writer.add_block_count(config.num_hidden_layers)
    sizes = ("ffn_hidden_size", "intermediate_size", "n_inner")
    writer.add_feed_forward_length(next(filter(None, (getattr(config, key, None) for key in sizes)), 4 * size))
    writer.add_head_count(heads)
    one = name in ("falcon-7b", "gpt_bigcode")
    kv_heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads
    writer.add_head_count_kv(1 if one else kv_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        keys = ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")
        writer.add_layer_norm_eps(next(getattr(config, key) for key in keys if hasattr(config, key)))
    if dim * heads != size:
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    if getattr(config, "sliding_window", None) and family not in ("starcoder2", "smollm3", "seed_oss"):
        writer.add_sliding_window(config.sliding_window)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1.0)))
    add_special(writer, family, config, rope)


def add_special(writer: gguf.GGUFWriter, family: str, config: Any, rope: dict[str, Any]) -> None:
    def gpt_neox() -> None:
        writer.add_parallel_residual(config.use_parallel_residual)

    def mpt() -> None:
        writer.add_max_alibi_bias(8.0)

    def gemma2() -> None:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)

    def granite() -> None:
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)

    def cohere() -> None:
        writer.add_logit_scale(config.logit_scale)

    def olmo3() -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_attn_factors(rope["attention_factor"] / (0.1 * np.log(rope["factor"]) + 1.0))
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])

    def phi3() -> None:
        if rope.get("rope_type") != "longrope":
            return
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for length in ("short", "long"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))

    special: dict[str, Callable[[], None]] = {
        "gpt_neox": gpt_neox, "mpt": mpt, "gemma2": gemma2, "granite": granite, "cohere": cohere, "cohere2": cohere,
        "olmo3": olmo3, "phi3": phi3,
    }  # fmt: skip
    special.get(family, lambda: None)()
