"""GET /replicas and /replicas/receipts/ID: what the router of several engines knows, and why it chose as it did.

POST /replicas/N/drain and /replicas/N/undrain, for operators: take a replica out of use, and back.
"""

from __future__ import annotations

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.fleet import Fleet
from quire.errors import Forbidden, InvalidParams, ReceiptNotFound, show
from quire.server.request_model import RequestModel
from quire.server.router import Router
from quire.server.schemas import Drained, ReceiptList, ReplicaList, response_schemas
from quire.server.service import request_context
from quire.server.streaming import JSONResponse

router = Router()


class NoFields(RequestModel):
    """An empty JSON object. A web page of another origin cannot send JSON, so it cannot drain a replica."""


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


@router.post("/replicas/{replica}/drain", responses=response_schemas(Drained))
async def drain_replica(request: Request, replica: str, body: NoFields) -> Response:
    """Give a replica no more requests, and move those that it has to the others. Answers when all have moved."""
    fleet = operated_fleet(request)
    report = await fleet.drain(replica_number(replica))
    return JSONResponse({**asdict(report), "reasons": dict(report.reasons)})


@router.post("/replicas/{replica}/undrain", responses=response_schemas(ReplicaList))
async def undrain_replica(request: Request, replica: str, body: NoFields) -> Response:
    """Give a replica requests again."""
    fleet = operated_fleet(request)
    fleet.undrain(replica_number(replica))
    return JSONResponse({"replicas": fleet.describe()})


def operated_fleet(request: Request) -> Fleet:
    """The replicas, for a caller who may operate them."""
    context = request_context(request)
    client = context.service.client
    if not context.tenant.is_operator:
        raise Forbidden(
            f"The key of {context.tenant.name!r} is not an operator's. Start the server with --operators "
            f"{context.tenant.name} to let it drain replicas."
        )
    if not isinstance(client, Fleet):
        raise InvalidParams("This server has one engine, and its requests can go nowhere else; see --replicas.")
    return client


def replica_number(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise InvalidParams(f"{show(text)} is no replica; give its number, as GET /replicas has it.")
    return int(text)
