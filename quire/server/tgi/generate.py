"""POST /generate, /generate_stream and /: text in, text out, as TGI does it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.errors import QuireError
from quire.server.context import Context, context
from quire.server.documents import GeneratedText, TGIError, answers, only_text
from quire.server.openai.choices import check
from quire.server.stream import JSON, EventStream, event, while_connected
from quire.server.tgi.bodies import Writer, best_of
from quire.server.tgi.fields import AnyRequest, GenerateRequest
from quire.server.tgi.problems import tgi_problem
from quire.server.tgi.timing import Timing, base_headers
from quire.text.output_processor import OutputProcessor

router = APIRouter()


@router.post("/generate", responses=answers(GeneratedText, error=TGIError))
async def generate(request: Request, body: GenerateRequest) -> Response:
    """Continue a text."""
    return await answer_whole(request, body, in_list=False)


@router.post("/generate_stream", response_class=Response, responses=only_text("text/event-stream", error=TGIError))
async def generate_stream(request: Request, body: GenerateRequest) -> Response:
    """Continue a text, an event for each token."""
    return await answer_stream(request, body)


@router.post("/", responses=answers(list[GeneratedText], error=TGIError, stream=True))
async def generate_either(request: Request, body: AnyRequest) -> Response:
    """Continue a text: at once, in a list of one, or an event for each token."""
    if body.stream:
        return await answer_stream(request, body)
    return await answer_whole(request, body, in_list=True)


async def answer_whole(request: Request, body: GenerateRequest, *, in_list: bool) -> Response:
    call, timing = context(request), Timing()
    exchange = await open_exchange(call, body, stream=False)
    timing.checked()
    await while_connected(request.receive, complete(call, exchange, timing))
    check(exchange)
    best = best_of(exchange)
    document = Writer(exchange, body.inputs, body.parameters, call.service.tokenizer).response(best)
    headers = timing.headers(call, body.inputs, exchange, len(best.token_ids))
    return JSON([document] if in_list else document, headers=headers)


async def answer_stream(request: Request, body: GenerateRequest) -> Response:
    """The answer begins with its first event, so that whatever fails before it still has a status of its own."""
    call = context(request)
    exchange = await open_exchange(call, body, stream=True)
    events = write_events(call, body, exchange)
    first = await while_connected(request.receive, anext(events))
    return EventStream(go_on(first, events), base_headers(call, body.inputs))


async def open_exchange(call: Context, body: GenerateRequest, *, stream: bool) -> OutputProcessor:
    parameters, service = body.parameters, call.service
    parameters.check(stream=stream)
    if parameters.truncate is None:
        tokens = await service.encode_prompt(body.inputs)
    else:
        tokens = (await service.encode(body.inputs))[-parameters.truncate :]
    params = parameters.sampling(service.ready.sampling, stream=stream, room=service.ready.max_len - len(tokens))
    await call.prepare(params)
    prompt = {"prompt": body.inputs, "prompt_token_ids": tokens}
    return await service.open(prompt, params, call.caller, call.new_id())


async def complete(call: Context, exchange: OutputProcessor, timing: Timing) -> None:
    async for _ in call.service.answer([exchange]):
        timing.grown()


async def write_events(call: Context, body: GenerateRequest, exchange: OutputProcessor) -> AsyncGenerator[bytes, None]:
    """What each step brought, in one piece."""
    writer = Writer(exchange, body.inputs, body.parameters, call.service.tokenizer)
    async for _ in call.service.answer([exchange]):
        check(exchange)
        documents = writer.events(exchange.output.outputs[0])
        if documents:
            yield b"".join(map(event, documents))


async def go_on(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The first event and those after it; if one of them fails, a last one that says why."""
    try:
        yield first
        async for data in events:
            yield data
    except QuireError as error:
        yield event(tgi_problem(error))
    finally:
        await events.aclose()
