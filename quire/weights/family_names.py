"""Names of tensors by family: what Hugging Face's checkpoints and GGUF files call the tensors of a `Transformer`.

Layers use canonical names, which are Llama's ("model.layers.0.self_attn.q_proj"). `names.py` translates with these
tables. A family without an entry has canonical names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FamilyNames:
    """From a family's names to the canonical ones. `prefix` is before all names but the output matrix; files of the
    bare model lack it. Layers are under `layers`, and tensors that are in no table keep their names."""

    prefix: str = "model."
    layers: str = "layers"
    top: Mapping[str, str] = field(default_factory=dict)
    layer: Mapping[str, str] = field(default_factory=dict)


GPT2_LAYER = {
    "ln_1": "input_layernorm",
    "attn.c_attn": "self_attn.qkv_proj",
    "attn.c_proj": "self_attn.o_proj",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
GPT2 = FamilyNames("transformer.", "h", {"wte": "embed_tokens", "wpe": "embed_positions", "ln_f": "norm"}, GPT2_LAYER)
BLOOM_LAYER = {
    "self_attention.query_key_value": "self_attn.qkv_proj",
    "self_attention.dense": "self_attn.o_proj",
    "mlp.dense_h_to_4h": "mlp.up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
}
FALCON_TOP = {"word_embeddings": "embed_tokens", "ln_f": "norm"}
TWO_NORMS = {"ln_attn": "input_layernorm", "ln_mlp": "post_attention_layernorm"}
NORMS_AFTER = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}

HUGGING_FACE: dict[str, FamilyNames] = {
    "bloom": FamilyNames("transformer.", "h", {**FALCON_TOP, "word_embeddings_layernorm": "embed_norm"}, BLOOM_LAYER),
    "falcon": FamilyNames("transformer.", "h", FALCON_TOP, BLOOM_LAYER),
    "falcon_40b": FamilyNames("transformer.", "h", FALCON_TOP, {**BLOOM_LAYER, **TWO_NORMS}),
    "glm4": FamilyNames(layer=NORMS_AFTER),
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gptj": FamilyNames(
        "transformer.",
        "h",
        {"wte": "embed_tokens", "ln_f": "norm"},
        {
            "ln_1": "input_layernorm",
            "attn.q_proj": "self_attn.q_proj",
            "attn.k_proj": "self_attn.k_proj",
            "attn.v_proj": "self_attn.v_proj",
            "attn.out_proj": "self_attn.o_proj",
            "mlp.fc_in": "mlp.up_proj",
            "mlp.fc_out": "mlp.down_proj",
        },
    ),
    "gpt_neox": FamilyNames(
        "gpt_neox.",
        "layers",
        {"embed_in": "embed_tokens", "final_layer_norm": "norm", "embed_out": "lm_head"},
        {
            "attention.query_key_value": "self_attn.qkv_proj",
            "attention.dense": "self_attn.o_proj",
            "mlp.dense_h_to_4h": "mlp.up_proj",
            "mlp.dense_4h_to_h": "mlp.down_proj",
        },
    ),
    "mpt": FamilyNames(
        "transformer.",
        "blocks",
        {"wte": "embed_tokens", "norm_f": "norm"},
        {
            "norm_1": "input_layernorm",
            "attn.Wqkv": "self_attn.qkv_proj",
            "attn.out_proj": "self_attn.o_proj",
            "norm_2": "post_attention_layernorm",
            "ffn.up_proj": "mlp.up_proj",
            "ffn.down_proj": "mlp.down_proj",
        },
    ),
    "opt": FamilyNames(
        "model.decoder.",
        "layers",
        {"final_layer_norm": "norm"},
        {
            "self_attn.out_proj": "self_attn.o_proj",
            "self_attn_layer_norm": "input_layernorm",
            "final_layer_norm": "post_attention_layernorm",
            "fc1": "mlp.up_proj",
            "fc2": "mlp.down_proj",
        },
    ),
    "phi": FamilyNames(
        layer={"self_attn.dense": "self_attn.o_proj", "mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"},
        top={"final_layernorm": "norm"},
    ),
    "starcoder2": FamilyNames(layer={"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}),
}

# What GGUF files call the tensors of a layer, where it differs from `names.GGUF_LAYER`.
FUSED_MLP = {"mlp.gate_up_proj": "ffn_up"}
NORMS_ON_BOTH_SIDES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GGUF: dict[str, Mapping[str, str]] = {
    "falcon_40b": {"input_layernorm": "attn_norm_2", "post_attention_layernorm": "attn_norm"},
    "gemma2": NORMS_ON_BOTH_SIDES,
    "glm": FUSED_MLP,
    "glm4": {**NORMS_ON_BOTH_SIDES, **FUSED_MLP},
    "olmo2": NORMS_ON_BOTH_SIDES,
    "olmo3": NORMS_ON_BOTH_SIDES,
    "phi3": FUSED_MLP,
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
}


def canonical_name(name: str, family: str) -> str:
    """The canonical name of a tensor in a family's checkpoint."""
    names = HUGGING_FACE.get(family)
    if names is None:
        return name
    stem, _, kind = name.rpartition(".")
    short = stem.removeprefix(names.prefix).removeprefix(names.prefix.partition(".")[2])
    first, _, rest = short.partition(".")
    if first == names.layers and rest:
        index, _, part = rest.partition(".")
        return f"model.layers.{index}.{names.layer.get(part, part)}.{kind}"
    top = names.top.get(short, short)
    return f"{top}.{kind}" if top == "lm_head" else f"model.{top}.{kind}"


def file_name(name: str, family: str) -> str:
    """The name in a family's checkpoint of a tensor with that canonical name."""
    names = HUGGING_FACE.get(family)
    if names is None or name.startswith("lm_head."):
        return name if names is None else _output_name(name, names)
    stem, _, kind = name.removeprefix("model.").rpartition(".")
    first, _, rest = stem.partition(".")
    if first == "layers" and rest:
        index, _, part = rest.partition(".")
        return f"{names.prefix}{names.layers}.{index}.{_stored(names.layer, part)}.{kind}"
    return f"{names.prefix}{_stored(names.top, stem)}.{kind}"


def _output_name(name: str, names: FamilyNames) -> str:
    return f"{_stored(names.top, 'lm_head')}.{name.rpartition('.')[2]}"


def _stored(table: Mapping[str, str], canonical: str) -> str:
    return next((stored for stored, name in table.items() if name == canonical), canonical)
