"""Target: what `--to` names. `plan.py` makes a scheme and an output of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.errors import InvalidParams
from quire.quantize.mixes import MIXES

Kind = Literal["gguf", "gptq", "awq", "int4", "int8", "fp8", "nf4", "f16"]

GPTQ_BITS = (2, 3, 4, 8)
PLAIN: tuple[Kind, ...] = ("awq", "int4", "int8", "fp8", "nf4", "f16")


@dataclass(frozen=True, slots=True)
class Target:
    name: str  # as given
    kind: Kind
    mix: str = ""  # of gguf
    bits: int = 4  # of gptq

    @property
    def is_gguf(self) -> bool:
        return self.kind == "gguf"

    @property
    def calibrates(self) -> bool:
        return self.kind in ("gptq", "awq", "int4") or (self.is_gguf and self.mix not in ("f16", "q8_0"))

    @property
    def has_groups(self) -> bool:
        return self.kind in ("gptq", "awq", "int4")


def parse_target(name: str) -> Target:
    kind, _, detail = name.lower().partition(":")
    if kind == "gguf" and detail in MIXES:
        return Target(name.lower(), "gguf", mix=detail)
    if kind == "gptq" and (not detail or detail in map(str, GPTQ_BITS)):
        return Target(name.lower(), "gptq", bits=int(detail or 4))
    for plain in PLAIN:
        if name.lower() == plain:
            return Target(plain, plain)
    raise InvalidParams(f"There is no format {name!r}. Give one of {', '.join(target_names())}.", "to")


def target_names() -> list[str]:
    gptq = [f"gptq:{bits}" for bits in GPTQ_BITS if bits != 4]
    return ["gptq", *gptq, *PLAIN, *(f"gguf:{mix}" for mix in MIXES)]
