"""Draft: a response in the making. Whatever changes the document makes the event that says so, and nothing else does:
the document is what its events add up to, whether somebody reads them or not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from quire.core.outputs import CompletionOutput
from quire.errors import InvalidRequest, Overloaded, QuireError
from quire.server.openai.responses_items import new_id, output_part
from quire.server.stream import event
from quire.text.tools.events import ArgumentsDelta, Event, TextDelta, ToolCallEnd, ToolCallStart

Document = dict[str, Any]
RUNNING = ("queued", "in_progress")


class Draft:
    """One response's document and the count of its events. Events are encoded at once, as the document goes on."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.error: QuireError | None = None
        self._num_events = 0
        self._item: Document | None = None  # the last of the output, while it grows
        self._logprobs: list[Document] = []  # of tokens whose text is held back

    @property
    def ended(self) -> bool:
        return self.document["status"] not in RUNNING

    def begin(self) -> list[bytes]:
        events = [self._tell("response.created")]
        if self.document["status"] == "queued":
            events.append(self._tell("response.queued"))
        self.document["status"] = "in_progress"
        return [*events, self._tell("response.in_progress")]

    def write(self, pieces: Sequence[Event], logprobs: Sequence[Document] = ()) -> list[bytes]:
        """More of the answer."""
        self._logprobs += logprobs
        return [data for piece in pieces for data in self._write(piece)]

    def end(self, answer: CompletionOutput, usage: Document) -> list[bytes]:
        """The answer is complete, or as long as it may be. A response has at least one item, if an empty one."""
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        events = []
        if self._logprobs or not self.document["output"]:
            events += self._add_text("")
        events += self._close(status)
        self.document.update(status=status, completed_at=int(time.time()), usage=usage)
        if status == "incomplete":
            self.document["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._tell(f"response.{status}")]

    def fail(self, error: QuireError) -> list[bytes]:
        """It ends here, by no choice of the model's."""
        self.error = error
        events = self._close("incomplete")
        self.document.update(status="failed", error={"code": code_of(error), "message": str(error)})
        return [*events, self._tell("response.failed")]

    def cancel(self) -> list[bytes]:
        """Nobody wants the rest. The API has no event of its own for that; the document says it."""
        events = self._close("incomplete")
        self.document["status"] = "cancelled"
        return [*events, self._tell("response.incomplete")]

    def _write(self, piece: Event) -> list[bytes]:
        match piece:
            case TextDelta(text):
                return self._add_text(text)
            case ToolCallStart(_, call_id, name):
                item = {"id": new_id("fc"), "type": "function_call", "call_id": call_id, "name": name}
                return [*self._close("completed"), *self._open({**item, "arguments": "", "status": "in_progress"})]
            case ArgumentsDelta(_, text):
                assert self._item is not None
                self._item["arguments"] += text
                return [self._emit("response.function_call_arguments.delta", **self._place(), delta=text)]
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
        place = {**self._place(), "content_index": 0}
        return [*events, self._emit("response.output_text.delta", **place, delta=text, logprobs=logprobs)]

    def _open_message(self) -> list[bytes]:
        item: Document = {"id": new_id("msg"), "type": "message", "role": "assistant", "content": []}
        events = self._open({**item, "status": "in_progress"})
        assert self._item is not None
        self._item["content"].append(output_part(""))
        part = self._item["content"][0]
        return [*events, self._emit("response.content_part.added", **self._place(), content_index=0, part=part)]

    def _open(self, item: Document) -> list[bytes]:
        self._item = item
        self.document["output"].append(item)
        place = self._place()
        return [self._emit("response.output_item.added", output_index=place["output_index"], item=item)]

    def _close(self, status: str) -> list[bytes]:
        """The item that grows is done, if there is one."""
        if self._item is None:
            return []
        item, place = self._item, self._place()
        item["status"] = status
        self._item = None
        if item["type"] == "message":
            part, place = item["content"][0], {**place, "content_index": 0}
            text = {"text": part["text"], "logprobs": part["logprobs"]}
            events = [
                self._emit("response.output_text.done", **place, **text),
                self._emit("response.content_part.done", **place, part=part),
            ]
        else:
            call = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._emit("response.function_call_arguments.done", **place, **call)]
        return [*events, self._emit("response.output_item.done", output_index=place["output_index"], item=item)]

    def _place(self) -> Document:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self.document["output"]) - 1}

    def _tell(self, kind: str) -> bytes:
        return self._emit(kind, response=self.document)

    def _emit(self, kind: str, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)


def code_of(error: QuireError) -> str:
    """The API's own word for what went wrong; it has few."""
    if isinstance(error, Overloaded):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"
