"""ModelConfig from `config.json`, for families that differ from Llama by switches: Gemma 2, Phi-3, GLM-4, OLMo 2 and 3,
SmolLM3, Granite, Cohere, Ministral, Seed-OSS. `json_config.py` calls the readers in `MODERN`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quire.models.config import ModelConfig, Rope
from quire.models.structure import Structure
from quire.weights.fields import Fields
from quire.weights.json_classics import refuse, with_defaults
from quire.weights.json_plain import Windows, plain_config, windows_by_type
from quire.weights.rope import new_rope, old_rope, per_layer, rope_from_json

PHI3_ORIGINAL_LENGTH = 4096


def read_gemma2(fields: Fields) -> ModelConfig:
    """Every other layer has a window, the first one included."""
    refuse(fields, "use_bidirectional_attention")
    caps = softcap(fields, "attn_logit_softcapping", 50.0), softcap(fields, "final_logit_softcapping", 30.0)
    defaults = {"query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True}
    fields = with_defaults(fields, {**defaults, "hidden_activation": "gelu_pytorch_tanh"})
    bias = fields.flag("attention_bias", False)
    config = plain_config(fields, "gemma2", head_dim=256, activation_key="hidden_activation")
    return replace(
        config,
        windows=periodic_windows(fields, config.num_layers, 2),
        attention_bias=bias,
        output_bias=bias,
        norm_offset=True,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        attention_softcap=caps[0],
        logit_softcap=caps[1],
        structure=Structure(norms="both", embedding_scale=config.hidden_size**0.5),
    )


def softcap(fields: Fields, key: str, default: float) -> float | None:
    """A null is no cap; a missing key is the default."""
    return fields.optional_number(key) if key in fields.values else default


def read_phi3(fields: Fields) -> ModelConfig:
    """Phi-3 and Phi-4."""
    config = plain_config(with_defaults(fields, {"rms_norm_eps": 1e-5}), "phi3", read_rope=phi3_rope)
    window = fields.count("sliding_window") if fields.has("sliding_window") else None
    structure = Structure(qkv_groups=1, fused_gate_up=True)
    return replace(config, windows=(window,) * config.num_layers, structure=structure)


def phi3_rope(fields: Fields, *, head_dim: int, max_len: int) -> Rope:
    """Some files call longrope "su" or "yarn". The original length is 4096 if no key has it."""
    key = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    scaling = fields.section(key)
    if scaling is None:
        return rope_from_json(fields, head_dim=head_dim, max_len=max_len)
    values = dict(scaling.values)
    original = {"original_max_position_embeddings": PHI3_ORIGINAL_LENGTH}
    for name in ("type", "rope_type"):
        if values.get(name) in ("su", "yarn"):
            values[name] = "longrope"
    changed = Fields({**fields.values, key: {**original, **values}}, fields.where)
    return rope_from_json(changed, head_dim=head_dim, max_len=max_len)


def read_glm(fields: Fields) -> ModelConfig:
    """GLM-4 9B of 2024. Half of a head's dimensions rotate, in pairs of neighbours."""
    fields = with_defaults(fields, {"partial_rotary_factor": 0.5, "attention_bias": True, "rms_norm_eps": 1.5625e-07})
    config = plain_config(fields, "glm", head_dim=128)
    return replace(
        config,
        rope=replace(config.rope, interleaved=True),
        attention_bias=fields.flag("attention_bias", True),
        structure=Structure(fused_gate_up=True),
    )


def read_glm4(fields: Fields) -> ModelConfig:
    """GLM-4-0414: as GLM, with norms after attention and MLP too."""
    config = read_glm(fields)
    return replace(config, family="glm4", structure=replace(config.structure, norms="both"))


def read_olmo2(fields: Fields) -> ModelConfig:
    """Norms follow attention and MLP. Queries and keys are normed whole."""
    bias = fields.flag("attention_bias", False)
    config = plain_config(with_defaults(fields, {"rms_norm_eps": 1e-5}), "olmo2")
    structure = Structure(norms="after", qk_norm="whole")
    return replace(config, attention_bias=bias, output_bias=bias, structure=structure)


def read_olmo3(fields: Fields) -> ModelConfig:
    """Three of four layers have a window. The others may have a scaled rope."""
    fields = with_defaults(fields, {"sliding_window": 4096, "rope_theta": 500_000.0})
    full, local = olmo3_ropes(fields)
    plain = {key: value for key, value in fields.values.items() if key not in ("rope_parameters", "rope_scaling")}
    config = read_olmo2(Fields(plain, fields.where))
    sizes = {"head_dim": config.head_dim, "max_len": config.max_len}
    windows = periodic_windows(fields, config.num_layers, 4)
    return replace(config, family="olmo3", windows=windows, rope=full(**sizes), local_rope=local(**sizes))


def olmo3_ropes(fields: Fields) -> tuple[Callable[..., Rope], Callable[..., Rope]]:
    """The ropes of layers with full attention and of layers with a window, as functions of the head's size."""
    parameters = fields.section("rope_parameters")
    if parameters is None or not per_layer(parameters):
        scaling = parameters or fields.section("rope_scaling")
        return partial_rope(fields, scaling), partial_rope(fields, None)
    full, local = (parameters.section(f"{kind}_attention") or Fields({}, fields.where) for kind in ("full", "sliding"))
    return lambda **sizes: new_rope(full, 500_000.0, **sizes), lambda **sizes: new_rope(local, 500_000.0, **sizes)


def partial_rope(fields: Fields, scaling: Fields | None) -> Callable[..., Rope]:
    return lambda **sizes: old_rope(fields, "rope_theta", scaling=scaling, **sizes)


def read_smollm3(fields: Fields) -> ModelConfig:
    """Every fourth layer does not rotate."""
    fields = with_defaults(fields, {"tie_word_embeddings": True, "rope_theta": 2_000_000.0})
    bias = fields.flag("attention_bias", False)
    config = plain_config(fields, "smollm3")
    window = None
    if fields.flag("use_sliding_window", False) and fields.has("sliding_window"):
        window = fields.count("sliding_window")
    windows = windows_by_type(fields, config.num_layers, window) if window else None
    return replace(
        config,
        windows=windows or config.windows,
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        structure=Structure(unrotated=unrotated_layers(fields, config.num_layers)),
    )


def unrotated_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """`no_rope_layers` has a 1 for each layer that rotates."""
    rotates = fields.get("no_rope_layers")
    if rotates is None:
        period = fields.count("no_rope_layer_interval", 4)
        return tuple(range(period - 1, num_layers, period))
    if not isinstance(rotates, list) or len(rotates) != num_layers or any(each not in (0, 1) for each in rotates):
        raise fields.bad(f"no_rope_layers must be a list of a 0 or a 1 for each of {num_layers} layers")
    return tuple(index for index, each in enumerate(rotates) if not each)


def read_granite(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    config = plain_config(fields, "granite")
    multipliers = {
        "residual": fields.number("residual_multiplier", 1.0),
        "embedding": fields.number("embedding_multiplier", 1.0),
        "logits": fields.number("logits_scaling", 1.0),
    }
    return with_multipliers(
        replace(
            config,
            attention_bias=bias,
            output_bias=bias,
            mlp_bias=fields.flag("mlp_bias", False),
            attention_scale=fields.number("attention_multiplier", 1.0),
        ),
        **multipliers,
    )


def with_multipliers(config: ModelConfig, *, residual: float, embedding: float, logits: float) -> ModelConfig:
    """Granite adds `residual` times the output of each attention and MLP. Here the whole state is divided by that
    factor instead, which costs nothing: norms do not depend on the scale of their input, apart from epsilon."""
    return replace(
        config,
        norm_eps=config.norm_eps / residual**2,
        embedding_multiplier=embedding / residual,
        structure=replace(config.structure, logit_scale=1 / logits),
    )


def read_cohere(fields: Fields) -> ModelConfig:
    """Command R."""
    refuse(fields, "use_qk_norm")
    defaults = {
        "tie_word_embeddings": True,
        "rope_theta": 500_000.0,
        "rms_norm_eps": fields.number("layer_norm_eps", 1e-5),
    }
    fields = with_defaults(fields, defaults)
    bias = fields.flag("attention_bias", False)
    config = plain_config(fields, "cohere")
    structure = Structure(
        norm="layer", parallel=True, shared_norm=True, logit_scale=fields.number("logit_scale", 0.0625)
    )
    rope = replace(config.rope, interleaved=True)
    return replace(config, rope=rope, attention_bias=bias, output_bias=bias, structure=structure)


def read_cohere2(fields: Fields) -> ModelConfig:
    """Command R7B and A: layers without a window do not rotate."""
    fields = with_defaults(fields, {"sliding_window": 4096, "rope_theta": 10_000.0})
    config = read_cohere(fields)
    windows = periodic_windows(fields, config.num_layers, fields.count("sliding_window_pattern", 4))
    unrotated = tuple(index for index, window in enumerate(windows) if window is None)
    structure = replace(config.structure, unrotated=unrotated)
    return replace(config, family="cohere2", windows=windows, structure=structure)


def read_ministral(fields: Fields) -> ModelConfig:
    config = plain_config(fields, "ministral")
    window = fields.count("sliding_window") if fields.has("sliding_window") else None
    by_type = windows_by_type(fields, config.num_layers, window)
    return replace(config, windows=by_type or (window,) * config.num_layers)


def read_ministral3(fields: Fields) -> ModelConfig:
    """Queries are scaled by their position from the original length on. quire runs it up to that length."""
    config = read_ministral(with_defaults(fields, {"head_dim": 128, "rms_norm_eps": 1e-5}))
    rope = fields.section("rope_parameters") or fields.section("rope_scaling") or Fields({}, fields.where)
    if not rope.get("llama_4_scaling_beta"):
        return config
    return replace(config, max_len=min(config.max_len, rope.count("original_max_position_embeddings", 16_384)))


def read_seed_oss(fields: Fields) -> ModelConfig:
    config = plain_config(fields, "seed_oss", head_dim=128)
    return replace(
        config,
        attention_bias=fields.flag("attention_bias", True),
        output_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


MODERN: dict[str, Callable[[Fields], ModelConfig]] = {
    "cohere": read_cohere,
    "cohere2": read_cohere2,
    "gemma2": read_gemma2,
    "glm": read_glm,
    "glm4": read_glm4,
    "granite": read_granite,
    "ministral": read_ministral,
    "ministral3": read_ministral3,
    "olmo2": read_olmo2,
    "olmo3": read_olmo3,
    "phi3": read_phi3,
    "seed_oss": read_seed_oss,
    "smollm3": read_smollm3,
}


def periodic_windows(fields: Fields, num_layers: int, period: int) -> Windows:
    """`layer_types`, or windows for all layers but the last of each period."""
    window = fields.count("sliding_window")
    by_type = windows_by_type(fields, num_layers, window)
    return by_type or tuple(window if (index + 1) % period else None for index in range(num_layers))
