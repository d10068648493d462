"""GET /health, /ready, /health/generate and /metrics."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from quire.core.params import SamplingParams
from quire.errors import NotReady
from quire.server.middleware import RequestMiddleware
from quire.server.router import Router
from quire.server.schemas import Status, response_schemas, text_schema
from quire.server.service import request_context
from quire.server.streaming import JSONResponse, with_cancellation

router = Router()


@router.head("/health")
@router.get("/health", responses=response_schemas(Status))
async def health() -> Response:
    """The HTTP process runs."""
    return JSONResponse({"status": "ok"})


@router.head("/ready")
@router.get("/ready", responses=response_schemas(Status))
async def ready(request: Request) -> Response:
    """The server accepts requests and the engine can compute them."""
    middleware: RequestMiddleware = request.app.state.middleware
    service = middleware.service
    if service is None:
        raise NotReady("The model is being loaded.")
    if service.admission.draining:
        raise NotReady("The server is shutting down.")
    if not service.client.health():
        raise NotReady("The engine is being started again; requests wait for it.")
    return JSONResponse({"status": "ready", "model": service.model})


@router.get("/health/generate", responses=response_schemas(Status))
async def generate(request: Request) -> Response:
    """Generate one token with the engine."""
    context = request_context(request)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    output_processor = await context.service.open({"prompt_token_ids": [0]}, params, context)
    await with_cancellation(request.receive, context.service.complete([output_processor]))
    return JSONResponse({"status": "ok", "token_ids": output_processor.output.outputs[0].token_ids})


@router.get("/metrics", responses=text_schema("text/plain"))
async def metrics(request: Request) -> Response:
    """Metrics in the format of Prometheus."""
    return Response(request_context(request).service.metrics.render(), media_type=CONTENT_TYPE_LATEST)
