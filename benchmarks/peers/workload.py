"""The work of every engine, and the output of a peer's runner. Uses only the standard library.

The parent passes a Job as JSON on the runner's command line. The runner prints one JSON object per line: its version,
and then a row for each cell as soon as it is measured, so that a later crash loses no row. benchmarks/cpu_peers.py
imports it, and so does peers/run_*.py in a peer's environment. Prompts and method are those of quire/bench/offline.py.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TextIO

SEED = 7

# Takes prompts of equal length and the number of new tokens of each. Returns the number of all new tokens.
Answer = Callable[[list[list[int]], int], int]


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: a greedy batch of random prompts of one length, and the number of new tokens of each."""

    batch: int
    prompt_tokens: int
    output_tokens: int

    @property
    def label(self) -> str:
        return f"{self.batch} x {self.prompt_tokens:,}"


START = Cell(1, 8, 8)


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of a cell over the whole batch, or the reason why it has none."""

    cell: Cell
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Row:
        return cls(**{**fields, "cell": Cell(**fields["cell"])})


@dataclass(frozen=True, slots=True)
class Job:
    """The job of a runner: to measure its cells or, with `start`, only to generate a first token."""

    model: str  # the .gguf file
    folder: str | None  # the same weights as bf16 safetensors, for peers that do not read GGUF
    vocabulary: int
    threads: int
    repeats: int
    cells: list[Cell]
    start: bool

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields = json.loads(text)
        return cls(**{**fields, "cells": [Cell(**cell) for cell in fields["cells"]]})

    @property
    def max_batch(self) -> int:
        return max(cell.batch for cell in self.cells)

    @property
    def max_len(self) -> int:
        return max(cell.prompt_tokens + cell.output_tokens for cell in self.cells)


def prompts(cell: Cell, vocabulary: int) -> list[list[int]]:
    rng = random.Random(SEED)
    return [[rng.randrange(vocabulary) for _ in range(cell.prompt_tokens)] for _ in range(cell.batch)]


def serve(load: Callable[[Job], tuple[str, Answer]]) -> None:
    """The main function of a runner: read the job, load the engine, run the job."""
    out = claim_stdout()
    job = Job.from_json(sys.argv[1])
    version, answer = load(job)
    short = prompts(START, job.vocabulary)
    answer(short, 1)
    write(out, {"version": version})  # with `start`, the parent stops its clock here
    answer(short, START.output_tokens)
    if not job.start:
        for cell in job.cells:
            write(out, measure(cell, job, answer).to_dict())


def claim_stdout() -> TextIO:
    """The process's stdout. What libraries print after this call is written to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def write(out: TextIO, document: dict[str, Any]) -> None:
    print(json.dumps(document), file=out, flush=True)


def measure(cell: Cell, job: Job, answer: Answer) -> Row:
    """Prefill is a run for one token. Decode is the additional time of a run for all tokens. Medians of each."""
    work = prompts(cell, job.vocabulary)
    prefill, decode = [], []
    try:
        for _ in range(job.repeats):
            first_s = seconds(answer, work, 1)
            decode_s = max(seconds(answer, work, cell.output_tokens) - first_s, 1e-9)
            prefill.append(cell.batch * cell.prompt_tokens / first_s)
            decode.append(cell.batch * (cell.output_tokens - 1) / decode_s)
    except Exception as error:
        return Row(cell, reason=one_line(f"{type(error).__name__}: {error}"))
    return Row(cell, statistics.median(prefill), statistics.median(decode))


def seconds(answer: Answer, work: list[list[int]], output_tokens: int) -> float:
    begin = time.perf_counter()
    count = answer(work, output_tokens)
    total_s = time.perf_counter() - begin
    if count != len(work) * output_tokens:
        raise ValueError(f"{count} tokens came back instead of {len(work) * output_tokens}")
    return total_s


def one_line(text: str, limit: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
