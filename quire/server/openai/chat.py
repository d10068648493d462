"""POST /v1/chat/completions: messages in, the next message out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.core.params import SamplingParams
from quire.errors import InvalidParams
from quire.server.chat import ChatInput, ChatParser
from quire.server.openai.output import (
    Delta,
    Document,
    chat_logprobs,
    list_choices,
    prompt_logprobs,
    stream_choices,
    usage,
)
from quire.server.openai.protocol import MAX_LOGPROBS, ChatCompletionRequest
from quire.server.router import Router
from quire.server.schemas import ChatCompletion, response_schemas
from quire.server.service import RequestContext, request_context
from quire.server.streaming import EventStreamResponse, JSONResponse, with_cancellation
from quire.text.output_processor import OutputProcessor
from quire.text.tools.definitions import parse_tool_choice, parse_tools
from quire.text.tools.events import ArgumentsDelta, Event, ReasoningDelta, TextDelta, ToolCallStart, collect_events

router = Router()


@router.post("/v1/chat/completions", responses=response_schemas(ChatCompletion, stream=True))
async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Answer a conversation."""
    context = request_context(request, body.model)
    service = context.service
    prompt = await service.templates.prepare(chat_input(body))
    params = sampling_params(body, service.ready.sampling, prompt.sampling_params())
    output_processor = await service.open_chat(prompt, params, context, body.priority or 0)
    writer = ChatWriter(context, body, [prompt.parser() for _ in output_processor.output.outputs])
    if body.stream:
        head = writer.head("chat.completion.chunk")
        events = stream_choices(service, [output_processor], head, writer.write_chunk, body.stream_options)
        return EventStreamResponse(events)
    choices = list_choices([output_processor])
    await with_cancellation(request.receive, service.complete([output_processor]))
    written = (choice.write(writer.write_message) for choice in choices)
    documents = [document for document in written if document is not None]  # a beam search may find fewer than n
    document = {**writer.head("chat.completion"), "choices": documents, "usage": usage([output_processor])}
    if body.return_token_ids:
        document["prompt_token_ids"] = output_processor.output.prompt_token_ids
    return JSONResponse(document)


def chat_input(body: ChatCompletionRequest) -> ChatInput:
    tools = parse_tools(body.tools)
    return ChatInput(
        messages=body.messages,
        tools=tools,
        tool_choice=parse_tool_choice(body.tool_choice, tools, body.parallel_tool_calls),
        structured_outputs=body.structured(),
        chat_template=body.chat_template,
        add_generation_prompt=body.add_generation_prompt is not False,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning_effort,
    )


def sampling_params(
    body: ChatCompletionRequest, defaults: Mapping[str, Any], overrides: Mapping[str, Any]
) -> SamplingParams:
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
    prediction = body.prediction.text if body.prediction is not None else None
    given = {"max_tokens": max_tokens, "logprobs": logprobs, "prediction": prediction}
    return body.sampling_params(defaults, **{**given, **overrides})


@dataclass(frozen=True, slots=True)
class ChatWriter:
    """Writes choices as messages, or as the chunks of a stream. Each choice has a parser."""

    context: RequestContext
    body: ChatCompletionRequest
    parsers: Sequence[ChatParser]

    def head(self, kind: str) -> Document:
        return {
            "id": f"chatcmpl-{self.context.request_id}",
            "object": kind,
            "created": self.context.created_s,
            "model": self.context.service.model,
        }

    def write_chunk(self, delta: Delta) -> Document | None:
        events = self.parse(delta.index, delta.output_processor)
        body = self.body
        if not (events or delta.is_first or delta.finish_reason or body.logprobs or body.return_token_ids):
            return None
        fields = chunk_fields(events)
        if delta.is_first:
            fields = {"role": "assistant", **({"content": ""} if not events else {}), **fields}
        return self.add_details(delta, {"index": delta.index, "delta": fields})

    def write_message(self, delta: Delta) -> Document:
        self.parse(delta.index, delta.output_processor)
        parsed = collect_events(self.parsers[delta.index].events)
        message: Document = {"role": "assistant", "content": parsed.content, "refusal": None}
        if parsed.reasoning:
            message["content"], message["reasoning_content"] = parsed.content or None, parsed.reasoning
        if parsed.calls:
            message["content"] = parsed.content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in parsed.calls
            ]
        return self.add_details(delta, {"index": delta.index, "message": message})

    def parse(self, index: int, output_processor: OutputProcessor) -> list[Event]:
        """New text and tool calls of an answer."""
        parser, answer = self.parsers[index], output_processor.output.outputs[index]
        return parser.push(answer.text, is_last=answer.finish_reason is not None)

    def add_details(self, delta: Delta, document: Document) -> Document:
        """Add what chunks and messages have beside their text."""
        body, answer = self.body, delta.answer
        document["logprobs"] = None
        if body.logprobs:
            tokenizer = self.context.service.tokenizer
            document["logprobs"] = chat_logprobs(delta.logprobs, body.top_logprobs or 0, tokenizer)
        has_called = self.parsers[delta.index].has_calls and answer.finish_reason in ("stop", "abort")
        document["finish_reason"] = "tool_calls" if has_called else delta.finish_reason
        if delta.finish_reason:
            document["stop_reason"] = answer.stop_reason
        if body.return_token_ids:
            document["token_ids"] = delta.token_ids
        if body.prompt_logprobs is not None and delta.is_first:
            document["prompt_logprobs"] = prompt_logprobs(delta.output_processor.output, body.prompt_logprobs)
        return document


def chunk_fields(events: Sequence[Event]) -> Document:
    """The `delta` of a chunk: reasoning, text, and tool calls that begin or grow."""
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
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
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += more
    fields: Document = {"reasoning_content": reasoning} if reasoning else {}
    fields |= {"content": text} if text else {}
    return {**fields, "tool_calls": list(calls.values())} if calls else fields
