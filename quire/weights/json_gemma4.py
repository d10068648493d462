"""Gemma 4's text model from `config.json`. `json_config.py` calls it.

The sizes of layers without a window are `global_head_dim` and `num_global_key_value_heads`, as the published files have
them, or entries of `per_layer_config`, as transformers writes them.
"""

from __future__ import annotations

from dataclasses import replace

from quire.kernels.routing import Routing
from quire.models.config import ExpertsConfig, Gemma4Config, ModelConfig, Rope
from quire.models.structure import Structure
from quire.weights.fields import Fields, check_heads
from quire.weights.json_classics import with_defaults
from quire.weights.json_experts import MAX_EXPERTS
from quire.weights.json_plain import Windows, plain_config, windows_by_type
from quire.weights.rope import new_rope

DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
GLOBAL_HEAD_DIM = 512
PATTERN = 6  # every sixth layer sees all tokens, and so does the last one
FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
STILL = 1e30  # divides a frequency so that nothing rotates


def read_gemma4(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    if fields.get("use_bidirectional_attention") == "all":
        raise fields.unsupported("use_bidirectional_attention is 'all'; quire supports causal attention only.")
    if fields.flag("attention_bias", False):
        raise fields.unsupported("attention_bias is set, which quire does not support for this family.")
    local_section, full_section = (rope_section(fields, kind) for kind in ("sliding", "full"))
    plain = plain_config(
        fields, "gemma4", activation_key="hidden_activation", read_rope=lambda _, **own: new_rope(local_section, **own)
    )
    windows = gemma4_windows(fields, plain.num_layers)
    config = replace(
        plain,
        local_rope=plain.rope,
        windows=windows,
        attention_scale=1.0,
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        structure=Structure(qk_norm="head"),
        gemma4=read_details(fields, plain, windows),
        experts=read_gemma4_experts(fields, plain) if fields.flag("enable_moe_block", False) else None,
    )
    assert config.gemma4 is not None
    sizes = {"head_dim": config.gemma4.global_head_dim, "max_len": config.max_len}
    return replace(config, rope=full_rope(full_section, **sizes))


def rope_section(fields: Fields, kind: str) -> Fields:
    parameters = fields.section("rope_parameters")
    section = None if parameters is None else parameters.section(f"{kind}_attention")
    return section or Fields(FULL_ROPE if kind == "full" else {}, fields.where)


def full_rope(section: Fields, *, head_dim: int, max_len: int) -> Rope:
    """A proportional rope pairs all dimensions of a head and rotates the first ones, slower than a rope of only those
    would."""
    if section.text("rope_type", "default") != "proportional":
        return new_rope(section, 1e6, head_dim=head_dim, max_len=max_len)
    rotated = int(section.number("partial_rotary_factor", 1.0) * head_dim // 2)
    if not 0 < rotated <= head_dim // 2:
        raise section.bad(f"{rotated} of {head_dim // 2} pairs of a head's dimensions would rotate")
    factor = section.number("factor", 1.0)
    divisors = (factor,) * rotated + (STILL,) * (head_dim // 2 - rotated)
    return Rope(head_dim, section.number("rope_theta", 1e6), divisors=divisors)


def gemma4_windows(fields: Fields, num_layers: int) -> Windows:
    window = fields.count("sliding_window")
    by_type = windows_by_type(fields, num_layers, window)
    windows = by_type or tuple(window if (index + 1) % PATTERN else None for index in range(num_layers))
    return (*windows[:-1], None)


def read_details(fields: Fields, plain: ModelConfig, windows: Windows) -> Gemma4Config:
    keys_are_values = fields.flag("attention_k_eq_v", False)
    head_dim, num_kv_heads = read_global_heads(fields, plain, windows, keys_are_values)
    num_sharing = fields.count("num_kv_shared_layers", 0, least=0, most=plain.num_layers - 1)
    stored = windows[: plain.num_layers - num_sharing]
    if missing := [window for window in windows if window not in stored]:
        kind = "full" if missing[0] is None else "sliding"
        raise fields.bad(
            f"the last {num_sharing} layers share keys and values, and no layer of {kind} attention has any"
        )
    per_layer_size = (
        fields.count("hidden_size_per_layer_input", 0, least=0) if fields.has("hidden_size_per_layer_input") else 0
    )
    return Gemma4Config(
        head_dim,
        check_heads(fields, plain.num_heads, num_kv_heads),
        keys_are_values,
        num_sharing,
        2 * plain.intermediate_size if fields.flag("use_double_wide_mlp", False) else 0,
        per_layer_size,
        fields.count("vocab_size_per_layer_input", least=plain.vocab_size) if per_layer_size else 0,
    )


def read_global_heads(fields: Fields, plain: ModelConfig, windows: Windows, keys_are_values: bool) -> tuple[int, int]:
    """The dimensions of a head in layers without a window, and their number of key heads."""
    by_layer = fields.section("per_layer_config")
    if by_layer is None:
        has_own = keys_are_values and fields.has("num_global_key_value_heads")
        num_kv_heads = fields.count("num_global_key_value_heads") if has_own else plain.num_kv_heads
        return fields.count("global_head_dim", GLOBAL_HEAD_DIM), num_kv_heads
    full = {str(index) for index, window in enumerate(windows) if window is None}
    if set(by_layer.values) != full:
        raise fields.unsupported(f"per_layer_config has layers {sorted(by_layer.values)}, not those of full attention.")
    entries = [by_layer.section(key) or by_layer for key in sorted(full)]
    sizes = {
        (each.count("head_dim", plain.head_dim), each.count("num_key_value_heads", plain.num_kv_heads))
        for each in entries
    }
    if len(sizes) != 1 or any(set(each.values) - {"head_dim", "num_key_value_heads"} for each in entries):
        raise fields.unsupported("per_layer_config has layers of full attention that differ.")
    return sizes.pop()


def read_gemma4_experts(fields: Fields, plain: ModelConfig) -> ExpertsConfig:
    num_experts = fields.count("num_experts", most=MAX_EXPERTS)
    return ExpertsConfig(
        Routing(num_experts, fields.count("top_k_experts", most=num_experts)),
        fields.count("moe_intermediate_size"),
        layers=(True,) * plain.num_layers,
        activation="gelu_tanh",
    )
