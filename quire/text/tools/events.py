"""Events of a parser: the deltas of a streamed answer, and `collect_events`, which makes a complete answer of them.

Streamed and complete answers are made from the same events, so they have the same content.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text that the model writes for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text outside of reasoning and calls."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """A piece of a call's arguments: JSON text as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """`complete`: the arguments are a JSON object. Otherwise the answer ended, or the JSON broke, within them."""

    index: int
    complete: bool


Event = ReasoningDelta | TextDelta | ToolCallStart | ArgumentsDelta | ToolCallEnd


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    complete: bool = True


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    content: str
    calls: tuple[ToolCall, ...]
    reasoning: str = ""


def collect_events(events: Iterable[Event]) -> ParsedOutput:
    """The answer that the events make up. A call without an end event is not complete."""
    content: list[str] = []
    reasoning: list[str] = []
    begun: list[ToolCallStart] = []
    arguments: list[list[str]] = []
    complete: set[int] = set()
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case TextDelta(text):
                content.append(text)
            case ToolCallStart():
                begun.append(event)
                arguments.append([])
            case ArgumentsDelta(index, text):
                arguments[index].append(text)
            case ToolCallEnd(index, True):
                complete.add(index)
    calls = [
        ToolCall(call.id, call.name, "".join(pieces), call.index in complete)
        for call, pieces in zip(begun, arguments, strict=True)
    ]
    return ParsedOutput("".join(content), tuple(calls), "".join(reasoning))


def make_call_id(source: str | None, index: int) -> str:
    """An id for a call. With a source, for example the request's id, it is deterministic."""
    digits = secrets.token_hex(12) if source is None else hashlib.sha256(f"{source}/{index}".encode()).hexdigest()[:24]
    return f"call_{digits}"
