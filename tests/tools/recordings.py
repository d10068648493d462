"""Recordings made of lines, without an engine."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quire.trace.format import FORMAT, VERSION, Arrival, Close, End, EngineStart, Header, Line, Step, encode
from quire.trace.recording import Recording

PROMPT = list(range(100, 140))
ANSWER = [7, 8, 9, 10]


def header(**changes: Any) -> Header:
    given = {"format": FORMAT, "version": VERSION, "quire": "0.1.0", "started": "", "model": "m", "digest": "d"}
    return Header(**given | changes)


def engine(**changes: Any) -> EngineStart:
    given = {
        "at": 0.0, "config": {"model": "m", "quantize": "none", "kv_dtype": "auto"}, "kernels": "own kernels (avx2)",
        "exact": True, "machine": {"gpu": None, "torch": None}, "block_size": 16, "num_blocks": 100, "max_len": 512,
        "max_requests": 8, "max_step_tokens": 64, "vocab_size": 50_000,
    }  # fmt: skip
    return EngineStart(**given | changes)


def arrival(request_id: str = "0", **changes: Any) -> Arrival:
    given: dict[str, Any] = {
        "at": 0.5, "seed": 1, "max_tokens": 4, "prompt": PROMPT, "params": {"temperature": 0.5, "max_tokens": 4},
    }  # fmt: skip
    return Arrival(id=request_id, **given | changes)


def answer(request_id: str = "0", tokens: Iterable[int] = ANSWER, first_step: int = 1, **changes: Any) -> list[Line]:
    """A step for each token, the first with the prompt, and the end."""
    lines: list[Line] = []
    position = len(PROMPT)
    for number, token in enumerate(tokens):
        at = 1.0 + 0.1 * (first_step + number)
        start, count = (position + number - 1, 1) if number else (0, position)
        lines.append(
            Step(
                step=first_step + number, at=at, done=at + 0.05, requests=[request_id, "other"], starts=[start, 9],
                counts=[count, 1], yields=[1, 1], tokens={request_id: [token]},
            )
        )  # fmt: skip
    return [*lines, End(id=request_id, at=9.0, **{"finish": "length", **changes})]


def recording(*lines: Line, head: Header | None = None, started: EngineStart | None = None) -> Recording:
    made = Recording("made", head or header())
    for line in (started or engine(), *lines, Close(at=10.0)):
        made.add(line)
    return made


def write(path: Path, lines: Iterable[Line]) -> Path:
    path.write_bytes(gzip.compress(b"".join(map(encode, lines))))
    return path
