"""The families with experts from GGUF metadata. `gguf_config.py` has the dense families and calls these."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from quire.kernels.routing import Routing
from quire.models.config import ExpertsConfig, LatentConfig, ModelConfig
from quire.weights.fields import Fields
from quire.weights.json_experts import MAX_EXPERTS, check_groups, with_latent
from quire.weights.json_modern import with_multipliers

Shapes = Mapping[str, tuple[int, ...]]

SOFTMAX = 1  # values of expert_gating_func
SIGMOID = 2
SOFTMAX_OF_CHOSEN = 3  # the same as a softmax whose chosen scores are normalized


def read_mixtral(fields: Fields, shapes: Shapes, plain: ModelConfig) -> ModelConfig:
    routing = read_routing(fields, normalize=True)
    return replace(plain, experts=read_experts(fields, shapes, plain, routing))


def read_qwen2moe(fields: Fields, shapes: Shapes, plain: ModelConfig) -> ModelConfig:
    experts = read_experts(fields, shapes, plain, read_routing(fields, normalize=False))
    shared = fields.count("expert_shared_feed_forward_length")
    return replace(plain, experts=replace(experts, shared_size=shared, shared_gate=True))


def read_qwen3moe(fields: Fields, shapes: Shapes, plain: ModelConfig) -> ModelConfig:
    experts = read_experts(fields, shapes, plain, read_routing(fields, normalize=True))
    return replace(plain, structure=replace(plain.structure, qk_norm="head"), experts=experts)


def read_olmoe(fields: Fields, shapes: Shapes, plain: ModelConfig) -> ModelConfig:
    experts = read_experts(fields, shapes, plain, read_routing(fields, normalize=False))
    return replace(plain, structure=replace(plain.structure, qk_norm="whole"), experts=experts)


def read_granitemoe(fields: Fields, shapes: Shapes, plain: ModelConfig) -> ModelConfig:
    if fields.count("expert_shared_feed_forward_length", 0, least=0):
        raise fields.unsupported("it has a shared expert, which quire does not support in this architecture.")
    config = replace(plain, experts=read_experts(fields, shapes, plain, read_routing(fields, normalize=True)))
    return with_multipliers(
        replace(config, attention_scale=fields.number("attention.scale", plain.scale)),
        embedding=fields.number("embedding_scale", 1.0),
        residual=fields.number("residual_scale", 1.0),
        logits=fields.number("logit_scale", 1.0),
    )


def read_gpt_oss(fields: Fields, shapes: Shapes, plain: ModelConfig) -> ModelConfig:
    """Every other layer has a window. The ramp of YaRN is not rounded to whole dimensions."""
    window = fields.count("attention.sliding_window", 128)
    experts = replace(
        read_experts(fields, shapes, plain, read_routing(fields, normalize=True)),
        router_bias=True,
        bias=True,
        activation="clamped_silu",
        limit=7.0,
    )
    scaling = plain.rope.scaling and replace(plain.rope.scaling, truncate=False)
    windows = tuple(None if index % 2 else window for index in range(plain.num_layers))
    rope = replace(plain.rope, scaling=scaling)
    return replace(plain, rope=rope, windows=windows, attention_sinks=True, experts=experts)


def read_deepseek(fields: Fields, shapes: Shapes, make_plain: Callable[[Fields], ModelConfig]) -> ModelConfig:
    """DeepSeek-V2, V2-Lite and V3. `make_plain` reads what all families share."""
    rotated, rank = fields.count("rope.dimension_count"), fields.count("attention.kv_lora_rank")
    key_dim = fields.count("attention.key_length_mla") - rotated
    if key_dim < 1:
        raise fields.bad(f"attention.key_length_mla is {key_dim + rotated}, and {rotated} of it rotate")
    query_rank = fields.count("attention.q_lora_rank", 0, least=0)
    latent = LatentConfig(rank, rotated, key_dim, fields.count("attention.value_length_mla"), query_rank)
    factor = fields.prefix + "rope.scaling.yarn_log_multiplier"
    shared = {f"{fields.prefix}attention.{name}_length": rotated for name in ("key", "value")}
    plain = make_plain(Fields({**fields.values, factor: None, **shared}, fields.where, fields.prefix))
    mscale = 1.0
    if fields.has("rope.scaling.yarn_log_multiplier") and plain.rope.scaling is not None:
        mscale += fields.number("rope.scaling.yarn_log_multiplier") * math.log(max(plain.rope.scaling.factor, 1.0))
        plain = replace(plain, rope=replace(plain.rope, scaling=replace(plain.rope.scaling, attention_factor=1.0)))
    config = replace(plain, experts=read_deepseek_experts(fields, shapes, plain))
    return with_latent(config, latent, mscale=mscale)


def read_deepseek_experts(fields: Fields, shapes: Shapes, plain: ModelConfig) -> ExpertsConfig:
    routing = read_routing(fields, normalize=False)
    num_groups = fields.count("expert_group_count", 1, most=routing.num_experts)
    group_scores = 2 if routing.scoring == "sigmoid" else 1
    check_groups(fields, routing.num_experts, num_groups, group_scores)
    top_groups = fields.count("expert_group_used_count", num_groups, most=num_groups)
    if routing.top_k > top_groups * (routing.num_experts // num_groups):
        raise fields.bad(f"{top_groups} groups have fewer than {routing.top_k} experts")
    routing = replace(
        routing,
        num_groups=num_groups,
        top_groups=top_groups,
        group_scores=group_scores,
    )
    experts = read_experts(fields, shapes, plain, routing)
    return replace(
        experts,
        shared_size=experts.intermediate_size * fields.count("expert_shared_count", 0, least=0),
        shared_name="shared_experts",
        has_correction=any(name.endswith("exp_probs_b.bias") for name in shapes),
    )


def read_routing(fields: Fields, *, normalize: bool) -> Routing:
    """`normalize` is the architecture's rule, where the file does not say."""
    num_experts = fields.count("expert_count", most=MAX_EXPERTS)
    gating = fields.count("expert_gating_func", SOFTMAX)
    if gating not in (SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN):
        raise fields.unsupported(
            f"expert_gating_func {gating} is not supported; quire has {SOFTMAX} and {SOFTMAX_OF_CHOSEN} (softmax) and "
            f"{SIGMOID} (sigmoid)."
        )
    return Routing(
        num_experts,
        fields.count("expert_used_count", most=num_experts),
        scoring="sigmoid" if gating == SIGMOID else "softmax",
        normalize=gating == SOFTMAX_OF_CHOSEN or fields.flag("expert_weights_norm", normalize),
        factor=fields.number("expert_weights_scale", 1.0),
    )


def read_experts(fields: Fields, shapes: Shapes, plain: ModelConfig, routing: Routing) -> ExpertsConfig:
    """Layers with a router have experts."""
    layers = tuple(f"blk.{index}.ffn_gate_inp.weight" in shapes for index in range(plain.num_layers))
    size = fields.count("expert_feed_forward_length", plain.intermediate_size)
    return ExpertsConfig(routing, size, layers)
