"""The application: routes, and how errors become answers. `main.py` runs it."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from quire import __version__
from quire.errors import InvalidField, InvalidRequest, QuireError
from quire.server import health, tokens
from quire.server.anthropic import messages
from quire.server.body_check import check_text
from quire.server.config import ServerConfig
from quire.server.front import Front
from quire.server.keys import Keys
from quire.server.metrics import Metrics
from quire.server.openai import chat, completions, models, responses, responses_stored
from quire.server.openai.responses_store import ResponseStore
from quire.server.problems import headers_of, make_body, status_of
from quire.server.stream import JSON, ClientGone
from quire.server.tgi import generate, info, tokenize

ROUTERS = (
    health.router,
    models.router,
    completions.router,
    chat.router,
    responses.router,
    responses_stored.router,
    messages.router,
    tokens.router,
    generate.router,
    info.router,
    tokenize.router,
)


def build_app(config: ServerConfig, keys: Keys, metrics: Metrics) -> Front:
    app = FastAPI(title="quire", version=__version__, docs_url=None, redoc_url=None, dependencies=[Depends(check_text)])
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(QuireError, answer_problem)
    app.add_exception_handler(RequestValidationError, answer_bad_fields)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(ClientGone, answer_nobody)
    app.add_exception_handler(Exception, answer_failure)
    wrapped: ASGIApp = app
    if config.cors_origins:
        origins = [origin.strip() for origin in config.cors_origins.split(",")]
        wrapped = CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.state.responses = ResponseStore()
    app.state.front = Front(wrapped, config, keys, metrics)
    front: Front = app.state.front
    return front


async def answer_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, QuireError)
    path = request.url.path
    return JSON(make_body(error, path), status_of(error, path), headers_of(error))


async def answer_bad_fields(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return await answer_problem(request, explain(error.errors()[0]))


async def answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = QuireError(f"{request.method} {request.url.path}: {error.detail}.")
    problem.status = error.status_code
    return await answer_problem(request, problem)


async def answer_failure(request: Request, error: Exception) -> Response:
    """A mistake of ours. `Front` writes it into the log."""
    return await answer_problem(request, QuireError("quire failed on this request; the server's log says why."))


async def answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


def explain(error: dict[str, Any]) -> InvalidRequest:
    """A pydantic error in one sentence that names the field."""
    place = [str(part) for part in error["loc"] if part != "body"]
    name = ".".join(place) or "the body"
    if error["type"] == "extra_forbidden":
        return InvalidField(f"{name}: quire does not know this field, so it would have no effect; leave it out.", name)
    if error["type"] == "json_invalid":
        return InvalidField(f"The body is not JSON: {error.get('ctx', {}).get('error', error['msg'])}.", "body")
    if not place and error["type"] != "missing":
        return InvalidField("The body is not a JSON object; send one, with `Content-Type: application/json`.", "body")
    if error["type"] == "missing":
        return InvalidField(f"{name} is missing; it is required.", name)
    return InvalidField(f"{name}: {error['msg'][0].lower()}{error['msg'][1:]}.", name)
