"""Errors as Anthropic's clients expect them."""

from __future__ import annotations

from typing import Any

from quire.errors import InvalidRequest, QuireError
from quire.server.problems import STYLES

KINDS = {
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


def anthropic_problem(error: QuireError) -> dict[str, Any]:
    fallback = "invalid_request_error" if isinstance(error, InvalidRequest) else "api_error"
    return {"type": "error", "error": {"type": KINDS.get(error.status, fallback), "message": str(error)}}


STYLES.append(("/v1/messages", anthropic_problem))
