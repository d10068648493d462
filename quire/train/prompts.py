"""Reads prompts that a user gives to `quire train-draft`: JSON lines, or a text with one prompt a line. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.errors import InvalidParams

KEYS = ("prompt", "question", "turns")


def read_prompts(paths: Sequence[str]) -> list[str]:
    """The prompts of all files, each once, in their order."""
    found: dict[str, None] = {}
    for path in paths:
        found |= dict.fromkeys(read_file(Path(path).expanduser()))
    return list(found)


def read_file(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # a byte order mark is no part of the first prompt
    except OSError as error:
        raise InvalidParams(f"{path} cannot be read: {error.strerror}. Give a file of prompts.", "prompts") from error
    except UnicodeDecodeError as error:
        raise InvalidParams(f"{path} is no UTF-8 text: see its byte {error.start:,}.", "prompts") from error
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise InvalidParams(f"{path} has no prompts. Give JSON lines or a prompt a line.", "prompts")
    is_json = lines[0][1].startswith("{")
    return [parse_line(line, f"{path}, line {number}") if is_json else line for number, line in lines]


def parse_line(line: str, where: str) -> str:
    """The prompt of a JSON line; of several turns the first."""
    try:
        entry = json.loads(line)
        value: Any = next(entry[key] for key in KEYS if key in entry)
        value = value[0] if isinstance(value, list) else value
    except (ValueError, TypeError, StopIteration, IndexError, RecursionError) as error:
        raise no_prompt(where) from error
    value = value.get("content") if isinstance(value, dict) else value
    if not isinstance(value, str) or not value.strip():
        raise no_prompt(where)
    return value


def no_prompt(where: str) -> InvalidParams:
    return InvalidParams(
        f'{where}, is no prompt; give {{"prompt": "..."}}, {{"question": "..."}} or {{"turns": ["..."]}}.', "prompts"
    )
