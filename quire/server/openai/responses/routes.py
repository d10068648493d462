"""/v1/responses: create a response (whole, as a stream or in the background), and fetch, cancel or delete a stored one.

A tenant sees its own responses only.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from quire.core.params import SamplingParams
from quire.errors import InvalidParams, show
from quire.server.chat import ChatInput
from quire.server.openai.responses.builder import ResponseBuilder
from quire.server.openai.responses.generation import ResponseGeneration, cancel
from quire.server.openai.responses.protocol import ResponsesRequest, as_document, as_messages, new_id
from quire.server.openai.responses.store import ResponseStore, StoredResponse, TenantResponses
from quire.server.router import Router
from quire.server.schemas import DeletedResponse, ItemList, ResponseDocument, response_schemas
from quire.server.service import RequestContext, request_context
from quire.server.streaming import EventStreamResponse, JSONResponse, with_cancellation
from quire.text.tools.definitions import Tool, parse_tool_choice, parse_tools

Document = dict[str, Any]

router = Router()


@router.post("/v1/responses", responses=response_schemas(ResponseDocument, stream=True))
async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Answer a conversation, or continue a stored one."""
    context = request_context(request, body.model)
    body.check()
    generation = await prepare(context, body, tenant_responses(request))
    stored = generation.stored
    if body.background:
        generation.run_in_background()
        return EventStreamResponse(stored.stream()) if body.stream else JSONResponse(stored.document)
    if body.stream:
        return EventStreamResponse(generation.stream())
    await with_cancellation(request.receive, generation.run())
    if stored.builder.error is not None:
        raise stored.builder.error
    return JSONResponse(stored.document)


async def prepare(context: RequestContext, body: ResponsesRequest, responses: TenantResponses) -> ResponseGeneration:
    tools = parse_tools(body.tools, strict=True)
    choice = parse_tool_choice(body.tool_choice, tools, body.parallel_tool_calls)
    if body.with_logprobs and choice.mode != "none":
        raise InvalidParams(
            "include holds message.output_text.logprobs, and tools may be called; quire gives log probabilities of "
            "answers without tools only. Leave out one of them, or set tool_choice to 'none'."
        )
    items = [*earlier_items(body, responses), *(as_document(item) for item in body.input)]
    chat = ChatInput(
        messages=as_messages(items, body.instructions),
        tools=tools,
        tool_choice=choice,
        structured_outputs=body.text_format().structured(),
        reasoning_effort=body.effort,
    )
    prompt = await context.service.templates.prepare(chat)
    params = body.sampling_params(context.service.ready.sampling, **prompt.sampling_params())
    output_processor = await context.service.open_chat(prompt, params, context, body.priority or 0)
    builder = ResponseBuilder(new_document(context, body, tools, params))
    stored = StoredResponse(builder, items, events=[] if body.background and body.stream else None)
    return ResponseGeneration(
        context.service,
        output_processor,
        prompt.parser(),
        stored,
        responses if body.stored else None,
        num_top=body.top_logprobs or 0,
    )


def earlier_items(body: ResponsesRequest, responses: TenantResponses) -> list[Document]:
    """The items of the previous response: its input and its output."""
    if body.previous_response_id is None:
        return []
    stored = responses.find(body.previous_response_id)
    status = stored.document["status"]
    if status not in ("completed", "incomplete"):
        raise InvalidParams(
            f"previous_response_id: that response is {status}; continue one that is completed or incomplete."
        )
    return [*stored.items, *stored.document["output"]]


def new_document(
    context: RequestContext, body: ResponsesRequest, tools: tuple[Tool, ...], params: SamplingParams
) -> Document:
    document: Document = {
        "id": new_id("resp"),
        "object": "response",
        "created_at": context.created_s,
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": context.service.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.effort, "summary": None},
        "store": body.stored,
        "temperature": params.temperature,
        "text": {"format": body.text_format().document()},
        "tool_choice": body.tool_choice or "auto",
        "tools": [tool_document(tool) for tool in tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
    }
    return document if body.user is None else {**document, "user": body.user}


def tool_document(tool: Tool) -> Document:
    own = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", **own, "strict": tool.strict}


@router.get("/v1/responses/{response_id}", responses=response_schemas(ResponseDocument, stream=True))
async def fetch_response(
    request: Request, response_id: str, stream: bool = False, starting_after: Annotated[int | None, Field(ge=0)] = None
) -> Response:
    """The current state of a response, or its events after `starting_after`."""
    stored = tenant_responses(request).find(response_id)
    if not stream:
        return JSONResponse(stored.document)
    if stored.events is None:
        raise InvalidParams("stream: events are kept only of responses that were made with both background and stream.")
    return EventStreamResponse(stored.stream(0 if starting_after is None else starting_after + 1))


@router.post("/v1/responses/{response_id}/cancel", responses=response_schemas(ResponseDocument))
async def cancel_response(request: Request, response_id: str) -> Response:
    """Cancel a response that runs in the background. One that has ended does not change."""
    stored = tenant_responses(request).find(response_id)
    if stored.task is None:
        raise InvalidParams(
            "Only responses made with background can be cancelled; others end when their client disconnects."
        )
    await cancel(stored)
    return JSONResponse(stored.document)


@router.delete("/v1/responses/{response_id}", responses=response_schemas(DeletedResponse))
async def delete_response(request: Request, response_id: str) -> Response:
    """Delete a response. One that runs in the background is cancelled."""
    responses = tenant_responses(request)
    await cancel(responses.find(response_id))
    responses.remove(response_id, "it was deleted")
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items", responses=response_schemas(ItemList))
async def list_input_items(
    request: Request,
    response_id: str,
    limit: Annotated[int, Field(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """The input of a response, with the items of the responses before it."""
    items = list(tenant_responses(request).find(response_id).items)
    if order == "desc":
        items.reverse()
    if after is not None:
        found = next((index for index, item in enumerate(items) if item["id"] == after), None)
        if found is None:
            raise InvalidParams(f"after is {show(after)}, which is no item of this response.", "after")
        items = items[found + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"] if page else "", "last_id": page[-1]["id"] if page else ""}
    return JSONResponse({"object": "list", "data": page, "has_more": len(items) > limit, **ends})


def tenant_responses(request: Request) -> TenantResponses:
    store: ResponseStore = request.app.state.responses
    return store.for_tenant(request_context(request).tenant.name)
