"""GET /console/live, /console/requests/ID and /console/cache. docs/live.md describes them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.live_changes import CacheDescription
from quire.errors import InvalidParams, RequestNotFound, show
from quire.server.console.documents import Document
from quire.server.router import Router
from quire.server.schemas import CacheTree, LifeList, response_schemas, text_schema
from quire.server.service import RequestContext, Service, request_context
from quire.server.streaming import JSON_LINES, EventStreamResponse, JSONResponse

MAX_TEXT_CHARS = 200

router = Router()


def visible_tenant(context: RequestContext) -> str | None:
    """The tenant whose requests the caller may see. None: there are no keys, so it may see all."""
    return context.tenant.name or None


@router.get("/console/live", responses=text_schema(JSON_LINES))
async def live(request: Request) -> Response:
    """What happens in the engines, as lines of JSON."""
    context = request_context(request)
    service = context.service
    return EventStreamResponse(service.live.watch(service.model, visible_tenant(context)), media_type=JSON_LINES)


@router.get("/console/requests/{request_id}", responses=response_schemas(LifeList))
async def read_lives(request: Request, request_id: str) -> Response:
    """What has happened to a request. `request_id` is its id, or the x-request-id of its HTTP request."""
    context = request_context(request)
    found = context.service.live.lives.find(request_id, visible_tenant(context))
    if not found:
        raise RequestNotFound(
            f"There is no record of the request {show(request_id)}. The last requests are recorded while somebody "
            "reads /console/live; open it first."
        )
    return JSONResponse({"requests": found})


@router.get("/console/cache", responses=response_schemas(CacheTree))
async def read_cache(request: Request, replica: int = 0) -> Response:
    """The prefix tree of an engine."""
    context = request_context(request)
    service = context.service
    num_replicas = len(service.live.mirrors)
    if not 0 <= replica < num_replicas:
        raise InvalidParams(f"replica is {replica}; this server has {num_replicas}, counted from 0.", "replica")
    tenant = visible_tenant(context)
    described = await service.live.describe_cache(replica, None if tenant is None else context.tenant.salt)
    texts = await read_texts(service, described)
    return JSONResponse(cache_document(described, texts, replica, context.tenant.name))


async def read_texts(service: Service, described: CacheDescription) -> list[str]:
    """The beginning of each node's text."""

    def decode() -> list[str]:
        return [service.tokenizer.decode(node.first_tokens)[:MAX_TEXT_CHARS] for node in described.nodes]

    return await service.run_text_work(sum(len(node.first_tokens) for node in described.nodes), decode)


def cache_document(described: CacheDescription, texts: list[str], replica: int, tenant: str) -> Document:
    return {
        "replica": replica,
        "block_size": described.block_size,
        "num_blocks": described.num_blocks,
        "num_cached_blocks": described.num_cached_blocks,
        "num_free_blocks": described.num_free_blocks,
        "prompt_tokens": described.num_prompt_tokens,
        "cached_tokens": described.num_cached_tokens,
        "evicted_blocks": described.num_evicted,
        "tenants": [
            {
                "own": root.is_shown,
                "tenant": tenant if root.is_shown else None,
                "blocks": root.num_blocks,
                "hits": root.num_hits,
            }
            for root in described.roots
        ],
        "nodes": [
            {
                "node": index,
                "parent": node.parent,
                "blocks": node.num_blocks,
                "tokens": node.num_tokens,
                "text": text,
                "hits": node.num_hits,
                "requests": node.requests,
                "in_use": bool(node.requests),
            }
            for index, (node, text) in enumerate(zip(described.nodes, texts, strict=True))
        ],
        "num_hidden": described.num_hidden_blocks,
    }
