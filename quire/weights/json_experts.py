"""The families with experts from `config.json`. `json_config.py` has the dense families and calls these."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from quire.kernels.routing import Routing
from quire.models.config import ExpertsConfig, LatentConfig, ModelConfig
from quire.weights.fields import Fields
from quire.weights.json_classics import with_defaults
from quire.weights.json_modern import with_multipliers
from quire.weights.json_plain import plain_config, qwen_windows, windows_by_type

MAX_EXPERTS = 4096
SILU_FACTOR = 1.702  # of gpt-oss's gate
# What configurations of DeepSeek-V3 mean where they have no such key. A null is not such a case.
DEEPSEEK_V3_DEFAULTS = {
    "first_k_dense_replace": 3,
    "n_group": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}
DEEPSEEK_V2_DEFAULTS = {"n_shared_experts": 2, "q_lora_rank": 1536}
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_routing(fields: Fields, *, normalize: bool = True) -> Routing:
    key = next((key for key in EXPERT_KEYS if fields.has(key)), EXPERT_KEYS[0])
    num_experts = fields.count(key, most=MAX_EXPERTS)
    return Routing(num_experts, fields.count("num_experts_per_tok", most=num_experts), normalize=normalize)


def read_mixtral(fields: Fields, plain: ModelConfig) -> ModelConfig:
    window = fields.count("sliding_window") if fields.has("sliding_window") else None
    experts = all_layers(fields, plain, read_routing(fields))
    return replace(plain, windows=(window,) * plain.num_layers, experts=experts)


def read_qwen2_moe(fields: Fields, plain: ModelConfig) -> ModelConfig:
    experts = replace(
        sparse_layers(fields, plain),
        shared_size=fields.count("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return replace(plain, attention_bias=fields.flag("qkv_bias", True), experts=experts)


def read_qwen3_moe(fields: Fields, plain: ModelConfig) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    structure, experts = replace(plain.structure, qk_norm="head"), sparse_layers(fields, plain)
    return replace(plain, attention_bias=bias, output_bias=bias, structure=structure, experts=experts)


def read_olmoe(fields: Fields, plain: ModelConfig) -> ModelConfig:
    if fields.has("clip_qkv"):
        raise fields.unsupported(f"clip_qkv is {fields.get('clip_qkv')}, which quire does not support.")
    bias = fields.flag("attention_bias", False)
    routing = read_routing(fields, normalize=fields.flag("norm_topk_prob", False))
    experts = all_layers(fields, plain, routing)
    return replace(
        plain,
        structure=replace(plain.structure, qk_norm="whole"),
        attention_bias=bias,
        output_bias=bias,
        experts=experts,
    )


def read_granitemoe(fields: Fields, plain: ModelConfig) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    experts = all_layers(fields, plain, read_routing(fields))
    config = replace(plain, attention_bias=bias, output_bias=bias, experts=experts)
    return with_multipliers(
        replace(config, attention_scale=fields.number("attention_multiplier", 1.0)),
        embedding=fields.number("embedding_multiplier", 1.0),
        residual=fields.number("residual_multiplier", 1.0),
        logits=fields.number("logits_scaling", 1.0),
    )


def read_gpt_oss(fields: Fields, plain: ModelConfig) -> ModelConfig:
    if fields.number("swiglu_alpha", SILU_FACTOR) != SILU_FACTOR:
        raise fields.unsupported(f"swiglu_alpha is {fields.get('swiglu_alpha')}; quire has {SILU_FACTOR}.")
    bias = fields.flag("attention_bias", True)
    experts = replace(
        all_layers(fields, plain, read_routing(fields)),
        router_bias=True,
        bias=True,
        activation="clamped_silu",
        limit=fields.number("swiglu_limit", 7.0),
    )
    return replace(plain, attention_bias=bias, output_bias=bias, attention_sinks=True, experts=experts)


def read_deepseek(fields: Fields, model_type: str, make_plain: Callable[..., ModelConfig]) -> ModelConfig:
    """DeepSeek-V2, V2-Lite and V3. `make_plain(head_dim=...)` reads what all families share."""
    rotated = fields.count("qk_rope_head_dim", 64)
    latent = LatentConfig(
        rank=fields.count("kv_lora_rank", 512),
        rotated_dim=rotated,
        key_dim=fields.count("qk_nope_head_dim", 128),
        value_dim=fields.count("v_head_dim", 128),
        query_rank=fields.count("q_lora_rank") if fields.has("q_lora_rank") else 0,
    )
    plain = make_plain(rotated)
    bias = fields.flag("attention_bias", False)
    routing = read_deepseek_routing(fields, is_v3=model_type == "deepseek_v3")
    return with_latent(
        replace(
            plain,
            rope=replace(plain.rope, interleaved=fields.flag("rope_interleave", True)),
            output_bias=bias,
            experts=deepseek_layers(fields, plain, routing, is_v3=model_type == "deepseek_v3"),
        ),
        latent,
        mscale=read_mscale(fields, plain),
    )


def with_latent(config: ModelConfig, latent: LatentConfig, *, mscale: float) -> ModelConfig:
    """`mscale` is YaRN's factor of queries and of keys."""
    scale = latent.query_dim**-0.5 * mscale**2
    return replace(config, latent=latent, num_kv_heads=1, head_dim=latent.head_dim, attention_scale=scale)


def read_mscale(fields: Fields, plain: ModelConfig) -> float:
    section = fields.section("rope_parameters") or fields.section("rope_scaling")
    if section is None or plain.rope.scaling is None or not section.get("mscale_all_dim"):
        return 1.0
    return 0.1 * section.number("mscale_all_dim") * math.log(max(plain.rope.scaling.factor, 1.0)) + 1.0


def read_deepseek_routing(fields: Fields, *, is_v3: bool) -> Routing:
    method = fields.text("topk_method", "noaux_tc" if is_v3 else "greedy")
    if method not in (("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")):
        raise fields.unsupported(f"topk_method {method!r} is not supported for this family.")
    scoring: Literal["softmax", "sigmoid"] = "sigmoid" if is_v3 else "softmax"
    if fields.text("scoring_func", scoring) != scoring:
        raise fields.unsupported(f"scoring_func is {fields.get('scoring_func')!r}; this family has {scoring}.")
    if not is_v3 and fields.flag("norm_topk_prob", False):
        raise fields.unsupported("norm_topk_prob is set, which quire does not support for this family.")
    num_groups = 1 if method == "greedy" else fields.count("n_group")
    num_experts = fields.count("n_routed_experts", most=MAX_EXPERTS)
    group_scores = 2 if is_v3 else 1
    check_groups(fields, num_experts, num_groups, group_scores)
    top_groups = fields.count("topk_group", most=num_groups) if num_groups > 1 else 1
    candidates = top_groups * (num_experts // num_groups)
    return Routing(
        num_experts,
        fields.count("num_experts_per_tok", most=candidates),
        scoring=scoring,
        normalize=is_v3 and fields.flag("norm_topk_prob", True),
        factor=fields.number("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        top_groups=top_groups,
        group_scores=group_scores,
    )


def check_groups(fields: Fields, num_experts: int, num_groups: int, group_scores: int) -> None:
    """A group's score is the sum of its `group_scores` best."""
    if num_experts % num_groups:
        raise fields.bad(f"{num_experts} experts are not a multiple of {num_groups} groups")
    if num_groups > 1 and num_experts // num_groups < group_scores:
        raise fields.bad(f"{num_groups} groups of {num_experts} experts have fewer than {group_scores} experts each")


def deepseek_layers(fields: Fields, plain: ModelConfig, routing: Routing, *, is_v3: bool) -> ExpertsConfig:
    check_activation(fields, plain)
    size = fields.count("moe_intermediate_size")
    first = fields.count("first_k_dense_replace", 0, least=0)
    return ExpertsConfig(
        routing,
        size,
        tuple(index >= first for index in range(plain.num_layers)),
        shared_size=size * fields.count("n_shared_experts", 0, least=0),
        shared_name="shared_experts",
        has_correction=is_v3,
    )


def all_layers(fields: Fields, plain: ModelConfig, routing: Routing) -> ExpertsConfig:
    check_activation(fields, plain)
    return ExpertsConfig(routing, plain.intermediate_size, (True,) * plain.num_layers)


def sparse_layers(fields: Fields, plain: ModelConfig) -> ExpertsConfig:
    """Qwen's: every `decoder_sparse_step`-th layer has experts, those in `mlp_only_layers` have not."""
    check_activation(fields, plain)
    step = fields.count("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise fields.bad(f"mlp_only_layers is {dense!r}, and must be a list of layers")
    layers = tuple((index + 1) % step == 0 and index not in dense for index in range(plain.num_layers))
    routing = read_routing(fields, normalize=fields.flag("norm_topk_prob", False))
    return ExpertsConfig(routing, fields.count("moe_intermediate_size"), layers)


def check_activation(fields: Fields, plain: ModelConfig) -> None:
    if plain.activation != "silu":
        raise fields.unsupported(f"experts with activation {plain.activation!r} are not supported; quire has silu.")


def read_deepseek_family(fields: Fields, model_type: str) -> ModelConfig:
    defaults = DEEPSEEK_V3_DEFAULTS if model_type == "deepseek_v3" else DEEPSEEK_V2_DEFAULTS
    fields = Fields({**defaults, **fields.values}, fields.where)

    def plain(head_dim: int) -> ModelConfig:
        given = {key: value for key, value in fields.values.items() if key != "head_dim"}
        return plain_config(Fields(given, fields.where), "deepseek", head_dim=head_dim)

    return read_deepseek(fields, model_type, plain)


def read_gpt_oss_windows(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, {"rms_norm_eps": 1e-5, "rope_theta": 150_000.0})
    config = read_gpt_oss(fields, plain_config(fields, "gpt_oss", head_dim=64))
    window = fields.count("sliding_window", 128)
    by_type = windows_by_type(fields, config.num_layers, window)
    alternating = tuple(None if index % 2 else window for index in range(config.num_layers))
    return replace(config, windows=by_type or alternating)


def plain_qwen(fields: Fields, family: str) -> ModelConfig:
    config = plain_config(fields, family)
    return replace(config, windows=qwen_windows(fields, config.num_layers))


EXPERT_FAMILIES: dict[str, Callable[[Fields], ModelConfig]] = {
    "mixtral": lambda fields: read_mixtral(
        fields, plain_config(with_defaults(fields, {"rms_norm_eps": 1e-5, "rope_theta": 1e6}), "mixtral")
    ),
    "qwen2_moe": lambda fields: read_qwen2_moe(fields, plain_qwen(fields, "qwen2_moe")),
    "qwen3_moe": lambda fields: read_qwen3_moe(fields, plain_qwen(fields, "qwen3_moe")),
    "gpt_oss": read_gpt_oss_windows,
    "deepseek_v2": lambda fields: read_deepseek_family(fields, "deepseek_v2"),
    "deepseek_v3": lambda fields: read_deepseek_family(fields, "deepseek_v3"),
    "olmoe": lambda fields: read_olmoe(fields, plain_config(with_defaults(fields, {"rms_norm_eps": 1e-5}), "olmoe")),
    "granitemoe": lambda fields: read_granitemoe(fields, plain_config(fields, "granitemoe")),
}
