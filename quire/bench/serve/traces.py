"""Recorded traffic: when requests came, how long they were, and which beginnings they shared.

Two published formats are read. Azure's is a CSV of TIMESTAMP, ContextTokens and GeneratedTokens. Mooncake's is JSON
lines of timestamp (milliseconds), input_length, output_length and hash_ids, one for each 512 tokens of the prompt:
equal ids at the beginning are equal text. What the text is, is up to `prompts.py`.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from quire.errors import InvalidParams

BLOCK_TOKENS = 512
TIME = re.compile(r"([\d-]+[ T][\d:]+)(\.\d+)?(Z|[+-][\d:]+)?")
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Entry:
    """One request of a trace. `blocks` name its prompt 512 tokens at a time; without any it shares nothing."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 0:
            raise ValueError(f"{self.prompt_tokens} prompt tokens and {self.output_tokens} output tokens")


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The part of a trace that is replayed, its first request at 0, and what became of the requests read for it."""

    entries: list[Entry]
    num_read: int
    num_too_long: int
    num_shortened: int
    num_empty: int


def read_trace(path: Path) -> list[Entry]:
    """All requests of a file, in order of time."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            is_json = file.read(1) == "{"
            file.seek(0)
            entries = list(read_mooncake(file, path) if is_json else read_azure(file, path))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParams(f"--trace {path} cannot be read: {error}.") from None
    if not entries:
        raise InvalidParams(f"--trace {path} has no request in it.")
    return sorted(entries, key=lambda entry: entry.at_s)


def read_azure(file: TextIO, path: Path) -> Iterator[Entry]:
    rows = csv.DictReader(file)
    if not set(AZURE) <= set(rows.fieldnames or ()):
        raise InvalidParams(
            f"--trace {path} is neither JSON lines nor a CSV whose first line names {', '.join(AZURE)}: it begins with "
            f"{','.join(rows.fieldnames or ())[:80]!r}."
        )
    for row in rows:
        try:
            at, prompt, output = (row[name] for name in AZURE)
            yield Entry(parse_time(at), int(prompt), int(output))
        except (TypeError, ValueError) as error:
            raise bad_line(path, rows.line_num, error) from None


def parse_time(text: str) -> float:
    """Seconds of a timestamp with any number of decimals; without a zone it is taken as UTC."""
    found = TIME.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text!r} is no timestamp")
    whole, fraction, zone = found.groups()
    return datetime.fromisoformat(whole + (zone or "+00:00")).timestamp() + float(fraction or 0)


def read_mooncake(file: TextIO, path: Path) -> Iterator[Entry]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield mooncake_entry(json.loads(line))
        except (KeyError, TypeError, ValueError) as error:
            raise bad_line(path, number, error) from None


def mooncake_entry(row: dict[str, Any]) -> Entry:
    blocks = tuple(int(block) for block in row["hash_ids"])
    return Entry(float(row["timestamp"]) / 1e3, int(row["input_length"]), int(row["output_length"]), blocks)


def bad_line(path: Path, number: int, error: Exception) -> InvalidParams:
    return InvalidParams(f"--trace {path}, line {number}, is no request: {type(error).__name__}: {error}.")


def excerpt(
    entries: list[Entry],
    *,
    num_requests: int | None,
    max_prompt_tokens: int | None,
    max_output_tokens: int | None,
    speed: float,
) -> Excerpt:
    """The first requests that fit.

    Prompts that are too long are left out, since a cut one would share other beginnings than the real one did; answers
    that are too long are asked for up to the limit. Requests that got no answer at all are left out too.
    """
    kept: list[Entry] = []
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
    timed = [replace(entry, at_s=(entry.at_s - begin) / speed) for entry in kept]
    return Excerpt(timed, num_read, num_too_long, num_shortened, num_empty)
