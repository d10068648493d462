"""/v1/messages: Anthropic's Messages API, and the count of a prompt's tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.errors import QuireError
from quire.server.anthropic.draft import Draft
from quire.server.anthropic.fields import CountRequest, MessagesRequest
from quire.server.anthropic.inquiries import make_inquiry
from quire.server.context import Context, context
from quire.server.conversation import narrate
from quire.server.documents import AnthropicError, AnthropicMessage, TokenCount, answers
from quire.server.service import Service
from quire.server.stream import JSON, EventStream, while_connected
from quire.text.output_processor import OutputProcessor
from quire.text.tools.parser import ToolParser

router = APIRouter()


@dataclass(frozen=True, slots=True)
class Answering:
    """One message being made: its exchange runs while its events are read."""

    service: Service
    exchange: OutputProcessor
    parser: ToolParser | None
    draft: Draft

    async def events(self) -> AsyncGenerator[list[bytes], None]:
        yield self.draft.begin()
        async with aclosing(narrate(self.service, self.exchange, self.parser)) as news:
            async for pieces in news:
                if written := self.draft.write(pieces):
                    yield written
        yield self.draft.end()

    async def send(self) -> AsyncGenerator[bytes, None]:
        """The events as they go to a client; if something fails, a last one says why."""
        try:
            async with aclosing(self.events()) as events:
                async for written in events:
                    yield b"".join(written)
        except QuireError as error:
            yield b"".join(self.draft.fail(error))

    async def drain(self) -> None:
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass


@router.post("/v1/messages", responses=answers(AnthropicMessage, error=AnthropicError, stream=True))
async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Answer a conversation."""
    call = context(request)
    call.check_model(body.model)
    answering = await prepare(call, body)
    if body.stream:
        return EventStream(answering.send(), headers_of(call))
    await while_connected(request.receive, answering.drain())
    return JSON(answering.draft.document, headers=headers_of(call))


@router.post("/v1/messages/count_tokens", responses=answers(TokenCount, error=AnthropicError))
async def count_tokens(request: Request, body: CountRequest) -> Response:
    """How many tokens a prompt has, its tools with it."""
    call = context(request)
    call.check_model(body.model)
    prompt = await make_inquiry(body).prepare(call.service)
    tokens = await call.service.encode(await prompt.render(), add_special_tokens=False)
    return JSON({"input_tokens": len(tokens)}, headers=headers_of(call))


async def prepare(call: Context, body: MessagesRequest) -> Answering:
    prompt = await make_inquiry(body).prepare(call.service)
    params = body.sampling(call.service.ready.sampling, **prompt.demands())
    exchange = await prompt.open(call, params, body.priority or 0)
    return Answering(call.service, exchange, prompt.parser(), Draft(call.service.model, exchange))


def headers_of(call: Context) -> dict[str, str]:
    """Anthropic's clients look for the id under another name."""
    return {**call.headers(), "request-id": call.request_id}
