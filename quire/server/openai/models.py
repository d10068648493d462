"""GET /v1/models: the one model that is served."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.server.router import Router
from quire.server.schemas import ModelCard, ModelList, response_schemas
from quire.server.service import RequestContext, request_context
from quire.server.streaming import JSONResponse

router = Router()


@router.get("/v1/models", responses=response_schemas(ModelList))
async def list_models(request: Request) -> Response:
    """List the models."""
    return JSONResponse({"object": "list", "data": [card(request_context(request))]})


@router.get("/v1/models/{model:path}", responses=response_schemas(ModelCard))
async def show_model(request: Request, model: str) -> Response:
    """One model."""
    return JSONResponse(card(request_context(request, model)))


def card(context: RequestContext) -> dict[str, Any]:
    service = context.service
    return {
        "id": service.model,
        "object": "model",
        "created": service.created_s,
        "owned_by": "quire",
        "max_model_len": service.ready.max_len,
    }
