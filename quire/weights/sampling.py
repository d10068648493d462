"""SamplingDefaults from a model's files: `generation_config.json`, or the `general.sampling` keys of a GGUF file.

A model that sets none of temperature, top_p, top_k and min_p gets those of `SamplingDefaults`. If it sets one of them,
the others are neutral.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.models.config import SamplingDefaults
from quire.weights.fields import Fields

MAX_TOP_K = 2**31 - 1
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p")
NEUTRAL = SamplingDefaults(temperature=1.0, top_p=1.0, from_model=True)
JSON_KEYS = {name: name for name in (*SAMPLING_KEYS, "repetition_penalty")}
GGUF_KEYS = JSON_KEYS | {"temperature": "temp", "repetition_penalty": "penalty_repeat"}


def sampling_from_json(generation: Mapping[str, Any], where: str = "generation_config.json") -> SamplingDefaults:
    """From a `generation_config.json`. `do_sample: false` makes the default greedy."""
    fields = Fields(generation, where)
    found = read_sampling(fields, JSON_KEYS)
    if fields.flag("do_sample", True):
        return found
    return replace(found, temperature=0.0, from_model=True)


def sampling_from_gguf(metadata: Mapping[str, Any], where: str = "the GGUF file") -> SamplingDefaults:
    return read_sampling(Fields(metadata, where, "general.sampling."), GGUF_KEYS)


def read_sampling(fields: Fields, keys: Mapping[str, str]) -> SamplingDefaults:
    given: dict[str, Any] = {}
    for name, least, most, is_open in (
        ("temperature", 0.0, 100.0, False),
        ("top_p", 0.0, 1.0, True),
        ("min_p", 0.0, 1.0, False),
        ("repetition_penalty", 0.0, 100.0, True),
    ):
        if fields.has(keys[name]):
            given[name] = read_number(fields, keys[name], least, most, is_open)
    if fields.has(keys["top_k"]):
        given["top_k"] = max(0, fields.count(keys["top_k"], least=-1, most=MAX_TOP_K))  # -1 keeps all tokens, like 0
    if not given:
        return SamplingDefaults()
    base = NEUTRAL if any(name in given for name in SAMPLING_KEYS) else SamplingDefaults(from_model=True)
    return replace(base, **given)


def read_number(fields: Fields, key: str, least: float, most: float, is_open: bool) -> float:
    """Rounded to six digits, because GGUF stores float32: 0.95 is read as 0.949999988."""
    value = fields.get(key)
    valid = type(value) in (int, float) and math.isfinite(value) and least <= value <= most
    if not valid or (is_open and value == least):
        limit = f"above {least:g} and at most {most:g}" if is_open else f"from {least:g} to {most:g}"
        raise fields.bad(f"{fields.prefix}{key} is {value!r}, and must be a number {limit}")
    return round(float(value), 6)
