"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from quire.core.outputs import CompletionOutput
from quire.errors import QuireError
from quire.server.anthropic.protocol import CountRequest, MessagesRequest, chat_input
from quire.server.chat import ChatParser
from quire.server.error_response import anthropic_error
from quire.server.router import Router
from quire.server.schemas import AnthropicError, AnthropicMessage, TokenCount, response_schemas
from quire.server.service import RequestContext, Service, request_context, stream_chat
from quire.server.streaming import EventStreamResponse, JSONResponse, sse_event, with_cancellation
from quire.text.output_processor import OutputProcessor
from quire.text.tools.events import ArgumentsDelta, Event, ReasoningDelta, TextDelta, ToolCallEnd, ToolCallStart

Document = dict[str, Any]

router = Router()


@dataclass(frozen=True, slots=True)
class MessageGeneration:
    """Generates one message. It runs while its events are read."""

    service: Service
    output_processor: OutputProcessor
    parser: ChatParser
    builder: MessageBuilder

    async def events(self) -> AsyncGenerator[list[bytes], None]:
        yield self.builder.begin()
        async with aclosing(stream_chat(self.service, self.output_processor, self.parser)) as stream:
            async for pieces in stream:
                if written := self.builder.write(pieces):
                    yield written
        yield self.builder.end()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events of a stream. An error becomes the last event."""
        try:
            async with aclosing(self.events()) as events:
                async for written in events:
                    yield b"".join(written)
        except QuireError as error:
            yield b"".join(self.builder.fail(error))

    async def run(self) -> None:
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass


@router.post("/v1/messages", responses=response_schemas(AnthropicMessage, error=AnthropicError, stream=True))
async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Answer a conversation."""
    context = request_context(request, body.model)
    generation = await prepare(context, body)
    if body.stream:
        return EventStreamResponse(generation.stream(), anthropic_headers(context))
    await with_cancellation(request.receive, generation.run())
    return JSONResponse(generation.builder.document, headers=anthropic_headers(context))


@router.post("/v1/messages/count_tokens", responses=response_schemas(TokenCount, error=AnthropicError))
async def count_tokens(request: Request, body: CountRequest) -> Response:
    """The number of tokens of a prompt with its tools."""
    context = request_context(request, body.model)
    prompt = await context.service.templates.prepare(chat_input(body))
    tokens = await context.service.encode(prompt.text, add_special_tokens=False)
    return JSONResponse({"input_tokens": len(tokens)}, headers=anthropic_headers(context))


async def prepare(context: RequestContext, body: MessagesRequest) -> MessageGeneration:
    prompt = await context.service.templates.prepare(chat_input(body))
    params = body.sampling_params(context.service.ready.sampling, **prompt.sampling_params())
    output_processor = await context.service.open_chat(prompt, params, context, body.priority or 0)
    return MessageGeneration(
        context.service, output_processor, prompt.parser(), MessageBuilder(context.service.model, output_processor)
    )


def anthropic_headers(context: RequestContext) -> dict[str, str]:
    """Anthropic's clients read the request id from this header."""
    return {"request-id": context.request_id}


class MessageBuilder:
    """Builds the document of one message. Every change of the document returns its event, encoded at once.

    The document is the sum of its events, in a stream and in a whole response.
    """

    def __init__(self, model: str, output_processor: OutputProcessor) -> None:
        self.document: Document = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage(output_processor),
        }
        self._output_processor = output_processor
        self._block: Document | None = None  # the last block of the content, while it grows
        self._arguments = ""  # JSON text of the tool call that grows

    def begin(self) -> list[bytes]:
        return [emit("message_start", message=self.document), emit("ping")]

    def write(self, pieces: Sequence[Event]) -> list[bytes]:
        """Add new reasoning, text and tool calls."""
        return [data for piece in pieces for data in self._write(piece)]

    def end(self) -> list[bytes]:
        """The answer is complete or has reached its limit."""
        events = self._close()
        delta = stop_fields(self._output_processor.output.outputs[0], self.document["content"])
        self.document |= {**delta, "usage": usage(self._output_processor)}
        return [*events, emit("message_delta", delta=delta, usage=self.document["usage"]), emit("message_stop")]

    def fail(self, error: QuireError) -> list[bytes]:
        """The event of an error."""
        return [sse_event(anthropic_error(error), "error")]

    def _write(self, piece: Event) -> list[bytes]:
        match piece:
            case ReasoningDelta(text):
                return self._add_thinking(text)
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

    def _add_thinking(self, text: str) -> list[bytes]:
        """Clients send thinking back with its signature. Nothing is signed here, so it is empty."""
        events = []
        if self._block is None or self._block["type"] != "thinking":
            events = [*self._close(), self._open(type="thinking", thinking="", signature="")]
        assert self._block is not None
        self._block["thinking"] += text
        return [*events, self._add(type="thinking_delta", thinking=text)]

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
    return sse_event({"type": kind, **fields}, kind)


def tool_use_id(call_id: str) -> str:
    return f"toolu_{call_id.removeprefix('call_')}"


def read_input(arguments: str) -> Document:
    """The arguments of a tool call. If the call was cut off, these are the arguments so far. A model may write a call
    whose arguments are no JSON object; the API has no place for those."""
    try:
        value = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def stop_fields(answer: CompletionOutput, content: Sequence[Document]) -> Document:
    reason, sequence = "end_turn", None
    if answer.finish_reason == "length":
        reason = "max_tokens"
    elif isinstance(answer.stop_reason, str):
        reason, sequence = "stop_sequence", answer.stop_reason
    elif any(block["type"] == "tool_use" for block in content):
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": sequence}


def usage(output_processor: OutputProcessor) -> Document:
    """input_tokens does not include tokens from the prefix cache."""
    output = output_processor.output
    return {
        "input_tokens": len(output.prompt_token_ids) - output.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": output.num_cached_tokens,
        "output_tokens": len(output.outputs[0].token_ids),
    }
