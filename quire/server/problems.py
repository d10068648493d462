"""Errors as clients of each API expect them: a status, headers, and a body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from quire.errors import InvalidRequest, ModelNotFound, Overloaded, QuireError, RequestTimeout, Unauthorized
from quire.server.stream import JSON

KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


def openai_problem(error: QuireError) -> dict[str, Any]:
    is_clients = isinstance(error, InvalidRequest) or (error.status < 500 and error.status not in KINDS)
    kind = "invalid_request_error" if is_clients else KINDS.get(error.status, "server_error")
    param = getattr(error, "param", None)
    code = "model_not_found" if isinstance(error, ModelNotFound) else CODES.get(error.status)
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


# The first whose prefix fits a path writes the body; OpenAI's way is what the rest of the world expects.
STYLES: list[tuple[str, Callable[[QuireError], dict[str, Any]]]] = []
# The same for an API whose statuses are not the errors' own.
STATUSES: list[tuple[str, Callable[[QuireError], int]]] = []


def make_body(error: QuireError, path: str) -> dict[str, Any]:
    for prefix, style in STYLES:
        if is_under(path, prefix):
            return style(error)
    return openai_problem(error)


def status_of(error: QuireError, path: str) -> int:
    for prefix, choose in STATUSES:
        if is_under(path, prefix):
            return choose(error)
    return error.status


def is_under(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix + "/")


def headers_of(error: QuireError) -> dict[str, str]:
    if isinstance(error, Overloaded):
        return {"retry-after": str(error.retry_after_s)}
    if isinstance(error, Unauthorized):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, RequestTimeout):
        return {"connection": "close"}
    return {}


async def respond(error: QuireError, scope: Scope, receive: Receive, send: Send) -> None:
    path = scope["path"]
    response = JSON(make_body(error, path), status_of(error, path), headers_of(error))
    await response(scope, receive, send)
