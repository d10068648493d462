"""Rope parameters from configurations: both forms of `config.json`, and GGUF metadata.

`rope_parameters` is the new form of `config.json`; `rope_theta` and `rope_scaling` are the old one. `models/rope.py`
computes the rotation. `json_config.py` and `gguf_config.py` call this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from quire.models.config import Rope, RopeScaling
from quire.weights.fields import Fields

LayerKind = Literal["full_attention", "sliding_attention"]

KINDS = "default, linear, llama3, yarn and longrope"


def rope_from_json(config: Fields, *, head_dim: int, max_len: int) -> Rope:
    """The rope of a model whose layers all have the same one."""
    parameters = config.section("rope_parameters") or config.section("rope_scaling") or Fields({}, config.where)
    if not per_layer(parameters):
        return new_rope(with_outer_values(config, parameters), head_dim=head_dim, max_len=max_len)
    sections = [parameters.section(key) for key in parameters.values]
    ropes = {new_rope(each, head_dim=head_dim, max_len=max_len) for each in sections if each is not None}
    if len(ropes) != 1:
        raise config.unsupported(f"rope_parameters has {len(ropes)} different ropes; this family has one.")
    return ropes.pop()


def with_outer_values(config: Fields, parameters: Fields) -> Fields:
    """`parameters`, completed by what the configuration has beside them. Its original length comes first."""
    outer = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor") if config.has(key)}
    given = {key: value for key, value in parameters.values.items() if value is not None}
    original = {key: config.get(key) for key in ("original_max_position_embeddings",) if config.has(key)}
    return Fields({**outer, **given, **original}, parameters.where)


def gemma_ropes_from_json(config: Fields, *, head_dim: int, max_len: int) -> tuple[Rope, Rope]:
    """Gemma 3's two ropes: of layers with full attention, and of layers with a window."""
    parameters = config.section("rope_parameters")
    if parameters is None or not per_layer(parameters):
        scaling = config.section("rope_scaling") if parameters is None else parameters
        full = old_rope(config, "rope_theta", 1e6, head_dim=head_dim, max_len=max_len, scaling=scaling)
        return full, old_rope(config, "rope_local_base_freq", head_dim=head_dim, max_len=max_len)
    empty = Fields({}, config.where)
    full = new_rope(parameters.section("full_attention") or empty, 1e6, head_dim=head_dim, max_len=max_len)
    return full, new_rope(parameters.section("sliding_attention") or empty, head_dim=head_dim, max_len=max_len)


def per_layer(parameters: Fields) -> bool:
    return any(isinstance(value, Mapping) for value in parameters.values.values())


def old_rope(
    config: Fields,
    theta_key: str,
    theta: float = 10_000.0,
    *,
    head_dim: int,
    max_len: int,
    scaling: Fields | None = None,
) -> Rope:
    return Rope(
        dim=(dim := rotated_dim(config, head_dim)),
        theta=config.number(theta_key, theta),
        scaling=None if scaling is None else scaling_from_json(scaling, max_len, dim),
    )


def new_rope(parameters: Fields, theta: float = 10_000.0, *, head_dim: int, max_len: int) -> Rope:
    return Rope(
        dim=(dim := rotated_dim(parameters, head_dim)),
        theta=parameters.number("rope_theta", theta),
        scaling=scaling_from_json(parameters, max_len, dim),
    )


def rotated_dim(fields: Fields, head_dim: int) -> int:
    """The number of a head's dimensions that rotate."""
    dim = int(head_dim * fields.number("partial_rotary_factor", 1.0))
    if dim < 2 or dim > head_dim or dim % 2:
        raise fields.bad(
            f"{dim} of {head_dim} dimensions of a head would rotate, and the number must be even and from 2"
        )
    return dim


def scaling_from_json(fields: Fields, max_len: int, dim: int) -> RopeScaling | None:
    kind = fields.text("rope_type", fields.text("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", fields.number("factor"))
    original = fields.count("original_max_position_embeddings", max_len)
    if kind == "llama3":
        return llama3_scaling(fields, original)
    if kind == "yarn":
        return yarn_scaling(fields, fields.number("factor", max_len / original), original)
    if kind == "longrope":
        return longrope_scaling(fields, fields.number("factor", max_len / original), original, dim)
    raise fields.unsupported(f"rope type {kind!r} is not supported; quire has {KINDS}.")


def longrope_scaling(fields: Fields, factor: float, original: int, dim: int) -> RopeScaling:
    short, long = (read_divisors(fields, key, dim // 2) for key in ("short_factor", "long_factor"))
    return RopeScaling(
        "longrope",
        factor,
        original,
        attention_factor=fields.optional_number("attention_factor"),
        short_divisors=short,
        long_divisors=long,
    )


def read_divisors(fields: Fields, key: str, count: int) -> tuple[float, ...]:
    values = fields.get(key)
    if not isinstance(values, list) or len(values) != count or any(type(each) not in (int, float) for each in values):
        raise fields.bad(f"{key} must be a list of {count} numbers, one for each frequency")
    if any(not 0 < each < math.inf for each in values):
        raise fields.bad(f"{key} has a number that is not above 0")
    return tuple(map(float, values))


def llama3_scaling(fields: Fields, original: int) -> RopeScaling:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if low >= high:
        raise fields.bad(f"low_freq_factor is {low}, and must be below high_freq_factor, which is {high}")
    return RopeScaling("llama3", fields.number("factor"), original, low_freq_factor=low, high_freq_factor=high)


def yarn_scaling(fields: Fields, factor: float, original: int) -> RopeScaling:
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        attention_factor=yarn_attention_factor(fields, factor),
        truncate=fields.flag("truncate", True),
    )


def yarn_attention_factor(fields: Fields, factor: float) -> float | None:
    """`attention_factor`, or the ratio that follows from `mscale` and `mscale_all_dim`."""
    if fields.has("attention_factor") or not (fields.get("mscale") and fields.get("mscale_all_dim")):
        return fields.optional_number("attention_factor")
    log_factor = 0.1 * math.log(max(factor, 1.0))
    return (log_factor * fields.number("mscale") + 1.0) / (log_factor * fields.number("mscale_all_dim") + 1.0)


def rope_from_gguf(
    fields: Fields, *, head_dim: int, max_len: int, theta: float, interleaved: bool, divisors: Sequence[float] | None
) -> Rope:
    """`divisors` are the values of rope_freqs.weight, in which converters store llama3's scaling."""
    dim = fields.count("rope.dimension_count", head_dim, least=2, most=head_dim)
    if dim % 2:
        raise fields.bad(f"{fields.prefix}rope.dimension_count is {dim}, and must be even")
    if divisors is not None:
        check_divisors(fields, divisors, dim)
    return Rope(
        dim=dim,
        theta=fields.number("rope.freq_base", theta),
        interleaved=interleaved,
        scaling=scaling_from_gguf(fields, max_len),
        divisors=None if divisors is None else tuple(divisors),
    )


def check_divisors(fields: Fields, divisors: Sequence[float], dim: int) -> None:
    if len(divisors) != dim // 2:
        raise fields.bad(f"rope_freqs.weight has {len(divisors)} values, and {dim} rotating dimensions need {dim // 2}")
    wrong = [value for value in divisors if not 0 < value < math.inf]
    if wrong:
        raise fields.bad(f"rope_freqs.weight holds {wrong[0]}, and its values must be above 0")


def scaling_from_gguf(fields: Fields, max_len: int) -> RopeScaling | None:
    key = "rope.scaling.factor" if fields.has("rope.scaling.factor") else "rope.scale_linear"
    kind = fields.text("rope.scaling.type", "linear")
    unset = type(fields.get(key)) is float and fields.get(key) == 0.0  # some converters write 0.0 for "none"
    factor = 1.0 if unset else fields.number(key, 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "yarn":
        return yarn_from_gguf(fields, factor, max_len)
    raise fields.unsupported(f"rope scaling {kind!r} is not supported; quire has none, linear and yarn in GGUF files.")


def yarn_from_gguf(fields: Fields, factor: float, max_len: int) -> RopeScaling:
    for key in ("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_log_multiplier"):
        if fields.has(key):
            raise fields.unsupported(f"{fields.prefix}{key} is set, which quire does not support.")
    extra = fields.number("rope.scaling.attn_factor", 1.0) * fields.number("rope.scaling.yarn_attn_factor", 1.0)
    return RopeScaling(
        "yarn",
        factor,
        fields.count("rope.scaling.original_context_length", max_len),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=None if extra == 1.0 else extra * (0.1 * math.log(max(factor, 1.0)) + 1.0),
    )
