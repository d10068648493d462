"""GET /v1/models: the one model there is."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.context import Context, context
from quire.server.documents import ModelCard, ModelList, answers
from quire.server.stream import JSON

router = APIRouter()


@router.get("/v1/models", responses=answers(ModelList))
async def list_models(request: Request) -> Response:
    """The models that can be asked."""
    return JSON({"object": "list", "data": [card(context(request))]})


@router.get("/v1/models/{model:path}", responses=answers(ModelCard))
async def show_model(request: Request, model: str) -> Response:
    """One model."""
    call = context(request)
    call.check_model(model)
    return JSON(card(call))


def card(call: Context) -> dict[str, Any]:
    service = call.service
    return {
        "id": service.model,
        "object": "model",
        "created": service.created_s,
        "owned_by": "quire",
        "max_model_len": service.ready.max_len,
    }
