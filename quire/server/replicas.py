"""GET /replicas and /replicas/receipts/ID: what the router of several engines knows, and why it chose as it did."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.fleet import Fleet
from quire.errors import ReceiptNotFound, show
from quire.server.router import Router
from quire.server.schemas import ReceiptList, ReplicaList, response_schemas
from quire.server.service import request_context
from quire.server.streaming import JSONResponse

router = Router()


@router.get("/replicas", responses=response_schemas(ReplicaList))
async def list_replicas(request: Request) -> Response:
    """The replicas, their load and the blocks in their prefix caches."""
    client = request_context(request).service.client
    if not isinstance(client, Fleet):
        return JSONResponse({"replicas": [{"replica": 0, "ready": client.health()}]})
    return JSONResponse({"replicas": client.describe()})


@router.get("/replicas/receipts/{request_id}", responses=response_schemas(ReceiptList))
async def read_receipts(request: Request, request_id: str) -> Response:
    """Why the requests of a recent HTTP request went to their replicas. `request_id` is its x-request-id."""
    context = request_context(request)
    client = context.service.client
    found = client.receipts(request_id, context.tenant.salt) if isinstance(client, Fleet) else []
    if not found:
        raise ReceiptNotFound(
            f"There is no receipt for the request {show(request_id)}; they are kept for the last requests of a server "
            "with several replicas."
        )
    return JSONResponse({"receipts": found})
