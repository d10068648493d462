"""GET /info and GET /: what this server is."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire import __version__
from quire.core.params import MAX_STOP_STRINGS
from quire.server.context import context
from quire.server.documents import ServerInfo, TGIError, TGIInfo, answers
from quire.server.stream import JSON
from quire.server.tgi.fields import MAX_BEST_OF

router = APIRouter()


@router.get("/info", responses=answers(TGIInfo, error=TGIError))
async def info(request: Request) -> Response:
    """The model and the limits, under TGI's names. What quire has no such thing as is null."""
    service = context(request).service
    return JSON(
        {
            "model_id": service.model,
            "model_sha": None,
            "model_pipeline_tag": "text-generation",
            "model_device_type": service.ready.device,
            "max_concurrent_requests": service.gate.max_requests,
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


@router.get("/", responses=answers(ServerInfo, error=TGIError))
async def root(request: Request) -> Response:
    """Whom one has reached."""
    service = context(request).service
    return JSON({"server": "quire", "version": __version__, "model": service.model, "api": "/openapi.json"})
