"""ModelConfig from `config.json`, for GPT-2, GPT-NeoX, Falcon, BLOOM, StarCoder, OPT, MPT and Phi.

They share LayerNorms and an MLP without a gate; few of their keys have the names of later families. `json_config.py`
calls the readers in `CLASSICS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quire.models.config import ModelConfig, Rope
from quire.models.structure import Structure
from quire.weights.fields import Fields, check_heads
from quire.weights.json_plain import ACTIVATIONS, MAX_LAYERS, read_activation
from quire.weights.rope import rope_from_json

NO_ROPE = Rope(2)  # of a family that does not rotate
BLOOM_LENGTH = 2048


def read_gpt2(fields: Fields) -> ModelConfig:
    refuse(fields, "scale_attn_by_inverse_layer_idx", "add_cross_attention")
    structure = Structure(
        norm="layer", norm_bias=True, gated=False, qkv_groups=1, transposed=True, num_positions=positions(fields)
    )
    config = gpt2_config(fields, "gpt2", structure)
    return with_biases(config, scaled=fields.flag("scale_attn_weights", True))


def read_gpt_bigcode(fields: Fields) -> ModelConfig:
    """StarCoder. q, k and v follow each other with one key head, and head by head otherwise."""
    refuse(fields, "add_cross_attention")
    one, num_heads = fields.flag("multi_query", True), fields.count("n_head")
    structure = Structure(
        norm="layer",
        norm_bias=True,
        gated=False,
        qkv_groups=1 if one else num_heads,
        num_positions=positions(fields),
    )
    config = gpt2_config(fields, "gpt_bigcode", structure, num_kv_heads=1 if one else num_heads)
    return with_biases(config, scaled=fields.flag("scale_attn_weights", True))


def read_gptj(fields: Fields) -> ModelConfig:
    """Biases are on the MLP and on the output matrix. The first dimensions of a head rotate, as neighbours."""
    structure = Structure(norm="layer", norm_bias=True, gated=False, parallel=True, shared_norm=True, head_bias=True)
    config = gpt2_config(fields, "gptj", structure)
    dim = fields.count("rotary_dim", 64, least=2, most=config.head_dim)
    if dim % 2:
        raise fields.bad(f"rotary_dim is {dim}, and must be even")
    tied = fields.flag("tie_word_embeddings", False)
    return replace(config, rope=Rope(dim, interleaved=True), mlp_bias=True, tie_embeddings=tied)


def read_gpt_neox(fields: Fields) -> ModelConfig:
    """GPT-NeoX and Pythia."""
    fields = renamed(fields, {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"})
    fields = with_defaults(fields, {"partial_rotary_factor": 0.25})
    bias = fields.flag("attention_bias", True)
    structure = Structure(
        norm="layer",
        norm_bias=True,
        gated=False,
        qkv_groups=fields.count("num_attention_heads"),
        parallel=fields.flag("use_parallel_residual", True),
    )
    config = classic_config(fields, "gpt_neox", structure, eps_key="layer_norm_eps", tied=False)
    return replace(rotated(fields, config), attention_bias=bias, output_bias=bias, mlp_bias=True)


def read_falcon(fields: Fields) -> ModelConfig:
    """Falcon 7B has one key head and one norm a layer, 40B groups and two norms. The RW models have ALiBi."""
    grouped, alibi = fields.flag("new_decoder_architecture", False), fields.flag("alibi", False)
    num_heads, bias = fields.count("num_attention_heads"), fields.flag("bias", False)
    one = not grouped and fields.flag("multi_query", True)
    num_kv_heads = fields.count("num_kv_heads", num_heads) if grouped else 1 if one else num_heads
    parallel = grouped or fields.flag("parallel_attn", True)
    two_norms = parallel and grouped and fields.count("num_ln_in_parallel_attn", 2, most=2) == 2
    structure = Structure(
        norm="layer",
        norm_bias=True,
        gated=False,
        parallel=parallel,
        shared_norm=parallel and not two_norms,
        qkv_groups=num_kv_heads if not one else 1,
        slopes=alibi_slopes(num_heads) if alibi else None,
    )
    config = classic_config(
        with_defaults(fields, {"max_position_embeddings": 2048}),
        "falcon_40b" if two_norms else "falcon",
        structure,
        size_key="ffn_hidden_size",
        activation_key="activation",
        num_kv_heads=num_kv_heads,
    )
    config = replace(config, attention_bias=bias, output_bias=bias, mlp_bias=bias)
    if not alibi:
        return rotated(fields, config)
    scaled = tuple(slope * config.scale for slope in structure.slopes or ())  # its scores are scaled with the bias
    return replace(config, structure=replace(structure, slopes=scaled))


def read_bloom(fields: Fields) -> ModelConfig:
    refuse(fields, "apply_residual_connection_post_layernorm")
    fields = renamed(
        fields,
        {
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_embed": "hidden_size",
            "seq_length": "max_position_embeddings",
        },
    )
    fields = with_defaults(fields, {"max_position_embeddings": BLOOM_LENGTH})
    num_heads = fields.count("num_attention_heads")
    structure = Structure(
        norm="layer",
        norm_bias=True,
        gated=False,
        qkv_groups=num_heads,
        embedding_norm=True,
        slopes=alibi_slopes(num_heads),
    )
    size = 4 * fields.count("hidden_size")
    config = classic_config(with_defaults(fields, {"hidden_act": "gelu_new", "n_inner": size}), "bloom", structure)
    return with_biases(replace(config, intermediate_size=size))


def read_starcoder2(fields: Fields) -> ModelConfig:
    bias, window = fields.flag("use_bias", True), fields.get("sliding_window")
    structure = Structure(norm="layer", norm_bias=True, gated=False)
    config = classic_config(
        with_defaults(fields, {"hidden_act": "gelu_pytorch_tanh"}),
        "starcoder2",
        structure,
        size_key="intermediate_size",
        eps_key="norm_epsilon",
        num_kv_heads=fields.count("num_key_value_heads", 2),
    )
    windows = (fields.count("sliding_window") if window is not None else None,) * config.num_layers
    return replace(rotated(fields, config), windows=windows, attention_bias=bias, output_bias=bias, mlp_bias=bias)


def read_opt(fields: Fields) -> ModelConfig:
    """Positions start at row 2 of their table."""
    if not fields.flag("do_layer_norm_before", True):
        raise fields.unsupported(
            "do_layer_norm_before is false, as in OPT-350m; quire has norms before attention only."
        )
    if fields.count("word_embed_proj_dim", fields.count("hidden_size")) != fields.count("hidden_size"):
        raise fields.unsupported("word_embed_proj_dim is not hidden_size, which quire does not support.")
    if not fields.flag("layer_norm_elementwise_affine", True):
        raise fields.unsupported("layer_norm_elementwise_affine is false, which quire does not support.")
    refuse(fields, "_remove_final_layer_norm")
    bias = fields.flag("enable_bias", True)
    structure = Structure(
        norm="layer",
        norm_bias=True,
        gated=False,
        num_positions=fields.count("max_position_embeddings") + 2,
        position_offset=2,
    )
    fields = with_defaults(fields, {"activation_function": "relu"})
    config = classic_config(fields, "opt", structure, size_key="ffn_dim", activation_key="activation_function")
    return replace(config, attention_bias=bias, output_bias=bias, mlp_bias=bias)


def read_mpt(fields: Fields) -> ModelConfig:
    attention = fields.section("attn_config") or Fields({}, fields.where)
    for key in ("clip_qkv", "logit_scale"):
        if fields.has(key) or attention.has(key):
            raise fields.unsupported(f"{key} is set, which quire does not support.")
    refuse(attention, "qk_ln", "prefix_lm")
    if not (attention.flag("alibi", True) and fields.flag("no_bias", True)):
        raise fields.unsupported("quire has MPT with alibi and no_bias only.")
    if "layernorm" not in (norm := fields.text("norm_type", "low_precision_layernorm")):
        raise fields.unsupported(f"norm_type {norm!r} is not supported; quire has layernorm.")
    if (kind := attention.text("attn_type", "multihead_attention")) != "multihead_attention":
        raise fields.unsupported(f"attn_type {kind!r} is not supported; quire has multihead_attention.")
    names = {
        "d_model": "hidden_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
        "max_seq_len": "max_position_embeddings",
    }
    fields = renamed(fields, names)
    size = fields.count("expansion_ratio", 4) * fields.count("hidden_size")
    slopes = alibi_slopes(fields.count("num_attention_heads"), attention.number("alibi_bias_max", 8.0))
    structure = Structure(norm="layer", gated=False, qkv_groups=1, slopes=slopes)
    config = classic_config(fields, "mpt", structure)
    return replace(config, intermediate_size=size, attention_scale=attention.optional_number("softmax_scale"))


def read_phi(fields: Fields) -> ModelConfig:
    """Phi-1, Phi-1.5 and Phi-2."""
    refuse(fields, "qk_layernorm")
    structure = Structure(norm="layer", norm_bias=True, gated=False, parallel=True, shared_norm=True, head_bias=True)
    fields = with_defaults(fields, {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5})
    config = classic_config(
        fields,
        "phi",
        structure,
        eps_key="layer_norm_eps",
        num_kv_heads=fields.count("num_key_value_heads", fields.count("num_attention_heads")),
        tied=False,
    )
    return with_biases(rotated(fields, config))


CLASSICS: dict[str, Callable[[Fields], ModelConfig]] = {
    "bloom": read_bloom,
    "falcon": read_falcon,
    "gpt2": read_gpt2,
    "gpt_bigcode": read_gpt_bigcode,
    "gpt_neox": read_gpt_neox,
    "gptj": read_gptj,
    "mpt": read_mpt,
    "opt": read_opt,
    "phi": read_phi,
    "starcoder2": read_starcoder2,
}


def gpt2_config(fields: Fields, family: str, structure: Structure, num_kv_heads: int | None = None) -> ModelConfig:
    names = {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
        "n_inner": "intermediate_size",
    }
    fields = with_defaults(renamed(fields, names), {"activation_function": "gelu_new"})
    return classic_config(fields, family, structure, activation_key="activation_function", num_kv_heads=num_kv_heads)


def classic_config(
    fields: Fields,
    family: str,
    structure: Structure,
    *,
    size_key: str = "intermediate_size",
    eps_key: str = "layer_norm_epsilon",
    activation_key: str = "hidden_act",
    num_kv_heads: int | None = None,
    tied: bool = True,
) -> ModelConfig:
    """The values that these families share. The MLP is four times as wide if the file does not say."""
    num_heads, size = fields.count("num_attention_heads"), fields.count("hidden_size")
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    if size % num_heads:
        raise fields.bad(f"hidden_size is {size}, which is not a multiple of {num_heads} heads")
    return ModelConfig(
        family=family,
        vocab_size=fields.count("vocab_size"),
        hidden_size=size,
        intermediate_size=fields.count(size_key, 4 * size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=check_heads(fields, num_heads, num_kv_heads or num_heads),
        head_dim=size // num_heads,
        max_len=fields.count("max_position_embeddings"),
        rope=NO_ROPE,
        windows=(None,) * num_layers,
        norm_eps=fields.number(eps_key, 1e-5),
        tie_embeddings=fields.flag("tie_word_embeddings", tied),
        activation=read_activation(fields, activation_key, "gelu", ACTIVATIONS),
        structure=structure,
    )


def with_biases(config: ModelConfig, *, scaled: bool = True) -> ModelConfig:
    """Biases on all matrices of layers. Scores that are not `scaled` are products as they are."""
    scale = None if scaled else 1.0
    return replace(config, attention_bias=True, output_bias=True, mlp_bias=True, attention_scale=scale)


def rotated(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(config, rope=rope_from_json(fields, head_dim=config.head_dim, max_len=config.max_len))


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """2 ** (-max_bias * i / n) for n heads, i from 1. If n is no power of two: the slopes of the next lower power, then
    every other one of those of twice as many heads."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-max_bias * index / power) for index in range(1, power + 1)]
    slopes += [2.0 ** (-max_bias * index / (2 * power)) for index in range(1, 2 * (num_heads - power), 2)]
    return tuple(slopes)


def positions(fields: Fields) -> int:
    return fields.count("n_positions")


def refuse(fields: Fields, *keys: str) -> None:
    for key in keys:
        if fields.flag(key, False):
            raise fields.unsupported(f"{key} is set, which quire does not support.")


def renamed(fields: Fields, names: Mapping[str, str]) -> Fields:
    """The values by their later names. A key that has its later name already is kept."""
    later = {new: fields.values[old] for old, new in names.items() if fields.values.get(old) is not None}
    return with_defaults(fields, later)


def with_defaults(fields: Fields, defaults: Mapping[str, Any]) -> Fields:
    given = {key: value for key, value in fields.values.items() if value is not None}
    return Fields({**defaults, **given}, fields.where)
