"""What a `ToolParser` finds in an answer, piece by piece, and the whole that the pieces make up.

Streamed and whole answers are both made from these events, so they cannot differ: a stream sends them as they come, and
a whole answer is `collect` of them all.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More of what the model says beside its calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """More of a call's arguments: raw JSON text, as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    """`complete`: the arguments are a JSON object; otherwise the answer was cut or broke off within them."""

    index: int
    complete: bool


Event = TextPiece | CallBegins | ArgumentsPiece | CallEnds


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    complete: bool = True


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    content: str
    calls: tuple[ToolCall, ...]


def collect(events: Iterable[Event]) -> ParsedAnswer:
    """The answer that these events are the pieces of. A call that has not ended is not complete."""
    content: list[str] = []
    begun: list[CallBegins] = []
    arguments: list[list[str]] = []
    complete: set[int] = set()
    for event in events:
        match event:
            case TextPiece(text):
                content.append(text)
            case CallBegins():
                begun.append(event)
                arguments.append([])
            case ArgumentsPiece(index, text):
                arguments[index].append(text)
            case CallEnds(index, True):
                complete.add(index)
    calls = [
        ToolCall(call.id, call.name, "".join(pieces), call.index in complete)
        for call, pieces in zip(begun, arguments, strict=True)
    ]
    return ParsedAnswer("".join(content), tuple(calls))


def make_call_id(source: str | None, index: int) -> str:
    """An id for a call. With a source (the request's id, say) it is the same whenever the answer is made again."""
    digits = secrets.token_hex(12) if source is None else hashlib.sha256(f"{source}/{index}".encode()).hexdigest()[:24]
    return f"call_{digits}"
