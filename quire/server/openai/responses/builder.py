"""ResponseBuilder: the document of one response, and its events.

Every change of the document returns its event, and nothing else makes events. The document is the sum of its events, in
a stream, in a whole response and in the background.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from quire.core.outputs import CompletionOutput
from quire.errors import InvalidRequest, Overloaded, QuireError
from quire.server.openai.responses.protocol import new_id, output_part
from quire.server.streaming import sse_event
from quire.text.tools.events import ArgumentsDelta, Event, ReasoningDelta, TextDelta, ToolCallEnd, ToolCallStart

Document = dict[str, Any]
RUNNING = ("queued", "in_progress")


class ResponseBuilder:
    """Events are encoded at once, because the document changes after them."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.error: QuireError | None = None
        self._num_events = 0
        self._item: Document | None = None  # the last item of the output, while it grows
        self._logprobs: list[Document] = []  # of tokens whose text the parser still holds

    @property
    def ended(self) -> bool:
        return self.document["status"] not in RUNNING

    def begin(self) -> list[bytes]:
        events = [self._emit_response("response.created")]
        if self.document["status"] == "queued":
            events.append(self._emit_response("response.queued"))
        self.document["status"] = "in_progress"
        return [*events, self._emit_response("response.in_progress")]

    def write(self, pieces: Sequence[Event], logprobs: Sequence[Document] = ()) -> list[bytes]:
        """Add new reasoning, text and tool calls."""
        self._logprobs += logprobs
        return [data for piece in pieces for data in self._write(piece)]

    def end(self, answer: CompletionOutput, usage: Document) -> list[bytes]:
        """The answer is complete or has reached its limit. An empty answer has one empty item."""
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        events = []
        if self._logprobs or not self.document["output"]:
            events += self._add_text("")
        events += self._close(status)
        self.document.update(status=status, completed_at=int(time.time()), usage=usage)
        if status == "incomplete":
            self.document["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._emit_response(f"response.{status}")]

    def fail(self, error: QuireError) -> list[bytes]:
        """The response ends with an error."""
        self.error = error
        events = self._close("incomplete")
        self.document.update(status="failed", error={"code": error_code(error), "message": str(error)})
        return [*events, self._emit_response("response.failed")]

    def cancel(self) -> list[bytes]:
        """The response is cancelled. The API has no event for that, so the document's status is the only sign."""
        events = self._close("incomplete")
        self.document["status"] = "cancelled"
        return [*events, self._emit_response("response.incomplete")]

    def _write(self, piece: Event) -> list[bytes]:
        match piece:
            case ReasoningDelta(text):
                return self._add_reasoning(text)
            case TextDelta(text):
                return self._add_text(text)
            case ToolCallStart(_, call_id, name):
                item = {"id": new_id("fc"), "type": "function_call", "call_id": call_id, "name": name}
                return [*self._close("completed"), *self._open({**item, "arguments": "", "status": "in_progress"})]
            case ArgumentsDelta(_, text):
                assert self._item is not None
                self._item["arguments"] += text
                return [self._emit("response.function_call_arguments.delta", **self._location(), delta=text)]
            case ToolCallEnd(_, complete):
                return self._close("completed" if complete else "incomplete")

    def _add_text(self, text: str) -> list[bytes]:
        events = []
        if self._item is None or self._item["type"] != "message":
            events += self._close("completed") + self._open_message()
        assert self._item is not None
        logprobs, self._logprobs = self._logprobs, []
        part = self._item["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        location = {**self._location(), "content_index": 0}
        return [*events, self._emit("response.output_text.delta", **location, delta=text, logprobs=logprobs)]

    def _add_reasoning(self, text: str) -> list[bytes]:
        events = []
        if self._item is None or self._item["type"] != "reasoning":
            item = {"id": new_id("rs"), "type": "reasoning", "summary": [], "content": []}
            events = self._close("completed") + self._open_with(item, {"type": "reasoning_text", "text": ""})
        assert self._item is not None
        self._item["content"][0]["text"] += text
        self._logprobs.clear()  # a reasoning item has no place for them
        return [*events, self._emit("response.reasoning_text.delta", **self._location(), content_index=0, delta=text)]

    def _open_message(self) -> list[bytes]:
        item: Document = {"id": new_id("msg"), "type": "message", "role": "assistant", "content": []}
        return self._open_with(item, output_part(""))

    def _open_with(self, item: Document, part: Document) -> list[bytes]:
        """Open an item whose content is one part."""
        events = self._open({**item, "status": "in_progress"})
        assert self._item is not None
        self._item["content"].append(part)
        return [*events, self._emit("response.content_part.added", **self._location(), content_index=0, part=part)]

    def _open(self, item: Document) -> list[bytes]:
        self._item = item
        self.document["output"].append(item)
        location = self._location()
        return [self._emit("response.output_item.added", output_index=location["output_index"], item=item)]

    def _close(self, status: str) -> list[bytes]:
        """The item that grows is complete, if there is one."""
        if self._item is None:
            return []
        item, location = self._item, self._location()
        item["status"] = status
        self._item = None
        if item["type"] in ("message", "reasoning"):
            part, location = item["content"][0], {**location, "content_index": 0}
            kind, *details = ("output_text", "logprobs") if item["type"] == "message" else ("reasoning_text",)
            text = {name: part[name] for name in ("text", *details)}
            events = [
                self._emit(f"response.{kind}.done", **location, **text),
                self._emit("response.content_part.done", **location, part=part),
            ]
        else:
            call = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._emit("response.function_call_arguments.done", **location, **call)]
        return [*events, self._emit("response.output_item.done", output_index=location["output_index"], item=item)]

    def _location(self) -> Document:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self.document["output"]) - 1}

    def _emit_response(self, kind: str) -> bytes:
        return self._emit(kind, response=self.document)

    def _emit(self, kind: str, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return sse_event({"type": kind, "sequence_number": number, **fields}, kind)


def error_code(error: QuireError) -> str:
    """The error code of the API, which defines only a few."""
    if isinstance(error, Overloaded):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"
