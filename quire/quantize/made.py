"""What a job is asked for, and what it made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.quantize.target import Target
from quire.quantize.text import DEFAULT_MAX_TOKENS


@dataclass(frozen=True, slots=True)
class Settings:
    """What the result depends on, beside the model."""

    target: Target
    text: Path | None = None
    max_tokens: int = DEFAULT_MAX_TOKENS
    window: int | None = None
    group: int | None = None
    feedback: bool = True  # of GGUF files; others always have it


@dataclass(frozen=True, slots=True)
class QuantizedPart:
    """A matrix in the output. `error` is the mean square of its outputs' errors as a share of the outputs', over inputs
    of the calibration text, or, where there was none, that of its values."""

    name: str
    num_values: int
    num_bytes: int
    error: float
    of_outputs: bool


@dataclass(frozen=True, slots=True)
class Made:
    """A finished job."""

    path: Path  # of the model: a directory or a GGUF file in it
    directory: Path
    parts: list[QuantizedPart]
    dense_values: int  # of matrices and vectors that were not quantized
    dense_bytes: int
    looked_up_bytes: int  # of an embedding that is not the head too: a token reads one row of it
    source_was_quantized: bool
    text: str | None
    num_tokens: int
    group: int | None
    rare_experts: list[str]  # that too few tokens of the text chose: they were calibrated with the inputs of all
