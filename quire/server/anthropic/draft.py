"""Draft: a message in the making. Whatever changes the document makes the event that says so, so that the document is
what its events add up to, whether somebody reads them or not.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from quire.core.outputs import CompletionOutput
from quire.errors import QuireError
from quire.server.anthropic.problems import anthropic_problem
from quire.server.stream import event
from quire.text.output_processor import OutputProcessor
from quire.text.tools.events import ArgumentsDelta, Event, TextDelta, ToolCallEnd, ToolCallStart

Document = dict[str, Any]


class Draft:
    """One message's document. Events are encoded at once, as the document goes on."""

    def __init__(self, model: str, exchange: OutputProcessor) -> None:
        self.document: Document = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage(exchange),
        }
        self._exchange = exchange
        self._block: Document | None = None  # the last of the content, while it grows
        self._arguments = ""  # of the call that grows, as JSON text

    def begin(self) -> list[bytes]:
        return [emit("message_start", message=self.document), emit("ping")]

    def write(self, pieces: Sequence[Event]) -> list[bytes]:
        """More of the answer."""
        return [data for piece in pieces for data in self._write(piece)]

    def end(self) -> list[bytes]:
        """The answer is complete, or as long as it may be."""
        events = self._close()
        delta = how_it_ended(self._exchange.output.outputs[0], self.document["content"])
        self.document |= {**delta, "usage": usage(self._exchange)}
        return [*events, emit("message_delta", delta=delta, usage=self.document["usage"]), emit("message_stop")]

    def fail(self, error: QuireError) -> list[bytes]:
        """It ends here, by no choice of the model's."""
        return [event(anthropic_problem(error), "error")]

    def _write(self, piece: Event) -> list[bytes]:
        match piece:
            case TextDelta(text):
                return self._add_text(text)
            case ToolCallStart(_, call_id, name):
                return [*self._close(), self._open(type="tool_use", id=tool_use_id(call_id), name=name, input={})]
            case ArgumentsDelta(_, text):
                self._arguments += text
                return [self._add(type="input_json_delta", partial_json=text)]
            case ToolCallEnd():
                return self._close()

    def _add_text(self, text: str) -> list[bytes]:
        events = []
        if self._block is None or self._block["type"] != "text":
            events = [*self._close(), self._open(type="text", text="")]
        assert self._block is not None
        self._block["text"] += text
        return [*events, self._add(type="text_delta", text=text)]

    def _open(self, **block: Any) -> bytes:
        self._block, self._arguments = block, ""
        self.document["content"].append(block)
        return emit("content_block_start", index=self._index, content_block=block)

    def _add(self, **delta: Any) -> bytes:
        return emit("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> list[bytes]:
        if self._block is None:
            return []
        if self._block["type"] == "tool_use":
            self._block["input"] = read_input(self._arguments)
        self._block = None
        return [emit("content_block_stop", index=self._index)]

    @property
    def _index(self) -> int:
        return len(self.document["content"]) - 1


def emit(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def tool_use_id(call_id: str) -> str:
    return f"toolu_{call_id.removeprefix('call_')}"


def read_input(arguments: str) -> Document:
    """A call's arguments; of a call that was cut off, as much as there is."""
    value: Document = from_json(arguments, allow_partial=True) if arguments else {}
    return value


def how_it_ended(answer: CompletionOutput, content: Sequence[Document]) -> Document:
    reason, sequence = "end_turn", None
    if answer.finish_reason == "length":
        reason = "max_tokens"
    elif isinstance(answer.stop_reason, str):
        reason, sequence = "stop_sequence", answer.stop_reason
    elif any(block["type"] == "tool_use" for block in content):
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": sequence}


def usage(exchange: OutputProcessor) -> Document:
    """Input tokens that were read from the cache are counted apart from the others."""
    output = exchange.output
    return {
        "input_tokens": len(output.prompt_token_ids) - output.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": output.num_cached_tokens,
        "output_tokens": len(output.outputs[0].token_ids),
    }
