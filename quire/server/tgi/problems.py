"""Errors as TGI's clients expect them: a text and its type, and statuses of TGI's own where it has some."""

from __future__ import annotations

from typing import Any

from quire.errors import DeadlineExceeded, EngineClosed, EngineError, QuireError
from quire.server.problems import STATUSES, STYLES

PATHS = ("/", "/generate", "/generate_stream", "/info", "/chat_tokenize")


class IncompleteGeneration(EngineError):
    """An answer was ended from outside before it was complete."""


def tgi_problem(error: QuireError) -> dict[str, Any]:
    return {"error": str(error), "error_type": kind_of(error)}


def kind_of(error: QuireError) -> str:
    if isinstance(error, IncompleteGeneration | DeadlineExceeded | EngineClosed):
        return "incomplete_generation"
    if error.status in (429, 503):
        return "overloaded"
    return "generation" if error.status >= 500 else "validation"


def tgi_status(error: QuireError) -> int:
    if error.status == 400:
        return 422
    if isinstance(error, EngineError) and error.status == 500 and not isinstance(error, IncompleteGeneration):
        return 424
    return error.status


STYLES += [(path, tgi_problem) for path in PATHS]
STATUSES += [(path, tgi_status) for path in PATHS]
