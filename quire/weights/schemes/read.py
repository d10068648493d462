"""Chooses the scheme of a checkpoint by `quantization_config` of its `config.json`. `loader.opened` calls this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.weights.fields import Fields
from quire.weights.schemes.awq import AWQ
from quire.weights.schemes.bitsandbytes import BitsAndBytes
from quire.weights.schemes.compressed import CompressedTensors
from quire.weights.schemes.eetq import EETQ
from quire.weights.schemes.float8 import Float8, ModelOpt
from quire.weights.schemes.gptq import GPTQ
from quire.weights.schemes.scheme import Scheme
from quire.weights.schemes.squeezellm import SqueezeLLM

METHODS: dict[str, Callable[[Fields], Scheme]] = {
    "gptq": GPTQ.read,
    "awq": AWQ.read,
    "compressed-tensors": CompressedTensors.read,
    "bitsandbytes": BitsAndBytes.read,
    "fp8": Float8.read,
    "fbgemm_fp8": Float8.read,
    "modelopt": ModelOpt.read,
    "squeezellm": SqueezeLLM.read,
    "eetq": EETQ.read,
}


def read_scheme(config: Mapping[str, Any], where: str = "config.json") -> Scheme | None:
    """The scheme, or None if the weights are plain."""
    fields = Fields(config, where)
    section = fields.section("quantization_config") or fields.section("compression_config")
    if section is None:
        text = fields.section("text_config")
        section = None if text is None else text.section("quantization_config")
    if section is None:
        return None
    method = read_method(section)
    if method == "mxfp4" and fields.text("model_type", "") == "gpt_oss":
        return None  # of experts only; `mxfp4.py` finds them by the names of their tensors
    if method not in METHODS:
        raise section.unsupported(f"quant_method {method!r} is not supported; quire reads {', '.join(METHODS)}.")
    return METHODS[method](section)


def read_method(section: Fields) -> str:
    """Old bitsandbytes configurations have no `quant_method`."""
    if not section.has("quant_method") and (section.has("load_in_4bit") or section.has("load_in_8bit")):
        return "bitsandbytes"
    return section.text("quant_method").lower()
