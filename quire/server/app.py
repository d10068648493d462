"""The application: its routes and exception handlers. `main.py` runs it."""

from __future__ import annotations

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route

from quire import __version__
from quire.errors import QuireError
from quire.server import health, replicas, tokenize
from quire.server.anthropic import messages
from quire.server.auth import ApiKeys
from quire.server.config import ServerConfig
from quire.server.error_response import error_response
from quire.server.metrics import Metrics
from quire.server.middleware import RequestMiddleware
from quire.server.openai import chat, completions, models
from quire.server.openai.responses import routes as responses
from quire.server.openai.responses.store import ResponseStore
from quire.server.request_model import check_text, explain_validation_error
from quire.server.streaming import ClientDisconnected
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


def build_app(config: ServerConfig, keys: ApiKeys, metrics: Metrics) -> RequestMiddleware:
    app = FastAPI(title="quire", version=__version__, docs_url=None, redoc_url=None, dependencies=[Depends(check_text)])
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(QuireError, handle_quire_error)
    app.add_exception_handler(RequestValidationError, handle_validation_error)
    app.add_exception_handler(HTTPException, handle_http_exception)
    app.add_exception_handler(ClientDisconnected, handle_disconnect)
    app.add_exception_handler(Exception, handle_exception)
    middleware = RequestMiddleware(app, config, keys, metrics)
    app.state.responses = ResponseStore()
    app.state.middleware = middleware
    return middleware


async def handle_quire_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, QuireError)
    return error_response(error, request.url.path)


async def handle_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(explain_validation_error(error.errors(), error.body), request.url.path)


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
    routes = (route for router in ROUTERS for route in router.routes if isinstance(route, Route))
    return {
        method
        for route in routes
        if route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }


async def handle_exception(request: Request, error: Exception) -> Response:
    """A bug in quire. The middleware logs it."""
    own = QuireError("quire failed on this request; the server's log says why.")
    return error_response(own, request.url.path)


async def handle_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
