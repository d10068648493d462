"""POST /v1/chat/completions: a conversation in, the next message out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.core.params import SamplingParams
from quire.errors import InvalidParams
from quire.server.context import Context, context
from quire.server.conversation import Inquiry
from quire.server.documents import ChatCompletion, answers
from quire.server.openai.bodies import chat_logprobs, finish_reason, prompt_logprobs, usage
from quire.server.openai.choices import Choice, Document, check, choices_of, stream_choices
from quire.server.openai.fields import ChatRequest
from quire.server.service import Service
from quire.server.stream import JSON, EventStream, while_connected
from quire.text.output_processor import OutputProcessor
from quire.text.tools.definitions import parse_tool_choice, parse_tools
from quire.text.tools.events import ArgumentsDelta, Event, TextDelta, ToolCallStart, collect_events
from quire.text.tools.parser import ToolParser

MAX_LOGPROBS = 20

router = APIRouter()


class Reading:
    """One answer as text and calls, while it grows."""

    def __init__(self, parser: ToolParser | None) -> None:
        self._parser = parser
        self.events: list[Event] = []
        self.has_calls = False

    @property
    def finished(self) -> bool:
        """Whether the one call that was wanted is there, and the rest does not matter."""
        return self._parser is not None and self._parser.finished

    def take(self, text: str, *, is_last: bool) -> list[Event]:
        if self._parser is None:
            fresh: list[Event] = [TextDelta(text)] if text else []
        else:
            fresh = self._parser.push(text) + (self._parser.finish() if is_last else [])
        self.events += fresh
        self.has_calls = self.has_calls or any(isinstance(event, ToolCallStart) for event in fresh)
        return fresh


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes choices as this route's documents: messages, or the pieces that they grow by."""

    call: Context
    body: ChatRequest
    readings: Sequence[Reading]

    def head(self, kind: str) -> Document:
        return {
            "id": f"chatcmpl-{self.call.request_id}",
            "object": kind,
            "created": self.call.created_s,
            "model": self.call.service.model,
        }

    def write_piece(self, choice: Choice) -> list[Document]:
        first, answer = not choice.num_tokens, choice.answer
        events = self.read(choice)
        if not (events or first or answer.finished or self.body.logprobs or self.body.return_token_ids):
            return []
        delta = piece(events)
        if first:
            delta = {"role": "assistant", **({"content": ""} if not events else {}), **delta}
        return [self.finish(choice, {"index": choice.index, "delta": delta})]

    def write_message(self, choice: Choice) -> Document:
        self.read(choice)
        parsed = collect_events(self.readings[choice.index].events)
        message: Document = {"role": "assistant", "content": parsed.content, "refusal": None}
        if parsed.calls:
            message["content"] = parsed.content or None
            message["tool_calls"] = [
                {"id": made.id, "type": "function", "function": {"name": made.name, "arguments": made.arguments}}
                for made in parsed.calls
            ]
        return self.finish(choice, {"index": choice.index, "message": message})

    def read(self, choice: Choice) -> list[Event]:
        """What is new, as text and calls. An answer whose one call is there is ended."""
        reading = self.readings[choice.index]
        events = reading.take(choice.take_text(), is_last=choice.answer.finished)
        if reading.finished and not choice.answer.finished:
            self.call.service.client.abort(choice.exchange.requests[choice.answer.index].id)
        return events

    def finish(self, choice: Choice, document: Document) -> Document:
        """What pieces and whole messages have beside their text."""
        body, answer, start = self.body, choice.answer, choice.num_tokens
        document["logprobs"] = None
        if body.logprobs:
            positions, tokenizer = (answer.logprobs or ())[start:], self.call.service.tokenizer
            document["logprobs"] = chat_logprobs(positions, body.top_logprobs or 0, tokenizer)
        has_called = self.readings[choice.index].has_calls and answer.finish_reason in ("stop", "abort")
        document["finish_reason"] = "tool_calls" if has_called else finish_reason(answer)
        if answer.finished:
            document["stop_reason"] = answer.stop_reason
        if body.return_token_ids:
            document["token_ids"] = answer.token_ids[start:]
        if body.prompt_logprobs is not None and not start:
            document["prompt_logprobs"] = prompt_logprobs(choice.exchange.output, body.prompt_logprobs)
        choice.settle()
        return document


def piece(events: Sequence[Event]) -> Document:
    """Events as a delta: text, and calls that begin or go on."""
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    calls: dict[int, Document] = {}
    for event in events:
        match event:
            case ToolCallStart(index, call_id, name):
                calls[index] = {
                    "index": index,
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                }
            case ArgumentsDelta(index, more):
                known = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                known["function"]["arguments"] += more
    delta: Document = {"content": text} if text else {}
    return {**delta, "tool_calls": list(calls.values())} if calls else delta


@router.post("/v1/chat/completions", responses=answers(ChatCompletion, stream=True))
async def create_chat_completion(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation."""
    call = context(request)
    call.check_model(body.model)
    prompt = await read_inquiry(body).prepare(call.service)
    params = sampling(body, call.service.ready.sampling, prompt.demands())
    exchange = await prompt.open(call, params, body.priority or 0)
    readings = [Reading(prompt.parser()) for _ in exchange.requests]
    writer, service = Writer(call, body, readings), call.service
    if body.stream:
        head = writer.head("chat.completion.chunk")
        events = stream_choices(service, [exchange], head, writer.write_piece, body.stream_options)
        return EventStream(call.guard(events), call.headers())
    choices = choices_of([exchange])
    await while_connected(request.receive, follow(service, exchange, choices, writer))
    documents = [writer.write_message(choice) for choice in choices]
    document = {**writer.head("chat.completion"), "choices": documents, "usage": usage([exchange])}
    if body.return_token_ids:
        document["prompt_token_ids"] = exchange.output.prompt_token_ids
    return JSON(document, headers=call.headers())


async def follow(service: Service, exchange: OutputProcessor, choices: Sequence[Choice], writer: Writer) -> None:
    """Run to the end, reading along: an answer may be over before the model stops."""
    async for _ in service.answer([exchange]):
        check(exchange)
        for choice in choices:
            writer.read(choice)


def read_inquiry(body: ChatRequest) -> Inquiry:
    tools = parse_tools(body.tools)
    choice = parse_tool_choice(body.tool_choice, tools, body.parallel_tool_calls)
    return Inquiry(
        messages=body.messages,
        tools=tools,
        choice=choice,
        structure=body.structure(),
        template=body.chat_template,
        add_generation_prompt=body.add_generation_prompt is not False,
        extra=body.chat_template_kwargs,
    )


def sampling(body: ChatRequest, defaults: Mapping[str, Any], demands: Mapping[str, Any]) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidParams("top_logprobs needs logprobs to be true.", "top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise InvalidParams(
            f"top_logprobs is {body.top_logprobs}; give a whole number from 0 to {MAX_LOGPROBS}.", "top_logprobs"
        )
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise InvalidParams("max_tokens and max_completion_tokens differ; give max_completion_tokens alone.")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return body.sampling(defaults, **{"max_tokens": max_tokens, "logprobs": logprobs, **demands})
