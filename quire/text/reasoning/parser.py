"""ReasoningParser: splits an answer into reasoning and what follows, while it is generated.

It emits the reasoning as `ReasoningDelta`s and passes the rest to another parser, which reads tool calls. Whitespace
around the reasoning belongs to neither. An answer that ends within its reasoning has reasoning only.
"""

from __future__ import annotations

from typing import Literal, Protocol

from quire.text.detokenizer import StopStringScanner
from quire.text.reasoning.formats import Phase, ReasoningFormat
from quire.text.tools.events import Event, ReasoningDelta
from quire.text.tools.incremental_reader import SPACE


class AnswerParser(Protocol):
    """Reads one answer. `ToolParser`, `ReasoningParser` and `HarmonyParser` are such parsers."""

    @property
    def finished(self) -> bool:
        """The request allows one call, and that call is complete."""
        ...

    def push(self, text: str) -> list[Event]:
        """Add a piece of the answer. Returns the events that are final."""
        ...

    def finish(self) -> list[Event]:
        """End the answer. Returns the events of text that was held back."""
        ...


class ReasoningParser:
    """Call `push` for each piece of the answer, then `finish` once. `phase` is what the answer begins with."""

    def __init__(self, format: ReasoningFormat, phase: Phase, answer: AnswerParser) -> None:
        self._format = format
        self._answer = answer
        self._state: Literal["start", "reasoning", "gap", "answer"] = "start" if phase == "either" else phase
        self._held = ""  # at the start, what may be the opening; in reasoning, whitespace that may end it
        self._scanner = StopStringScanner([format.closing])
        self._has_reasoning = False  # some of it is not whitespace

    @property
    def finished(self) -> bool:
        return self._answer.finished

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        if self._state == "start":
            text = self._read_opening(text)
        if self._state == "reasoning":
            reasoning, text = self._read_reasoning(text)
            events += [ReasoningDelta(reasoning)] if reasoning else []
        if self._state == "gap":
            text = text.lstrip(SPACE)
            self._state = "answer" if text else "gap"
        return events + self._answer.push(text) if text and self._state == "answer" else events

    def finish(self) -> list[Event]:
        if self._state == "reasoning":
            rest = self._trim(self._scanner.held)
            return [*([ReasoningDelta(rest)] if rest else []), *self._answer.finish()]
        held = self._held if self._state == "start" else ""
        return [*self._answer.push(held), *self._answer.finish()]

    def _read_opening(self, text: str) -> str:
        """The text behind the opening, or all text if there is none."""
        self._held += text
        begun, opening = self._held.lstrip(SPACE), self._format.opening
        if begun.startswith(opening):
            self._state, text, self._held = "reasoning", begun[len(opening) :], ""
        elif opening.startswith(begun):
            text = ""
        else:
            self._state, text, self._held = "answer", self._held, ""
        return text

    def _read_reasoning(self, text: str) -> tuple[str, str]:
        """The reasoning that is final, and the text behind it."""
        before, marker, rest = split_at_marker(self._scanner, text)
        if marker is not None:
            self._state = "gap"
        return self._trim(before), rest

    def _trim(self, text: str) -> str:
        """Reasoning without the whitespace around it. Whitespace within it is held until more text follows."""
        text = self._held + text
        if not self._has_reasoning:
            text = text.lstrip(SPACE)
        body = text.rstrip(SPACE)
        self._held = text[len(body) :]
        self._has_reasoning = self._has_reasoning or bool(body)
        return body


def split_at_marker(scanner: StopStringScanner, text: str) -> tuple[str, str | None, str]:
    """The text before the scanner's first marker, the marker, and the text behind it; without one, what is final."""
    window = scanner.held + text
    found = scanner.scan(text, may_stop=True)
    if found is None:
        return window[: len(window) - len(scanner.held)], None, ""
    scanner.held = ""
    return window[: found.end - len(found.stop)], found.stop, window[found.end :]
