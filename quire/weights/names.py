"""Names of tensors: from the canonical names, which are Hugging Face's, to those in files.

Layers use canonical names ("model.layers.0.mlp.down_proj.weight"), and checkpoints translate them with these tables.
`may_stay_unread` lists the tensors that a file may have in excess.
"""

from __future__ import annotations

import re

from quire.weights.family_names import GGUF, canonical_name

GGUF_TOP = {
    "model.embed_tokens": "token_embd",
    "model.embed_positions": "position_embd",
    "model.embed_norm": "token_embd_norm",
    "model.norm": "output_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "lm_head": "output",
}

GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}

# gpt-oss's converters name the norm before the experts after what comes before it.
# Gemma 3 has a norm after attention, so its norm before the MLP has another canonical name.
GGUF_LAYER_GPT_OSS = {
    **GGUF_LAYER,
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.sinks": "attn_sinks",
}

GGUF_LAYER_GEMMA3 = {
    **GGUF_LAYER,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

GGUF_LAYER_GEMMA4 = {
    **GGUF_LAYER_GEMMA3,
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "mlp.router_norm": "ffn_gate_inp.scale",
    "mlp.expert_factors": "ffn_down_exps.scale",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "layer_scale": "layer_output_scale",
}

GGUF_LAYERS = {"gemma3": GGUF_LAYER_GEMMA3, "gemma4": GGUF_LAYER_GEMMA4, "gpt_oss": GGUF_LAYER_GPT_OSS}

# Parts of canonical names that some families' safetensors spell in another way.
SAFETENSORS_SPELLING = {
    "mixtral": {".mlp.gate.": ".block_sparse_moe.gate."},
    "gpt_oss": {".mlp.gate.": ".mlp.router.", ".sinks.weight": ".sinks"},
    "granitemoe": {".mlp.gate.": ".block_sparse_moe.router.layer."},
    "gemma4": {
        ".mlp.gate.": ".router.proj.",
        ".mlp.router_norm.weight": ".router.scale",
        ".mlp.expert_factors.weight": ".router.per_expert_scale",
        ".layer_scale.weight": ".layer_scalar",
    },
}

# Multimodal checkpoints store the text model under one of these prefixes. The first that matches is replaced.
TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}

UNREAD_GGUF = re.compile(
    r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.attn_rot_embd\.weight|blk\.\d+\.rope_freqs\.weight"
)
UNREAD_SAFETENSORS = re.compile(
    r".*\.rotary_emb\.inv_freq|(model\.)?(vision_tower|multi_modal_projector|audio_tower|embed_vision|embed_audio)\..*|.*\.self_attn\.masked_bias|"
    r"model\.mtp_layers\..*|.*\.(attn|attention|self_attention)\.(masked_)?bias"
)
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def gguf_name(name: str, family: str) -> str:
    """The name in a GGUF file of that family. A name without a GGUF counterpart is returned unchanged."""
    stem, _, suffix = name.rpartition(".")
    if stem in GGUF_TOP:
        return f"{GGUF_TOP[stem]}.{suffix}"
    table = {**GGUF_LAYERS.get(family, GGUF_LAYER), **GGUF.get(family, {})}
    match = LAYER.fullmatch(stem)
    if match and suffix == "e_score_correction_bias":
        return f"blk.{match[1]}.exp_probs_b.bias"
    if match and match[2] in table:
        stored = table[match[2]]
        return f"blk.{match[1]}.{stored}" if stored.endswith(".scale") else f"blk.{match[1]}.{stored}.{suffix}"
    return name


def safetensors_name(name: str, family: str) -> str:
    for canonical, spelling in SAFETENSORS_SPELLING.get(family, {}).items():
        name = name.replace(canonical, spelling)
    return name


def text_name(name: str, family: str = "llama") -> str:
    """The canonical name of a safetensors name: without the text model prefix of multimodal checkpoints."""
    for prefix, canonical in TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return canonical + name.removeprefix(prefix)
    return canonical_name(name, family)


def is_draft_layer(name: str, num_layers: int) -> bool:
    """Whether it belongs to a layer behind the last one, which predicts more tokens. DeepSeek-V3 has one."""
    match = re.match(r"(?:model\.layers|blk)\.(\d+)\.", name)
    return match is not None and int(match[1]) >= num_layers


def is_key_of_sharing_layer(name: str, num_stored: int) -> bool:
    """Whether it makes keys or values in a layer that reads another layer's. Published files of Gemma 4 have some."""
    match = re.match(r"(?:.*\.layers\.(\d+)\.self_attn\.[kv]_|blk\.(\d+)\.attn_[kv][._])", name)
    return match is not None and int(match[1] or match[2]) >= num_stored


def may_stay_unread(name: str, *, tied: bool) -> bool:
    """Whether a file may have this tensor although the model does not use it."""
    if tied and name in ("lm_head.weight", "embed_out.weight", "output.weight"):
        return True
    return bool(UNREAD_GGUF.fullmatch(name) or UNREAD_SAFETENSORS.fullmatch(name))
