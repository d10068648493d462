"""/v1/responses/{id}: what can be done with a response once it has been asked for. Each caller sees its own only."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from quire.errors import InvalidParams, show
from quire.server.context import context
from quire.server.documents import DeletedResponse, ItemList, ResponseDocument, answers
from quire.server.openai.responses_running import stop
from quire.server.openai.responses_store import ResponseStore, Shelf
from quire.server.stream import JSON, EventStream

router = APIRouter()


@router.get("/v1/responses/{response_id}", responses=answers(ResponseDocument, stream=True))
async def fetch_response(
    request: Request, response_id: str, stream: bool = False, starting_after: Annotated[int | None, Query(ge=0)] = None
) -> Response:
    """A response as it is now, or its events from one on."""
    record = shelf_of(request).find(response_id)
    if not stream:
        return JSON(record.draft.document)
    if record.log is None:
        raise InvalidParams("stream: events are kept only of responses that were made with both background and stream.")
    return EventStream(record.follow(0 if starting_after is None else starting_after + 1))


@router.post("/v1/responses/{response_id}/cancel", responses=answers(ResponseDocument))
async def cancel_response(request: Request, response_id: str) -> Response:
    """End a response that runs in the background; one that has ended stays as it is."""
    record = shelf_of(request).find(response_id)
    if record.task is None:
        raise InvalidParams("Only responses made with background can be cancelled; others end when their client goes.")
    await stop(record)
    return JSON(record.draft.document)


@router.delete("/v1/responses/{response_id}", responses=answers(DeletedResponse))
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a response; if it still runs in the background, it ends."""
    shelf = shelf_of(request)
    await stop(shelf.find(response_id))
    shelf.drop(response_id, "it was deleted")
    return JSON({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items", responses=answers(ItemList))
async def list_input_items(
    request: Request,
    response_id: str,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """What a response was made from, with the items of the responses that it goes on from."""
    items = list(shelf_of(request).find(response_id).items)
    if order == "desc":
        items.reverse()
    if after is not None:
        place = next((index for index, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise InvalidParams(f"after is {show(after)}, which is no item of this response.", "after")
        items = items[place + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"] if page else "", "last_id": page[-1]["id"] if page else ""}
    return JSON({"object": "list", "data": page, "has_more": len(items) > limit, **ends})


def shelf_of(request: Request) -> Shelf:
    store: ResponseStore = request.app.state.responses
    return store.shelf(context(request).caller.tenant)
