"""POST /v1/completions: text in, text out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.core.params import SamplingParams
from quire.errors import InvalidParams
from quire.server.context import Context, context
from quire.server.documents import Completion, answers
from quire.server.openai.bodies import completion_logprobs, finish_reason, prompt_logprobs, usage
from quire.server.openai.choices import Choice, Document, check, choices_of, stream_choices
from quire.server.openai.fields import CompletionRequest
from quire.server.stream import JSON, EventStream, while_connected
from quire.text.exchange import Exchange

MAX_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 16

router = APIRouter()


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes choices as this route's documents."""

    call: Context
    body: CompletionRequest

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
        position = choice.num_chars
        text = choice.take_text()
        prompt = self.prompt_text(choice.exchange) if first and body.echo else ""
        if not (text or prompt or answer.finished or body.logprobs is not None or body.return_token_ids):
            return []
        document: Document = {
            "index": choice.index,
            "text": prompt + text,
            "logprobs": self.logprobs(choice, position, with_prompt=bool(prompt)),
            "finish_reason": finish_reason(answer),
            "stop_reason": answer.stop_reason,
        }
        if body.return_token_ids:
            document["token_ids"] = answer.token_ids[choice.num_tokens :]
            document["prompt_token_ids"] = choice.exchange.output.prompt_token_ids if first else None
        if body.prompt_logprobs is not None and first:
            document["prompt_logprobs"] = prompt_logprobs(choice.exchange.output)
        choice.settle()
        return [document]

    def prompt_text(self, exchange: Exchange) -> str:
        text = exchange.output.prompt
        return text if text is not None else self.call.service.tokenizer.decode(exchange.output.prompt_token_ids)

    def logprobs(self, choice: Choice, position: int, *, with_prompt: bool) -> Document | None:
        if self.body.logprobs is None:
            return None
        positions: list[Any] = list((choice.answer.logprobs or ())[choice.num_tokens :])
        if with_prompt:
            positions = [*(choice.exchange.output.prompt_logprobs or ()), *positions]
        return completion_logprobs(positions, self.body.logprobs, position)


@router.post("/v1/completions", responses=answers(Completion, stream=True))
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continue one or more prompts."""
    call = context(request)
    call.check_model(body.model)
    exchanges = await open_exchanges(call, body)
    writer, service = Writer(call, body), call.service
    if body.stream:
        events = stream_choices(service, exchanges, writer.head(), writer.write, body.stream_options)
        return EventStream(call.guard(events), call.headers())
    await while_connected(request.receive, service.complete(exchanges))
    for exchange in exchanges:
        check(exchange)
    choices = [document for choice in choices_of(exchanges) for document in writer.write(choice)]
    return JSON({**writer.head(), "choices": choices, "usage": usage(exchanges)}, headers=call.headers())


async def open_exchanges(call: Context, body: CompletionRequest) -> list[Exchange]:
    params = sampling(body)
    await call.prepare(params)
    prompts, gate = body.prompts(call.service.config.max_prompts), call.service.gate
    gate.check(len(prompts) * params.n, 0)
    exchanges = []
    for prompt in prompts:
        given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        exchanges.append(await call.service.open(given, params, call.caller, call.new_id(), body.priority))
    gate.check(len(prompts) * params.n, sum(len(exchange.output.prompt_token_ids) for exchange in exchanges))
    return exchanges


def sampling(body: CompletionRequest) -> SamplingParams:
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise InvalidParams(f"logprobs is {body.logprobs}; give a whole number from 0 to {MAX_LOGPROBS}.", "logprobs")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidParams(
            f"best_of is {body.best_of} and n is {body.n or 1}; quire returns all answers it makes.", "best_of"
        )
    scored = body.prompt_logprobs
    if body.echo and scored is None:
        scored = body.logprobs
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return body.sampling(max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=scored)
