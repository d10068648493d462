"""Harmony: gpt-oss's format of answers. An answer is a row of messages, each in a channel.

    <|channel|>analysis<|message|>The user asks ...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": ...}<|call|>
    <|start|>assistant<|channel|>final<|message|>It is sunny.<|return|>

`HarmonyParser` reads them: analysis is reasoning, a message to a function is a tool call, and the rest is text. A
message to anybody else, as to a built-in tool or to a function that may not be called, is reasoning too. The prompt
ends with `<|start|>assistant`, and the last marker ends the answer, so the text of an answer has neither.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from quire.text.detokenizer import StopStringScanner
from quire.text.reasoning.parser import split_at_marker
from quire.text.tools.definitions import ToolChoice
from quire.text.tools.events import (
    ArgumentsDelta,
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallEnd,
    ToolCallStart,
    make_call_id,
)

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
BODY_ENDS = (END, "<|call|>", "<|return|>", START, CHANNEL)
FINAL_HEADER = f"{CHANNEL}final{MESSAGE}"
MAX_HEADER = 512  # characters; a longer text is not in this format
SEPARATOR = "\n\n"  # between two messages of a kind

Kind = Literal["reasoning", "text", "call"]

_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HarmonyParser:
    """Call `push` for each piece of the answer, then `finish` once. With `in_final`, the prompt has begun the answer's
    last message."""

    def __init__(self, choice: ToolChoice, id_source: str | None = None, *, in_final: bool = False) -> None:
        self.finished = False
        self._names = frozenset(tool.name for tool in choice.tools if choice.mode != "none")
        self._parallel = choice.parallel
        self._id_source = id_source
        self._events: list[Event] = []
        self._kind: Kind | None = None  # of the message whose body is read; None: its header is read
        self._header = ""
        self._scanner = StopStringScanner([MESSAGE])
        self._num_calls = 0
        self._arguments: list[str] = []  # of the call that is read
        self._written: set[Kind] = set()  # kinds that have text
        self._is_new = False  # the message has no text yet
        if in_final:
            self._begin_body("text")

    def push(self, text: str) -> list[Event]:
        while text and not self.finished:
            text = self._read_header(text) if self._kind is None else self._read_body(text)
        return self._drain()

    def finish(self) -> list[Event]:
        if self._kind is None:
            header = self._header + self._scanner.held
            if header.strip() and "<|" not in header and not self.finished:
                self._emit("text", header)
        else:
            self._add(self._scanner.held)
            self._end_body()
        return self._drain()

    def _read_header(self, text: str) -> str:
        """Read up to the body. Returns the text behind the header."""
        before, marker, rest = split_at_marker(self._scanner, text)
        self._header += before
        if len(self._header) > MAX_HEADER:  # before the marker is looked at: it does not matter how the text is divided
            begun, rest = self._header[:MAX_HEADER], self._header[MAX_HEADER:] + (marker or self._scanner.held) + rest
            self._emit("text", begun)
            self._header = ""
            self._begin_body("text")
            self._is_new = False
        elif marker is not None:
            self._begin_message()
        return rest

    def _begin_message(self) -> None:
        header, self._header = self._header.rpartition(START)[2], ""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is None:
            self._begin_body("reasoning" if channel and channel[1] == "analysis" else "text")
        elif (name := recipient[1].removeprefix("functions.")) in self._names:
            self._begin_body("call")
            call_id = make_call_id(self._id_source, self._num_calls)
            self._events.append(ToolCallStart(self._num_calls, call_id, name))
        else:
            self._begin_body("reasoning")

    def _begin_body(self, kind: Kind) -> None:
        self._kind, self._is_new = kind, True
        self._scanner = StopStringScanner(BODY_ENDS)

    def _read_body(self, text: str) -> str:
        before, marker, rest = split_at_marker(self._scanner, text)
        self._add(before)
        if marker is None:
            return rest
        self._end_body()
        return (marker if marker in (START, CHANNEL) else "") + rest

    def _add(self, text: str) -> None:
        if not text:
            return
        if self._kind == "call":
            self._arguments.append(text)
            self._events.append(ArgumentsDelta(self._num_calls, text))
        elif self._kind is not None:
            self._emit(self._kind, SEPARATOR + text if self._is_new and self._kind in self._written else text)
        self._is_new = False

    def _emit(self, kind: Kind, text: str) -> None:
        self._written.add(kind)
        self._events.append(TextDelta(text) if kind == "text" else ReasoningDelta(text))

    def _end_body(self) -> None:
        if self._kind == "call":
            self._end_call()
        self._kind = None
        self._scanner = StopStringScanner([MESSAGE])

    def _end_call(self) -> None:
        if not self._arguments:
            self._add("{}")
        complete = is_object("".join(self._arguments))
        self._events.append(ToolCallEnd(self._num_calls, complete))
        self._num_calls += 1
        self._arguments.clear()
        self.finished = complete and not self._parallel

    def _drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
