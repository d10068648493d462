"""POST /v1/completions: text in, text out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.core.outputs import PositionLogprobs
from quire.core.params import SamplingParams
from quire.errors import InvalidParams
from quire.server.openai.output import (
    Delta,
    Document,
    completion_logprobs,
    list_choices,
    prompt_logprobs,
    stream_choices,
    usage,
)
from quire.server.openai.protocol import MAX_LOGPROBS, CompletionRequest
from quire.server.router import Router
from quire.server.schemas import Completion, response_schemas
from quire.server.service import RequestContext, request_context
from quire.server.streaming import EventStreamResponse, JSONResponse, with_cancellation
from quire.text.detokenizer import Detokenizer, PromptText, TokenOffsets
from quire.text.output_processor import OutputProcessor

DEFAULT_MAX_TOKENS = 16

router = Router()


@router.post("/v1/completions", responses=response_schemas(Completion, stream=True))
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continue one or more prompts."""
    context = request_context(request, body.model)
    output_processors, writer = await open_prompts(context, body)
    service = context.service
    if body.stream:
        events = stream_choices(service, output_processors, writer.head(), writer.write, body.stream_options)
        return EventStreamResponse(events)
    await with_cancellation(request.receive, service.complete(output_processors))
    # A beam search may find fewer answers than n.
    written = (choice.write(writer.write) for choice in list_choices(output_processors))
    choices = [document for document in written if document is not None]
    return JSONResponse({**writer.head(), "choices": choices, "usage": usage(output_processors)})


async def open_prompts(
    context: RequestContext, body: CompletionRequest
) -> tuple[list[OutputProcessor], CompletionWriter]:
    """An OutputProcessor for each prompt, and the writer of their answers."""
    service = context.service
    params = sampling_params(body, service.ready.sampling)
    await service.check_grammar(params)
    prompts, admission = body.prompts(service.config.max_prompts), service.admission
    admission.check(len(prompts) * params.num_sequences, 0)
    output_processors = []
    for prompt in prompts:
        given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        output_processors.append(await service.open(given, params, context, body.priority or 0))
    num_tokens = sum(len(processor.output.prompt_token_ids) for processor in output_processors)
    admission.check(len(prompts) * params.num_sequences, num_tokens)
    echoed = output_processors if body.echo else []
    located = {processor: await service.locate_prompt(processor) for processor in echoed}
    return output_processors, CompletionWriter(context, body, located)


def sampling_params(body: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise InvalidParams(f"logprobs is {body.logprobs}; give a whole number from 0 to {MAX_LOGPROBS}.", "logprobs")
    scored = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        scored = max(scored or 0, body.logprobs)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return body.sampling_params(defaults, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=scored)


@dataclass(frozen=True, slots=True)
class CompletionWriter:
    """Writes choices as completions, whole or chunk by chunk."""

    context: RequestContext
    body: CompletionRequest
    prompts: Mapping[OutputProcessor, PromptText] = field(default_factory=dict)  # those that are echoed
    offsets: dict[int, TokenOffsets] = field(default_factory=dict)  # of the tokens of each choice

    def head(self) -> Document:
        return {
            "id": f"cmpl-{self.context.request_id}",
            "object": "text_completion",
            "created": self.context.created_s,
            "model": self.context.service.model,
        }

    def write(self, delta: Delta) -> Document | None:
        """The document of a delta; none while no character of it is complete."""
        body, output, first = self.body, delta.output_processor.output, delta.is_first
        prompt = self.prompts[delta.output_processor].text if first and body.echo else ""
        has_details = body.logprobs is not None or body.return_token_ids
        if not (delta.text or prompt or delta.finish_reason or has_details):
            return None
        document: Document = {
            "index": delta.index,
            "text": prompt + delta.text,
            "logprobs": None if body.logprobs is None else self.logprobs(delta, body.logprobs),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.answer.stop_reason,
        }
        if body.return_token_ids:
            document["token_ids"] = delta.token_ids
            document["prompt_token_ids"] = output.prompt_token_ids if first else None
        if body.prompt_logprobs is not None and first:
            document["prompt_logprobs"] = prompt_logprobs(output, body.prompt_logprobs)
        return document

    def logprobs(self, delta: Delta, num_top: int) -> Document:
        """Of the tokens of a delta, and in the first of them also of the echoed prompt."""
        output, tokens = delta.output_processor.output, delta.token_ids
        prompt = self.prompts.get(delta.output_processor)
        positions: list[PositionLogprobs | None] = list(delta.logprobs)
        offsets = self.answer_offsets(delta)
        if prompt is not None and delta.is_first:
            scored = output.prompt_logprobs or []  # fewer than the prompt's tokens if it was aborted
            tokens = [*output.prompt_token_ids[: len(scored)], *tokens]
            positions = [*scored, *positions]
            offsets = [*prompt.offsets[: len(scored)], *offsets]
        return completion_logprobs(tokens, positions, offsets, num_top, self.context.service.tokenizer)

    def answer_offsets(self, delta: Delta) -> list[int]:
        """Where the tokens of a delta begin. The text leaves out a stop string, but its tokens are there."""
        prompt = self.prompts.get(delta.output_processor)
        begin = len(prompt.text) if prompt is not None else 0
        if delta.index not in self.offsets:
            skips = delta.output_processor.requests[0].params.skip_special_tokens
            detokenizer = Detokenizer(self.context.service.tokenizer, skip_special_tokens=skips, continues=True)
            self.offsets[delta.index] = TokenOffsets(detokenizer, begin)
        offsets = self.offsets[delta.index].push(delta.token_ids)
        end = begin + len(delta.answer.text)
        return [min(offset, end) for offset in offsets] if delta.finish_reason else offsets
