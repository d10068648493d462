"""Whether the server lives, whether it can take work, whether it really produces tokens; and the metrics' page."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from quire.core.params import SamplingParams
from quire.errors import NotReady
from quire.server.context import context
from quire.server.documents import Status, answers, only_text
from quire.server.front import Front
from quire.server.openai.choices import check
from quire.server.stream import JSON, while_connected

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=answers(Status))
async def health() -> Response:
    """This process answers."""
    return JSON({"status": "ok"})


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses=answers(Status))
async def ready(request: Request) -> Response:
    """New requests would be taken and computed now."""
    front: Front = request.app.state.front
    service = front.service
    if service is None:
        raise NotReady("The model is being loaded.")
    if service.gate.draining:
        raise NotReady("The server is shutting down.")
    if not service.client.health():
        raise NotReady("The engine is being started again; requests wait for it.")
    return JSON({"status": "ready", "model": service.model})


@router.get("/health/generate", responses=answers(Status))
async def generate(request: Request) -> Response:
    """A token was produced just now, by way of the whole engine."""
    call = context(request)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    exchange = await call.service.open({"prompt_token_ids": [0]}, params, call.caller, call.new_id())
    await while_connected(request.receive, call.service.complete([exchange]))
    check(exchange)
    return JSON({"status": "ok", "token_ids": exchange.output.outputs[0].token_ids})


@router.get("/metrics", response_class=Response, responses=only_text("text/plain"))
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    return Response(context(request).service.metrics.page(), media_type=CONTENT_TYPE_LATEST)
