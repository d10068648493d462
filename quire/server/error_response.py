"""Error responses in the form of each API: status, headers and body of a `QuireError`.

The path of a request decides its API. Paths that no other API has get OpenAI's form.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from quire.errors import (
    DeadlineExceeded,
    EngineClosed,
    EngineError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    QuireError,
    RequestTimeout,
    Unauthorized,
)
from quire.server.streaming import JSONResponse

TGI_PATHS = frozenset({"/", "/generate", "/generate_stream", "/info", "/chat_tokenize"})
OPENAI_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
OPENAI_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class IncompleteGeneration(EngineError):
    """An answer was aborted before it was complete. Only TGI's routes report this as an error."""


def error_response(error: QuireError, path: str) -> Response:
    """The response to a request for `path` that failed."""
    headers = error_headers(error)
    if is_under(path, "/v1/messages"):
        return JSONResponse(anthropic_error(error), error.status, headers)
    if any(is_under(path, tgi_path) for tgi_path in TGI_PATHS):
        return JSONResponse(tgi_error(error), tgi_status(error), headers)
    return JSONResponse(openai_error(error), error.status, headers)


def is_under(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix + "/")


def error_headers(error: QuireError) -> dict[str, str]:
    if isinstance(error, Overloaded):
        return {"retry-after": str(error.retry_after_s)}
    if isinstance(error, Unauthorized):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, RequestTimeout):
        return {"connection": "close"}
    return {}


def openai_error(error: QuireError) -> dict[str, Any]:
    is_clients = isinstance(error, InvalidRequest) or (error.status < 500 and error.status not in OPENAI_TYPES)
    kind = "invalid_request_error" if is_clients else OPENAI_TYPES.get(error.status, "server_error")
    param = getattr(error, "param", None)
    code = "model_not_found" if isinstance(error, ModelNotFound) else OPENAI_CODES.get(error.status)
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def anthropic_error(error: QuireError) -> dict[str, Any]:
    fallback = "invalid_request_error" if isinstance(error, InvalidRequest) else "api_error"
    return {"type": "error", "error": {"type": ANTHROPIC_TYPES.get(error.status, fallback), "message": str(error)}}


def tgi_error(error: QuireError) -> dict[str, Any]:
    if isinstance(error, IncompleteGeneration | DeadlineExceeded | EngineClosed):
        kind = "incomplete_generation"
    elif error.status in (429, 503):
        kind = "overloaded"
    else:
        kind = "generation" if error.status >= 500 else "validation"
    return {"error": str(error), "error_type": kind}


def tgi_status(error: QuireError) -> int:
    """TGI has its own statuses for bad fields (422) and for failures of the model (424)."""
    if error.status == 400:
        return 422
    if isinstance(error, EngineError) and error.status == 500 and not isinstance(error, IncompleteGeneration):
        return 424
    return error.status
