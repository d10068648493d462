"""Traces of recorded traffic: arrival times, lengths and shared prefixes.

Recordings (`quire serve --trace`) and three published formats are read. Azure's is a CSV of TIMESTAMP, ContextTokens
and GeneratedTokens. BurstGPT's is a CSV of Timestamp (seconds), Model, Request tokens, Response tokens, Total tokens
and Log Type. Mooncake's is JSON lines of timestamp (milliseconds), input_length, output_length and hash_ids, one for
each 512 tokens of the prompt: equal ids at the beginning are equal text. `workload.py` makes the text.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from quire.errors import InvalidParams
from quire.trace.format import PROMPT_BLOCK
from quire.trace.mooncake import traffic
from quire.trace.reader import is_recording, read_recording

BLOCK_TOKENS = 512
MAX_TOKENS = 1 << 24  # of a prompt or an answer
MAX_SPAN_S = 1e9  # of a trace that is replayed: a simulated clock of more seconds has no milliseconds
TIME = re.compile(r"([\d-]+[ T][\d:]+)(\.\d+)?(Z|[+-][\d:]+)?")
BURST_GPT = ("Timestamp", "Request tokens", "Response tokens")
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace. `blocks`: an id for each `block_tokens` of the prompt. Without ids it shares no prefix."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_tokens <= MAX_TOKENS or not 0 <= self.output_tokens <= MAX_TOKENS:
            raise ValueError(f"{self.prompt_tokens} prompt tokens and {self.output_tokens} output tokens")
        if not math.isfinite(self.at_s):
            raise ValueError(f"a time of {self.at_s}")


@dataclass(frozen=True, slots=True)
class TraceSlice:
    """The requests of a trace that are replayed, the first at time 0, and the counts of those left out."""

    entries: list[TraceRequest]
    num_read: int
    num_too_long: int
    num_shortened: int
    num_empty: int


def read_trace(path: Path) -> list[TraceRequest]:
    """All requests of a file, by time."""
    try:
        if is_recording(path):
            entries = list(read_recorded(path))
        else:
            with path.open(encoding="utf-8-sig", newline="") as file:
                is_json = file.read(1) == "{"
                file.seek(0)
                entries = list(read_mooncake(file, path) if is_json else read_csv(file, path))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParams(f"--trace {path} cannot be read: {error}.") from None
    if not entries:
        raise InvalidParams(f"--trace {path} has no request in it.")
    return sorted(entries, key=lambda entry: entry.at_s)


def read_recorded(path: Path) -> Iterator[TraceRequest]:
    """The requests of a recording. Each answer to a prompt is a request of its own."""
    for number, request in enumerate(traffic(read_recording(path)), 1):
        try:
            yield TraceRequest(
                request.at_s, request.prompt_tokens, request.output_tokens, tuple(request.blocks), PROMPT_BLOCK
            )
        except ValueError as error:
            raise InvalidParams(f"--trace {path}, request {number}, cannot be sent: {error}.") from None


def read_csv(file: TextIO, path: Path) -> Iterator[TraceRequest]:
    """Azure's or BurstGPT's. A request of BurstGPT's that failed has no answer."""
    rows = csv.DictReader(file)
    columns = next((names for names in (AZURE, BURST_GPT) if set(names) <= set(rows.fieldnames or ())), None)
    if columns is None:
        raise InvalidParams(
            f"--trace {path} is neither JSON lines nor a CSV whose first line names {', '.join(AZURE)} or "
            f"{', '.join(BURST_GPT)}: it begins with {','.join(rows.fieldnames or ())[:80]!r}."
        )
    for row in rows:
        try:
            at, prompt, output = (row[name] for name in columns)
            yield TraceRequest(parse_time(at) if columns is AZURE else float(at), int(prompt), int(output))
        except (TypeError, ValueError) as error:
            raise bad_line(path, rows.line_num, error) from None


def parse_time(text: str) -> float:
    """The seconds of a timestamp with any number of decimals. Without a zone it is UTC."""
    found = TIME.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text!r} is not a timestamp")
    whole, fraction, zone = found.groups()
    return datetime.fromisoformat(whole + (zone or "+00:00")).timestamp() + float(fraction or 0)


def read_mooncake(file: TextIO, path: Path) -> Iterator[TraceRequest]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield mooncake_request(json.loads(line))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise bad_line(path, number, error) from None


def mooncake_request(row: dict[str, Any]) -> TraceRequest:
    blocks = tuple(int(block) for block in row["hash_ids"])
    return TraceRequest(float(row["timestamp"]) / 1e3, int(row["input_length"]), int(row["output_length"]), blocks)


def bad_line(path: Path, number: int, error: Exception) -> InvalidParams:
    return InvalidParams(f"--trace {path}, line {number}, is not a request: {type(error).__name__}: {error}.")


def slice_trace(
    entries: list[TraceRequest],
    *,
    num_requests: int | None,
    max_prompt_tokens: int | None,
    max_output_tokens: int | None,
    speed: float,
) -> TraceSlice:
    """The first requests that fit.

    A prompt that is too long is left out: a shorter one would share other prefixes. An answer that is too long is cut
    to the limit. A request without an answer is left out.
    """
    kept: list[TraceRequest] = []
    num_read = num_too_long = num_shortened = num_empty = 0
    for entry in entries:
        if len(kept) == num_requests:
            break
        num_read += 1
        if max_prompt_tokens is not None and entry.prompt_tokens > max_prompt_tokens:
            num_too_long += 1
        elif not entry.output_tokens:
            num_empty += 1
        else:
            limit = entry.output_tokens if max_output_tokens is None else max_output_tokens
            num_shortened += entry.output_tokens > limit
            kept.append(replace(entry, output_tokens=min(entry.output_tokens, limit)))
    if not kept:
        raise InvalidParams(
            f"Nothing of the trace can be replayed: of {num_read:,} requests {num_too_long:,} have prompts longer than "
            f"--max-prompt-tokens {max_prompt_tokens} and {num_empty:,} no answer."
        )
    begin = kept[0].at_s
    if (kept[-1].at_s - begin) / speed > MAX_SPAN_S:
        raise InvalidParams(f"The times of the trace are too far apart: from {begin:g} s to {kept[-1].at_s:g} s.")
    timed = [replace(entry, at_s=(entry.at_s - begin) / speed) for entry in kept]
    return TraceSlice(timed, num_read, num_too_long, num_shortened, num_empty)
