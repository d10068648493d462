"""TGI's routes: POST /generate, /generate_stream and /, GET /info and /."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.core.params import MAX_STOP_STRINGS
from quire.errors import QuireError
from quire.server.error_response import tgi_error
from quire.server.router import Router
from quire.server.schemas import GeneratedText, ServerInfo, TGIError, TGIInfo, response_schemas, text_schema
from quire.server.service import RequestContext, request_context
from quire.server.streaming import EventStreamResponse, JSONResponse, sse_event, with_cancellation
from quire.server.tgi.output import GenerateWriter, best_of
from quire.server.tgi.protocol import MAX_BEST_OF, CompatGenerateRequest, GenerateRequest
from quire.text.output_processor import OutputProcessor

router = Router()


@router.post("/generate", responses=response_schemas(GeneratedText, error=TGIError))
async def generate(request: Request, body: GenerateRequest) -> Response:
    """Continue a text."""
    return await respond_whole(request, body, in_list=False)


@router.post("/generate_stream", responses=text_schema("text/event-stream", error=TGIError))
async def generate_stream(request: Request, body: GenerateRequest) -> Response:
    """Continue a text, with an event for each token."""
    return await respond_stream(request, body)


@router.post("/", responses=response_schemas(list[GeneratedText], error=TGIError, stream=True))
async def generate_either(request: Request, body: CompatGenerateRequest) -> Response:
    """Continue a text. The response is a list of one, or a stream with an event for each token."""
    if body.stream:
        return await respond_stream(request, body)
    return await respond_whole(request, body, in_list=True)


async def respond_whole(request: Request, body: GenerateRequest, *, in_list: bool) -> Response:
    context, timing = request_context(request), Timing()
    output_processor = await open_prompt(context, body, stream=False)
    timing.on_validated()
    await with_cancellation(request.receive, complete(context, output_processor, timing))
    best = best_of(output_processor)
    document = GenerateWriter(output_processor, body.inputs, body.parameters, context.service.tokenizer).response(best)
    headers = timing.headers(context, body.inputs, output_processor, len(best.token_ids))
    return JSONResponse([document] if in_list else document, headers=headers)


async def respond_stream(request: Request, body: GenerateRequest) -> Response:
    """The response starts with the first event. An error before it has a status of its own."""
    context = request_context(request)
    output_processor = await open_prompt(context, body, stream=True)
    events = stream_tokens(context, body, output_processor)
    first = await with_cancellation(request.receive, anext(events))
    return EventStreamResponse(stream_from(first, events), base_headers(context, body.inputs))


async def open_prompt(context: RequestContext, body: GenerateRequest, *, stream: bool) -> OutputProcessor:
    parameters, service = body.parameters, context.service
    parameters.check(stream=stream)
    if parameters.truncate is None:
        tokens = await service.encode_prompt(body.inputs)
    else:
        tokens = (await service.encode(body.inputs))[-parameters.truncate :]
    params = parameters.sampling_params(service.ready.sampling, stream=stream, room=service.ready.max_len - len(tokens))
    await service.check_grammar(params)
    prompt = {"prompt": body.inputs, "prompt_token_ids": tokens}
    return await service.open(prompt, params, context)


async def complete(context: RequestContext, output_processor: OutputProcessor, timing: Timing) -> None:
    async for _ in context.service.generate([output_processor]):
        timing.on_update()


async def stream_tokens(
    context: RequestContext, body: GenerateRequest, output_processor: OutputProcessor
) -> AsyncGenerator[bytes, None]:
    """The events of an answer, those of one step together."""
    writer = GenerateWriter(output_processor, body.inputs, body.parameters, context.service.tokenizer)
    async for _ in context.service.generate([output_processor]):
        documents = writer.events(output_processor.output.outputs[0])
        if documents:
            yield b"".join(map(sse_event, documents))


async def stream_from(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The first event and the rest. An error becomes the last event."""
    try:
        yield first
        async for data in events:
            yield data
    except QuireError as error:
        yield sse_event(tgi_error(error))
    finally:
        await events.aclose()


class Timing:
    """The durations in TGI's x-* headers: in milliseconds, but x-compute-time in seconds.

    The server sees a request start with its first token, so x-queue-time includes the prefill.
    """

    def __init__(self) -> None:
        self._arrival_s = time.monotonic()
        self._validated_s = self._arrival_s
        self._first_token_s: float | None = None

    def on_validated(self) -> None:
        self._validated_s = time.monotonic()

    def on_update(self) -> None:
        if self._first_token_s is None:
            self._first_token_s = time.monotonic()

    def headers(
        self, context: RequestContext, inputs: str, output_processor: OutputProcessor, num_generated: int
    ) -> dict[str, str]:
        """The headers of a complete answer."""
        end_s = time.monotonic()
        first_token_s = end_s if self._first_token_s is None else self._first_token_s
        inference_s = end_s - first_token_s
        times_s = {
            "x-total-time": end_s - self._arrival_s,
            "x-validation-time": self._validated_s - self._arrival_s,
            "x-queue-time": first_token_s - self._validated_s,
            "x-inference-time": inference_s,
            "x-time-per-token": inference_s / max(1, num_generated),
        }
        return {
            **base_headers(context, inputs),
            "x-compute-time": f"{end_s - self._arrival_s:.6f}",
            **{name: str(round(1000 * seconds)) for name, seconds in times_s.items()},
            "x-prompt-tokens": str(len(output_processor.output.prompt_token_ids)),
            "x-generated-tokens": str(num_generated),
        }


def base_headers(context: RequestContext, inputs: str) -> dict[str, str]:
    """Headers that are known before the first token."""
    return {
        "x-compute-type": context.service.ready.device,
        "x-compute-characters": str(len(inputs)),
    }


@router.get("/info", responses=response_schemas(TGIInfo, error=TGIError))
async def info(request: Request) -> Response:
    """The model and the limits under TGI's names. Fields that quire has no value for are null."""
    service = request_context(request).service
    return JSONResponse(
        {
            "model_id": service.model,
            "model_sha": None,
            "model_pipeline_tag": "text-generation",
            "model_device_type": service.ready.device,
            "max_concurrent_requests": service.admission.max_requests,
            "max_best_of": MAX_BEST_OF,
            "max_stop_sequences": MAX_STOP_STRINGS,
            "max_input_tokens": service.ready.max_len - 1,
            "max_total_tokens": service.ready.max_len,
            "max_client_batch_size": service.config.max_prompts,
            "router": "quire",
            "version": __version__,
            "sha": None,
            "docker_label": None,
        }
    )


@router.get("/", responses=response_schemas(ServerInfo, error=TGIError))
async def root(request: Request) -> Response:
    """The name and version of the server."""
    service = request_context(request).service
    return JSONResponse({"server": "quire", "version": __version__, "model": service.model, "api": "/openapi.json"})
