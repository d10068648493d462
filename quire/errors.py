"""Every error quire raises on purpose.

Each class has the HTTP status of the server's response. Each message says what happened, with the number and the limit
where there is one, and what to do. `assert` is for our own invariants; errors that a user, a file or a peer can cause
are raised from here.

    QuireError
    ├── InvalidRequest            400   the request is wrong; other requests are not affected
    │   ├── InvalidParams               a value out of its range
    │   ├── InvalidField                a field of an HTTP request that is missing, unknown or of the wrong type
    │   ├── UnknownField                a field that quire does not have
    │   ├── EmptyPrompt
    │   ├── PromptTooLong               prompt plus max_tokens do not fit the context or the cache
    │   ├── BadGrammar                  a schema, pattern or grammar that is unsupported or over its bounds
    │   └── TemplateError               a chat template that is broken, missing or over its bounds
    ├── ModelError                500   the model cannot be used
    │   ├── ModelNotFound         404
    │   ├── BadModelFile                truncated, malicious or otherwise unreadable
    │   ├── WeightMismatch              tensors missing, left over or of the wrong shape
    │   └── UnsupportedModel            a family, a type or an option that quire does not have
    ├── PullError                 502   a download failed; what was fetched is kept and resumed
    │   ├── ChecksumMismatch
    │   └── DiskFull              507
    ├── EngineError               500   the engine failed, not the request
    │   ├── NotEnoughMemory       503
    │   ├── DeviceLost            503   the GPU failed; only a new process can use it again
    │   │   └── RankLost                one of the processes that compute a model together ended
    │   └── EngineClosed          503
    └── ServerError               503   the server does not take the request now, or from this caller
        ├── Overloaded            429   the queue is full; has a Retry-After
        ├── ShuttingDown          503
        ├── NotReady              503   the model is being loaded, or the engine restarted
        ├── DeadlineExceeded      504
        ├── BodyTooLarge          413
        ├── HeadersTooLarge       431
        ├── RequestTimeout        408   the client did not send all of its request in time
        ├── TooManyConnections    503
        ├── NoProfile             503   the costs of the engine's steps have not been measured
        ├── ReceiptNotFound       404   no replica's receipt of that request is kept
        ├── RequestNotFound       404   no record of what happened to that request is kept
        ├── ResponseNotFound      404   a stored response that does not exist any more, or never did
        └── Unauthorized          401
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = [
    "BadGrammar",
    "BadModelFile",
    "BodyTooLarge",
    "ChecksumMismatch",
    "DeadlineExceeded",
    "DeviceLost",
    "DiskFull",
    "EmptyPrompt",
    "EngineClosed",
    "EngineError",
    "HeadersTooLarge",
    "InvalidField",
    "InvalidParams",
    "InvalidRequest",
    "ModelError",
    "ModelNotFound",
    "NoProfile",
    "NotEnoughMemory",
    "NotReady",
    "Overloaded",
    "PromptTooLong",
    "PullError",
    "QuireError",
    "RankLost",
    "ReceiptNotFound",
    "RequestNotFound",
    "RequestTimeout",
    "ResponseNotFound",
    "ServerError",
    "ShuttingDown",
    "TemplateError",
    "TooManyConnections",
    "Unauthorized",
    "UnknownField",
    "UnsupportedModel",
    "WeightMismatch",
]


MAX_SHOWN = 100  # characters of a value in a message


def show(value: object) -> str:
    """A value as JSON writes it, for a message."""
    import json  # imported here, as difflib is, because only errors need them

    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def kind(value: object) -> str:
    """The JSON name of a value's type, for a message."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case Mapping():
            return "an object"
        case list() | tuple():
            return "an array"
    return f"a {type(value).__name__}"


class QuireError(Exception):
    """The root of all errors that quire raises on purpose."""

    status = 500


class InvalidRequest(QuireError):
    """The request is wrong; fix it and send it again."""

    status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param  # the parameter or field that is wrong, if it is one


class InvalidParams(InvalidRequest, ValueError):
    """A parameter's value is outside what it may be."""


class InvalidField(InvalidRequest):
    """A field of an HTTP request that is missing or of the wrong type."""


class UnknownField(InvalidRequest, TypeError):
    """A field that quire does not have. It is refused, not ignored."""

    @classmethod
    def check(cls, what: str, given: Iterable[str], known: Iterable[str]) -> None:
        """Raise for the first unknown name, with the closest known one."""
        choices = sorted(known)
        for name in given:
            if name not in choices:
                import difflib

                close = difflib.get_close_matches(name, choices, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(choices)}."
                raise cls(f"{what} has no field {name!r}: {hint}")


class EmptyPrompt(InvalidRequest, ValueError):
    """A prompt without tokens."""


class PromptTooLong(InvalidRequest, ValueError):
    """Prompt and requested tokens do not fit into the model's context or into the cache."""


class BadGrammar(InvalidRequest, ValueError):
    """A schema, pattern or grammar for the answer that is wrong, unsupported or too large."""


class TemplateError(InvalidRequest):
    """A chat template that is broken, missing, or that ran past its time or size bound."""


class ModelError(QuireError):
    """The model cannot be used."""


class ModelNotFound(ModelError):
    """No alias, file, directory or hub name of that kind."""

    status = 404


class BadModelFile(ModelError):
    """A model file that is not valid in its format."""


class WeightMismatch(ModelError):
    """The file's tensors do not match the model's configuration."""


class UnsupportedModel(ModelError):
    """A model family, tensor type or option that quire does not have."""


class PullError(QuireError):
    """A download that did not finish. The same command resumes it."""

    status = 502


class ChecksumMismatch(PullError):
    """The downloaded bytes do not have the expected checksum."""


class DiskFull(PullError):
    """No room for the model on the disk."""

    status = 507


class EngineError(QuireError):
    """The engine failed while it worked on a request."""


class NotEnoughMemory(EngineError):
    """The weights, or a cache for even one request, do not fit into memory."""

    status = 503


class DeviceLost(EngineError):
    """The GPU has failed, and this process cannot use it any more; or a rank has ended."""

    status = 503


class RankLost(DeviceLost):
    """One of the processes that compute a model together has ended."""


class EngineClosed(EngineError):
    """The engine has been shut down."""

    status = 503


class ServerError(QuireError):
    """The server does not take the request."""

    status = 503


class Overloaded(ServerError):
    """The queue is full."""

    status = 429

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDown(ServerError):
    """No new requests are taken."""


class NotReady(ServerError):
    """There is no engine yet, or it is being restarted."""


class DeadlineExceeded(ServerError):
    """The request exceeded its deadline."""

    status = 504


class BodyTooLarge(ServerError):
    """The request has more bytes than the server reads."""

    status = 413


class HeadersTooLarge(ServerError):
    """The request's headers have more bytes than the server reads."""

    status = 431


class RequestTimeout(ServerError):
    """The client took too long to send its request."""

    status = 408


class TooManyConnections(ServerError):
    """No file descriptors are left for another connection."""


class NoProfile(ServerError):
    """The costs of the engine's steps have not been measured."""


class ReceiptNotFound(ServerError):
    """No receipt of that request is kept."""

    status = 404


class RequestNotFound(ServerError):
    """No record of what happened to that request is kept."""

    status = 404


class ResponseNotFound(ServerError):
    """This caller has no stored response with that id."""

    status = 404


class Unauthorized(ServerError):
    """The key is missing or wrong."""

    status = 401


def make_error(name: str, message: str) -> QuireError:
    """An error of another process, from the name of its class."""
    kind = globals().get(name, EngineError)
    return kind(message) if isinstance(kind, type) and issubclass(kind, QuireError) else EngineError(message)
