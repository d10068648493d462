"""POST /v1/completions: text in, text out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.core.outputs import PositionLogprobs
from quire.core.params import SamplingParams
from quire.errors import InvalidParams
from quire.server.context import Context, context
from quire.server.documents import Completion, answers
from quire.server.openai.bodies import completion_logprobs, finish_reason, prompt_logprobs, usage
from quire.server.openai.choices import Choice, Document, check, choices_of, stream_choices
from quire.server.openai.fields import CompletionRequest
from quire.server.stream import JSON, EventStream, while_connected
from quire.text.detokenizer import Detokenizer, PromptText, TokenOffsets
from quire.text.output_processor import OutputProcessor

MAX_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 16

router = APIRouter()


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes choices as this route's documents."""

    call: Context
    body: CompletionRequest
    prompts: Mapping[OutputProcessor, PromptText] = field(default_factory=dict)  # those that are echoed
    offsets: dict[int, TokenOffsets] = field(default_factory=dict)  # of each choice's tokens

    def head(self) -> Document:
        return {
            "id": f"cmpl-{self.call.request_id}",
            "object": "text_completion",
            "created": self.call.created_s,
            "model": self.call.service.model,
        }

    def write(self, choice: Choice) -> list[Document]:
        """What has not been written of an answer; nothing while no character of it is complete."""
        body, answer, first = self.body, choice.answer, not choice.num_tokens
        text = choice.take_text()
        prompt = self.prompts[choice.exchange].text if first and body.echo else ""
        if not (text or prompt or answer.finished or body.logprobs is not None or body.return_token_ids):
            return []
        document: Document = {
            "index": choice.index,
            "text": prompt + text,
            "logprobs": None if body.logprobs is None else self.logprobs(choice, body.logprobs),
            "finish_reason": finish_reason(answer),
            "stop_reason": answer.stop_reason,
        }
        if body.return_token_ids:
            document["token_ids"] = answer.token_ids[choice.num_tokens :]
            document["prompt_token_ids"] = choice.exchange.output.prompt_token_ids if first else None
        if body.prompt_logprobs is not None and first:
            document["prompt_logprobs"] = prompt_logprobs(choice.exchange.output, body.prompt_logprobs)
        choice.settle()
        return [document]

    def logprobs(self, choice: Choice, num_top: int) -> Document:
        """Of the tokens that have not been written, and of an echoed prompt's before the first of them."""
        output, answer, start = choice.exchange.output, choice.answer, choice.num_tokens
        prompt = self.prompts.get(choice.exchange)
        tokens = answer.token_ids[start:]
        positions: list[PositionLogprobs | None] = list((answer.logprobs or ())[start:])
        offsets = self.answer_offsets(choice, tokens)
        if prompt is not None and not start:
            scored = output.prompt_logprobs or []  # fewer than the prompt's tokens if it was aborted
            tokens = [*output.prompt_token_ids[: len(scored)], *tokens]
            positions = [*scored, *positions]
            offsets = [*prompt.offsets[: len(scored)], *offsets]
        return completion_logprobs(tokens, positions, offsets, num_top, self.call.service.tokenizer)

    def answer_offsets(self, choice: Choice, tokens: list[int]) -> list[int]:
        """Where tokens of the answer begin. A stop string is left out of the text, but its tokens are there."""
        prompt = self.prompts.get(choice.exchange)
        begin = len(prompt.text) if prompt is not None else 0
        if choice.index not in self.offsets:
            skips = choice.exchange.requests[0].params.skip_special_tokens
            detokenizer = Detokenizer(self.call.service.tokenizer, skip_special_tokens=skips, continues=True)
            self.offsets[choice.index] = TokenOffsets(detokenizer, begin)
        offsets = self.offsets[choice.index].push(tokens)
        end = begin + len(choice.answer.text)
        return [min(offset, end) for offset in offsets] if choice.answer.finished else offsets


@router.post("/v1/completions", responses=answers(Completion, stream=True))
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continue one or more prompts."""
    call = context(request)
    call.check_model(body.model)
    exchanges, writer = await open_call(call, body)
    service = call.service
    if body.stream:
        events = stream_choices(service, exchanges, writer.head(), writer.write, body.stream_options)
        return EventStream(call.guard(events), call.headers())
    await while_connected(request.receive, service.complete(exchanges))
    for exchange in exchanges:
        check(exchange)
    choices = [document for choice in choices_of(exchanges) for document in writer.write(choice)]
    return JSON({**writer.head(), "choices": choices, "usage": usage(exchanges)}, headers=call.headers())


async def open_call(call: Context, body: CompletionRequest) -> tuple[list[OutputProcessor], Writer]:
    """An exchange for each prompt, and what writes their answers."""
    params = sampling(body, call.service.ready.sampling)
    await call.prepare(params)
    prompts, gate = body.prompts(call.service.config.max_prompts), call.service.gate
    gate.check(len(prompts) * params.n, 0)
    exchanges = []
    for prompt in prompts:
        given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        exchanges.append(await call.service.open(given, params, call.caller, call.new_id(), body.priority or 0))
    gate.check(len(prompts) * params.n, sum(len(exchange.output.prompt_token_ids) for exchange in exchanges))
    located = {exchange: await call.service.locate_prompt(exchange) for exchange in exchanges} if body.echo else {}
    return exchanges, Writer(call, body, located)


def sampling(body: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise InvalidParams(f"logprobs is {body.logprobs}; give a whole number from 0 to {MAX_LOGPROBS}.", "logprobs")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidParams(
            f"best_of is {body.best_of} and n is {body.n or 1}; quire returns all answers it makes.", "best_of"
        )
    scored = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        scored = max(scored or 0, body.logprobs)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return body.sampling(defaults, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=scored)
