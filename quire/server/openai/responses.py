"""POST /v1/responses: a conversation in, a response out, at once, as a stream or in the background."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.core.params import SamplingParams
from quire.errors import InvalidParams
from quire.server.context import Context, context
from quire.server.conversation import Inquiry
from quire.server.documents import ResponseDocument, answers
from quire.server.openai.responses_draft import Draft
from quire.server.openai.responses_fields import ResponsesRequest
from quire.server.openai.responses_items import as_document, as_messages, new_id
from quire.server.openai.responses_running import Answering
from quire.server.openai.responses_store import Record, Shelf
from quire.server.openai.responses_stored import shelf_of
from quire.server.stream import JSON, EventStream, while_connected
from quire.text.tools.definitions import Tool, parse_tool_choice, parse_tools

Document = dict[str, Any]

router = APIRouter()


@router.post("/v1/responses", responses=answers(ResponseDocument, stream=True))
async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Answer a conversation, or go on with one."""
    call = context(request)
    call.check_model(body.model)
    body.check()
    answering = await prepare(call, body, shelf_of(request))
    record, headers = answering.record, call.headers()
    if body.background:
        answering.run_aside()
        return EventStream(record.follow(), headers) if body.stream else JSON(record.draft.document, headers=headers)
    if body.stream:
        return EventStream(answering.send(), headers)
    await while_connected(request.receive, answering.drain())
    if record.draft.error is not None:
        raise record.draft.error
    return JSON(record.draft.document, headers=headers)


async def prepare(call: Context, body: ResponsesRequest, shelf: Shelf) -> Answering:
    tools = parse_tools(body.tools, strict=True)
    choice = parse_tool_choice(body.tool_choice, tools, body.parallel_tool_calls)
    if body.with_logprobs and choice.mode != "none":
        raise InvalidParams(
            "include holds message.output_text.logprobs, and tools may be called; quire gives log probabilities of "
            "answers without tools only. Leave out one of them, or set tool_choice to 'none'."
        )
    items = [*earlier_items(body, shelf), *(as_document(item) for item in body.input)]
    inquiry = Inquiry(
        messages=as_messages(items, body.instructions),
        tools=tools,
        choice=choice,
        structure=body.text_format().structure(),
    )
    prompt = await inquiry.prepare(call.service)
    params = body.sampling(call.service.ready.sampling, **prompt.demands())
    exchange = await prompt.open(call, params, body.priority or 0)
    draft = Draft(new_document(call, body, tools, params))
    record = Record(draft, items, log=[] if body.background and body.stream else None)
    return Answering(
        call.service,
        exchange,
        prompt.parser(),
        record,
        shelf if body.stored else None,
        num_top=body.top_logprobs or 0,
    )


def earlier_items(body: ResponsesRequest, shelf: Shelf) -> list[Document]:
    """The conversation up to and with the response that this one goes on from."""
    if body.previous_response_id is None:
        return []
    record = shelf.find(body.previous_response_id)
    status = record.draft.document["status"]
    if status not in ("completed", "incomplete"):
        raise InvalidParams(f"previous_response_id: that response is {status}; go on from one that has been answered.")
    return [*record.items, *record.draft.document["output"]]


def new_document(call: Context, body: ResponsesRequest, tools: tuple[Tool, ...], params: SamplingParams) -> Document:
    document: Document = {
        "id": new_id("resp"),
        "object": "response",
        "created_at": call.created_s,
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": call.service.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
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
