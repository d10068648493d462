"""The application: routes, and how errors become answers. `main.py` runs it."""

from __future__ import annotations

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route

from quire import __version__
from quire.errors import QuireError
from quire.server import health, tokens
from quire.server.anthropic import messages
from quire.server.body_check import check_text
from quire.server.config import ServerConfig
from quire.server.fields import explain
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
    app.state.responses = ResponseStore()
    app.state.front = Front(app, config, keys, metrics)
    front: Front = app.state.front
    return front


async def answer_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, QuireError)
    path = request.url.path
    return JSON(make_body(error, path), status_of(error, path), headers_of(error))


async def answer_bad_fields(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return await answer_problem(request, explain(error.errors(), error.body))


async def answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = QuireError(f"{request.method} {request.url.path}: {error.detail}.")
    problem.status = error.status_code
    answer = await answer_problem(request, problem)
    if error.status_code == 405:
        answer.headers["allow"] = ", ".join(sorted(allowed_methods(request)))
    return answer


def allowed_methods(request: Request) -> set[str]:
    """The methods of all routes of a path: each method has a route of its own."""
    routes = (route for router in ROUTERS for route in router.routes if isinstance(route, Route))
    return {
        method
        for route in routes
        if route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }


async def answer_failure(request: Request, error: Exception) -> Response:
    """A mistake of ours. `Front` writes it into the log."""
    return await answer_problem(request, QuireError("quire failed on this request; the server's log says why."))


async def answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
