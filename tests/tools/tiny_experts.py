"""The models of `expert_models.py` as GGUF files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from quire.quant.ggml_types import GGMLType
from tests.tools.gguf_writer import tensor, write_gguf
from tests.tools.tiny_models import interleave

DEEPSEEK_KEYS: dict[str, Any] = {
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.key_length": lambda config: config.kv_lora_rank + config.qk_rope_head_dim,
    "attention.value_length": "kv_lora_rank",
    "attention.key_length_mla": "qk_head_dim",
    "attention.value_length_mla": "v_head_dim",
    "attention.head_count_kv": lambda config: 1,
    "rope.dimension_count": "qk_rope_head_dim",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
}

# By family: the architecture in GGUF files, whether converters permute queries and keys, and more metadata than all
# have. Values are names in the configuration of transformers, or functions of it.
GGUF: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "mixtral": ("llama", True, {}),
    "qwen2_moe": (
        "qwen2moe",
        False,
        {
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
    ),
    "qwen3_moe": ("qwen3moe", False, {"expert_feed_forward_length": "moe_intermediate_size"}),
    "olmoe": ("olmoe", False, {}),
    "gpt_oss": (
        "gpt-oss",
        False,
        {
            "attention.sliding_window": "sliding_window",
            "rope.scaling.type": lambda config: "yarn",
            "rope.scaling.factor": lambda config: config.rope_parameters["factor"],
            "rope.scaling.original_context_length": lambda config: config.rope_parameters[
                "original_max_position_embeddings"
            ],
        },
    ),
    "deepseek_v2": (
        "deepseek2",
        False,
        DEEPSEEK_KEYS
        | {
            "expert_weights_scale": "routed_scaling_factor",
            "rope.scaling.type": lambda config: "yarn",
            "rope.scaling.factor": lambda config: config.rope_parameters["factor"],
            "rope.scaling.original_context_length": lambda config: config.rope_parameters[
                "original_max_position_embeddings"
            ],
            "rope.scaling.yarn_log_multiplier": lambda config: 0.1 * config.rope_parameters["mscale_all_dim"],
        },
    ),
    "deepseek_v3": (
        "deepseek2",
        False,
        DEEPSEEK_KEYS
        | {
            "attention.q_lora_rank": "q_lora_rank",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob",
            "expert_gating_func": lambda config: 2,
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
        },
    ),
    "granitemoe": (
        "granitemoe",
        True,
        {
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "attention.scale": "attention_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
}
COMMON_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}


def gguf_metadata(model: Any, name: str) -> dict[str, Any]:
    config, (architecture, _, more) = model.config, GGUF[name]
    keys = {key: getattr(config, value) for key, value in COMMON_KEYS.items()}
    keys |= {key: getattr(config, value) if isinstance(value, str) else value(config) for key, value in more.items()}
    keys |= {"expert_count": num_experts(config), "expert_used_count": config.num_experts_per_tok}
    keys["rope.freq_base"] = float(config.rope_parameters["rope_theta"])
    if (head_dim := getattr(config, "head_dim", None)) and "attention.key_length" not in keys:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    return {"general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in keys.items()}}


def num_experts(config: Any) -> int:
    return next(
        getattr(config, key) for key in ("num_local_experts", "num_experts", "n_routed_experts") if hasattr(config, key)
    )


def per_matrix(model: Any) -> dict[str, np.ndarray]:
    """The tensors with gate and up of the experts apart, [experts, rows, cols], under the names of converters."""
    arrays: dict[str, np.ndarray] = {}
    for name, value in model.state_dict().items():
        array, stem = value.float().numpy(), name.removesuffix("gate_up_proj").removesuffix("down_proj")
        if "gpt_oss" in model.config.model_type and ".experts." in name:
            arrays |= gpt_oss_matrix(name, array)
        elif name.endswith("kv_b_proj.weight"):
            arrays |= latent_matrices(name, array, model.config)
        elif name.endswith("experts.gate_up_proj"):
            gate, up = np.split(array, 2, axis=1)
            arrays |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            arrays[f"{name}.weight"] = array
        elif name.endswith("shared_expert_gate.weight"):
            arrays[name] = array[0]
        else:
            arrays[name] = array
    return arrays


def gpt_oss_matrix(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Transposed matrices, gate and up row by row."""
    stem, kind = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
    array = array if kind == "bias" else np.ascontiguousarray(array.swapaxes(1, 2))
    if "gate_up" not in stem:
        return {f"{stem}.{kind}": array}
    layer = stem.removesuffix("gate_up_proj")
    parts = {"gate": array[:, 0::2], "up": array[:, 1::2]}
    return {f"{layer}{part}_proj.{kind}": np.ascontiguousarray(rows) for part, rows in parts.items()}


def latent_matrices(name: str, array: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    heads = array.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
    stem = name.removesuffix("kv_b_proj.weight")
    return {f"{stem}k_b_proj.weight": np.ascontiguousarray(keys.swapaxes(1, 2)), f"{stem}v_b_proj.weight": values}


LAYER = re.compile(r"model\.layers\.(\d+)\.")
OTHER_NAMES = {
    "mlp.gate.e_score_correction_bias": "blk.{}.exp_probs_b.bias",
}


def save_gguf(
    model: Any,
    name: str,
    path: Path,
    kind: GGMLType = GGMLType.F32,
    *,
    only_experts: GGMLType | None = None,
    more: dict[str, Any] | None = None,
) -> Path:
    """Matrices are of type `kind`, those of experts of type `only_experts` if it is given, the router's are float32."""
    architecture, permuted, _ = GGUF[name]
    names = gguf.get_tensor_name_map(gguf_architecture(architecture), model.config.num_hidden_layers)
    tensors, config = {}, model.config
    for key, array in per_matrix(model).items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if permuted and ("q_proj" in key or "k_proj" in key):
            array = interleave(array, config.hidden_size // config.num_attention_heads)
        spelled = key.replace("block_sparse_moe.experts", "mlp.experts").replace(
            "moe.router.weight", "moe.router.layer.weight"
        )
        spelled += ".weight" if spelled.endswith(".sinks") else ""
        stored = names.get_name(spelled, try_suffixes=(".weight", ".bias")) or OTHER_NAMES.get(
            LAYER.sub("", spelled), ""
        ).format(*LAYER.findall(spelled))
        assert stored, key
        plain = array.ndim == 1 or "ffn_gate_inp" in stored or stored.endswith(".bias")
        own = only_experts if only_experts and "_exps." in stored else kind
        tensors[stored] = tensor(array, GGMLType.F32 if plain else own)
    return write_gguf(path, gguf_metadata(model, name) | (more or {}), tensors)


def gguf_architecture(name: str) -> Any:
    return next(arch for arch, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
