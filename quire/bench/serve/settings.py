"""Settings of `quire bench serve`, checked when they are made. The flags of the command line are its fields."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quire.bench.serve.metrics import parse_slo
from quire.errors import InvalidParams

# An option that has no effect without another one is refused without it.
REQUIRES = {
    "spawn_options": "spawn",
    "api_key": "base_url",
    "burstiness": "rate",
    "trace_speed": "trace",
    "max_prompt_tokens": "trace",
    "max_output_tokens": "trace",
    "tokens_per_word": "trace",
    "trace_ids": "trace",
}
# Pairs of options that exclude each other.
EXCLUDES = [
    ("base_url", "spawn"),
    ("rate", "concurrency"),
    ("prompt_words", "prompt_tokens"),
    ("trace", "prompt_words"),
    ("trace", "prompt_tokens"),
    ("trace", "output_tokens"),
    ("trace_speed", "rate"),
    ("trace_speed", "concurrency"),
    ("tokens_per_word", "trace_ids"),
    ("chat", "prompt_tokens"),
    ("chat", "trace_ids"),
]
COUNTS = (
    *("concurrency", "num_requests", "prompt_words", "prompt_tokens", "output_tokens"),
    *("max_prompt_tokens", "max_output_tokens"),
)
POSITIVE = ("burstiness", "trace_speed", "tokens_per_word", "timeout")

CONCURRENCY = 8
NUM_REQUESTS = 100
PROMPT_WORDS = 115
OUTPUT_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """None means: not given. Prompts are words, or an exact number of token ids; a trace has lengths and times."""

    seed: int
    base_url: str | None = None
    spawn: bool = False
    spawn_options: str | None = None
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    chat: bool = False
    extra_fields: bool = True
    temperature: float = 0.0
    rate: float | None = None
    burstiness: float | None = None
    concurrency: int | None = None
    num_requests: int | None = None
    prompt_words: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    trace: Path | None = None
    trace_speed: float | None = None
    trace_ids: bool = False
    tokens_per_word: float | None = None
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    slo: str | None = None
    timeout: float = 600.0
    warmup: int = 1

    def __post_init__(self) -> None:
        if not self.base_url and not self.spawn:
            raise InvalidParams("Say which server to measure: --base-url URL, or --spawn to start one.")
        for name, other in REQUIRES.items():
            if self._given(name) and not self._given(other):
                raise InvalidParams(f"{flag(name)} changes nothing without {flag(other)}.")
        for name, other in EXCLUDES:
            if self._given(name) and self._given(other):
                raise InvalidParams(f"{flag(name)} and {flag(other)} do not go together; give one of them.")
        self._check_numbers()
        if self.slo is not None:
            parse_slo(self.slo)

    def _check_numbers(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidParams(f"{flag(name)} is {value}; give a whole number of at least 1.")
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidParams(f"{flag(name)} is {value}; give a number above 0.")
        if self.rate is not None and not self.rate > 0:
            raise InvalidParams(f"--rate is {self.rate}; give requests per second above 0, or inf for all at once.")
        if self.burstiness is not None and self.rate == math.inf:
            raise InvalidParams("--burstiness changes nothing with --rate inf.")
        if not 0 <= self.temperature < math.inf:
            raise InvalidParams(f"--temperature is {self.temperature}; give a number of at least 0.")
        if self.warmup < 0:
            raise InvalidParams(f"--warmup is {self.warmup}; give a number of at least 0.")

    def _given(self, name: str) -> bool:
        return getattr(self, name) not in (None, False)

    @property
    def limits(self) -> dict[str, float]:
        return parse_slo(self.slo) if self.slo is not None else {}

    @property
    def description(self) -> str:
        """The load in one line."""
        return f"{self._when()}; {self._what()}; seed {self.seed}"

    def _when(self) -> str:
        if self.rate == math.inf:
            return "all at once"
        if self.rate is not None:
            return f"{self.rate:g} a second, burstiness {self.burstiness or 1:g}"
        if self.trace is not None and self.concurrency is None:
            return f"times of the trace, {self.trace_speed or 1:g} times as fast"
        return f"{self.concurrency or CONCURRENCY} at a time"

    def _what(self) -> str:
        if self.trace is not None:
            return f"lengths of {self.trace.name}"
        size = f"{self.prompt_tokens} token ids" if self.prompt_tokens else f"{self.prompt_words or PROMPT_WORDS} words"
        return f"{size} in, {self.output_tokens or OUTPUT_TOKENS} tokens out"

    def to_dict(self) -> dict[str, Any]:
        """For the document: without the API key, and with values that JSON has."""
        fields = asdict(self)
        del fields["api_key"]
        fields["trace"] = None if self.trace is None else str(self.trace)
        fields["rate"] = "inf" if self.rate == math.inf else self.rate
        return fields


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
