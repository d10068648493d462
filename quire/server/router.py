"""Router: routes whose JSON bodies and query parameters are checked by pydantic. `openapi.py` describes them.

A route is `async def name(request, ...) -> Response`. Of its other parameters, one that the path names is a part of the
path, one that is a `BaseModel` is the body, and the rest are query parameters with their defaults.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from quire.errors import InvalidField
from quire.server.request_model import check_text, explain_validation_error
from quire.server.schemas import Responses

Endpoint = Callable[..., Awaitable[Response]]


class Operation(Route):
    """One method of one path."""

    def __init__(self, method: str, path: str, function: Endpoint, responses: Responses | None) -> None:
        """Without `responses` the route is not in the OpenAPI document."""
        super().__init__(path, self._respond, methods=[method])
        self.methods = {method}  # Starlette adds HEAD to GET
        self.method = method
        self.function = function
        self.responses = responses
        hints = get_type_hints(function, include_extras=True)
        given = [each for each in inspect.signature(function).parameters.values() if hints[each.name] is not Request]
        self._takes_request = len(given) < len(inspect.signature(function).parameters)
        self.path_names = [each.name for each in given if each.name in self.param_convertors]
        bodies = [each.name for each in given if is_model(hints[each.name])]
        assert len(bodies) <= 1, function
        self._body_name = bodies[0] if bodies else ""
        self.body: type[BaseModel] | None = hints[self._body_name] if bodies else None
        rest = [each for each in given if each.name not in (*self.path_names, *bodies)]
        fields: dict[str, Any] = {each.name: (hints[each.name], each.default) for each in rest}
        config = ConfigDict(protected_namespaces=())
        self.query: type[BaseModel] | None = create_model("Query", __config__=config, **fields) if fields else None

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        return match, {**child_scope, "route": self}  # the access log and the metrics read it

    async def _respond(self, request: Request) -> Response:
        await check_text(request)
        arguments: dict[str, Any] = {name: request.path_params[name] for name in self.path_names}
        if self._takes_request:
            arguments["request"] = request
        if self.body is not None:
            arguments[self._body_name] = validate(self.body, await read_json(request), "body")
        if self.query is not None:
            query = validate(self.query, dict(request.query_params), "query")
            arguments.update({name: getattr(query, name) for name in self.query.model_fields})
        return await self.function(**arguments)


class Router:
    """Routes of one module. Its methods are decorators."""

    def __init__(self) -> None:
        self.routes: list[Operation] = []

    def get(self, path: str, responses: Responses | None = None) -> Callable[[Endpoint], Endpoint]:
        return self._add("GET", path, responses)

    def head(self, path: str) -> Callable[[Endpoint], Endpoint]:
        return self._add("HEAD", path, None)

    def post(self, path: str, responses: Responses | None = None) -> Callable[[Endpoint], Endpoint]:
        return self._add("POST", path, responses)

    def delete(self, path: str, responses: Responses | None = None) -> Callable[[Endpoint], Endpoint]:
        return self._add("DELETE", path, responses)

    def _add(self, method: str, path: str, responses: Responses | None) -> Callable[[Endpoint], Endpoint]:
        def decorate(function: Endpoint) -> Endpoint:
            self.routes.append(Operation(method, path, function, responses))
            return function

        return decorate


def is_model(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)


async def read_json(request: Request) -> object:
    """The body, or None if it is not JSON by its content type: browsers send such bodies from any page."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        return None
    body = await request.body()
    try:
        return json.loads(body) if body else None
    except json.JSONDecodeError as error:
        reason = error.msg
    except UnicodeDecodeError:
        reason = "it is not UTF-8"
    except (ValueError, RecursionError):
        reason = "it is nested too deep, or has a number with too many digits"
    raise InvalidField(f"The body is not JSON: {reason}.", "body")


def validate(model: type[BaseModel], value: object, place: str) -> BaseModel:
    """`place` is where the value comes from: body or query."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        errors: Sequence[Any] = [{**each, "loc": (place, *each["loc"])} for each in error.errors()]
        raise explain_validation_error(errors, value) from None
