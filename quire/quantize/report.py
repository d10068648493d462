"""The quality report of a quantized model: `quire compare` with its source, sizes, the layers that suffered most."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.bench.compare import Comparison, compare_models
from quire.config import EngineConfig
from quire.quantize.made import Made, QuantizedPart

NUM_WORST = 5
MEASURED_BYTES = 1 << 28  # read to measure the memory's speed
REPORT_FILE = "quality.json"


@dataclass(frozen=True, slots=True)
class Quality:
    """Sizes are of the output's files. Speeds are what reading each weight once a token allows, at one request."""

    model: str
    output: str
    to: str
    group_size: int | None
    calibration_text: str | None
    calibration_tokens: int
    bits_per_weight: float  # of the quantized matrices, scales included
    bits_per_weight_of_all: float
    output_bytes: int
    source_bytes: int
    source_was_quantized: bool
    worst: list[QuantizedPart]
    rare_experts: list[str]
    memory_bytes_per_s: float
    bytes_per_token: int
    predicted_tokens_per_s: float
    seconds: float
    comparison: Comparison | None
    max_kl: float | None

    @property
    def passed(self) -> bool:
        return self.max_kl is None or (self.comparison is not None and self.comparison.kl.mean <= self.max_kl)

    def as_document(self) -> dict[str, Any]:
        document = asdict(self)
        document["comparison"] = None if self.comparison is None else self.comparison.as_document()
        return {**document, "passed": self.passed}


def compare_with_source(
    source: Path, made: Made, text: str | None, max_tokens: int, report: Callable[[int, int | None], None] | None
) -> Comparison:
    return compare_models(
        EngineConfig(model=str(source)), EngineConfig(model=str(made.path)), text, max_tokens=max_tokens, report=report
    )


def make_quality(
    source: Path, made: Made, to: str, seconds: float, comparison: Comparison | None, max_kl: float | None
) -> Quality:
    num_values = sum(part.num_values for part in made.parts)
    num_bytes = sum(part.num_bytes for part in made.parts)
    speed = memory_speed()
    bytes_per_token = num_bytes + made.dense_bytes - made.looked_up_bytes
    return Quality(
        model=str(source),
        output=str(made.path),
        to=to,
        group_size=made.group,
        calibration_text=made.text,
        calibration_tokens=made.num_tokens,
        bits_per_weight=8 * num_bytes / num_values,
        bits_per_weight_of_all=8 * (num_bytes + made.dense_bytes) / (num_values + made.dense_values),
        output_bytes=size_of(made.directory),
        source_bytes=size_of(source),
        source_was_quantized=made.source_was_quantized,
        worst=sorted(made.parts, key=lambda part: -part.error)[:NUM_WORST],
        rare_experts=made.rare_experts,
        memory_bytes_per_s=speed,
        bytes_per_token=bytes_per_token,
        predicted_tokens_per_s=speed / bytes_per_token,
        seconds=seconds,
        comparison=comparison,
        max_kl=max_kl,
    )


def size_of(path: Path) -> int:
    return (
        path.stat().st_size if path.is_file() else sum(each.stat().st_size for each in path.iterdir() if each.is_file())
    )


def memory_speed() -> float:
    """Bytes a second that all cores together read, the best of three times."""
    import os

    threads = os.cpu_count() or 1
    pieces = np.array_split(np.ones(MEASURED_BYTES // 8), threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(3):
            begin = time.perf_counter()
            list(pool.map(np.max, pieces))
            best = max(best, MEASURED_BYTES / (time.perf_counter() - begin))
    return best
