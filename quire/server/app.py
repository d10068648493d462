"""The application: its routes and exception handlers. `main.py` runs it."""

from __future__ import annotations

import asyncio
from functools import cache

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match

from quire.errors import QuireError
from quire.server import health, replicas, tokenize
from quire.server.anthropic import messages
from quire.server.auth import ApiKeys
from quire.server.config import ServerConfig
from quire.server.console import page, planning
from quire.server.console import routes as console
from quire.server.error_response import error_response
from quire.server.metrics import Metrics
from quire.server.middleware import RequestMiddleware
from quire.server.openai import chat, completions, models
from quire.server.openai.responses import routes as responses
from quire.server.openai.responses.store import ResponseStore
from quire.server.openapi import Document, describe
from quire.server.router import Operation
from quire.server.streaming import ClientDisconnected, JSONResponse
from quire.server.tgi import routes as tgi

ROUTERS = (
    health.router,
    replicas.router,
    models.router,
    completions.router,
    chat.router,
    responses.router,
    messages.router,
    tokenize.router,
    tgi.router,
)
CONSOLE_ROUTERS = (console.router, page.router, planning.router)


def build_app(config: ServerConfig, keys: ApiKeys, metrics: Metrics) -> RequestMiddleware:
    routes: list[BaseRoute] = [*operations(config.console), Operation("GET", "/openapi.json", show_openapi, None)]
    handlers = {
        QuireError: handle_quire_error,
        HTTPException: handle_http_exception,
        ClientDisconnected: handle_disconnect,
        Exception: handle_exception,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    middleware = RequestMiddleware(app, config, keys, metrics)
    app.state.responses = ResponseStore()
    app.state.console_files = page.load_files()
    app.state.simulating = asyncio.Semaphore(1)  # one of the console's simulations at a time
    app.state.middleware = middleware
    app.state.has_console = config.console
    return middleware


def operations(has_console: bool = True) -> list[Operation]:
    routers = (*ROUTERS, *CONSOLE_ROUTERS) if has_console else ROUTERS
    return [operation for router in routers for operation in router.routes]


async def show_openapi(request: Request) -> Response:
    """GET /openapi.json: every route with its fields."""
    return JSONResponse(openapi_document(request.app.state.has_console))


@cache
def openapi_document(has_console: bool) -> Document:
    return describe(operations(has_console))


async def handle_quire_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, QuireError)
    return error_response(error, request.url.path)


async def handle_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    own = QuireError(f"{request.method} {request.url.path}: {error.detail}.")
    own.status = error.status_code
    response = error_response(own, request.url.path)
    if error.status_code == 405:
        response.headers["allow"] = ", ".join(sorted(allowed_methods(request)))
    return response


def allowed_methods(request: Request) -> set[str]:
    """The methods of all routes with the path of a request. Each method has a route of its own."""
    routes = (each for each in request.app.routes if isinstance(each, Operation))
    return {each.method for each in routes if each.matches(request.scope)[0] is not Match.NONE}


async def handle_exception(request: Request, error: Exception) -> Response:
    """A bug in quire. The middleware logs it."""
    own = QuireError("quire failed on this request; the server's log says why.")
    return error_response(own, request.url.path)


async def handle_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
