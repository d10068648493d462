"""RequestModel: the base of every request body. A field that a body does not declare is refused by name.

`explain_validation_error` turns pydantic's errors into one sentence in terms of JSON. `check_text` refuses text that is
valid in JSON and nowhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from quire.errors import MAX_SHOWN, InvalidField

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
MAX_ERRORS = 100  # to list more would block the event loop
TYPE_NAMES = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "an array",
    "mapping_type": "an object",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "none_required": "null",
    "string_type": "a string",
    "finite_number": "a finite number",
}


Item = TypeVar("Item")
ArrayOf = Annotated[list[Item], Field(fail_fast=True)]  # validation stops at the first error


class RequestModel(BaseModel):
    """A field that is null counts as not given. One that is not declared is refused by name."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict) and None in value.values():
            return {name: given for name, given in value.items() if given is not None}
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _limit_errors(cls, value: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        known = {name for key, field in cls.model_fields.items() for name in (key, field.alias)}
        if isinstance(value, dict) and len(value) > len(known) + MAX_ERRORS:
            unknown = next(key for key in value if key not in known)
            raise PydanticCustomError("extra_forbidden", "{name}", {"name": str(unknown)[:MAX_SHOWN]})
        try:
            return handler(value)
        except ValidationError as error:
            if error.error_count() <= MAX_ERRORS:
                raise
        raise PydanticCustomError("too_many", "more than {most} values are wrong", {"most": MAX_ERRORS})


def explain_validation_error(errors: Sequence[Mapping[str, Any]], body: Any) -> InvalidField:
    """The error that lies deepest in the body: among the types of a union, that is probably the one that was meant."""
    locations = [error_location(error, body) for error in errors]
    location = max(locations, key=len)
    same = [error for error, other in zip(errors, locations, strict=True) if other == location]
    error, name = same[0], ".".join(map(str, location)) or "body"
    match error["type"]:
        case "extra_forbidden":
            name = ".".join([*map(str, location), *filter(None, [error.get("ctx", {}).get("name")])])
            reason = "quire does not know this field, so it would have no effect; leave it out."
            return InvalidField(f"{name}: {reason}", name)
        case "missing" if location:
            return InvalidField(f"{name} is missing; it is required.", name)
    if not location and error["type"] != "too_many":
        return InvalidField("The body is not a JSON object; send one, with `Content-Type: application/json`.", "body")
    wanted = list(dict.fromkeys(TYPE_NAMES[other["type"]] for other in same if other["type"] in TYPE_NAMES))
    if wanted:
        return InvalidField(f"{name}: give {' or '.join(wanted)}.", name)
    return InvalidField(f"{name}: {error['msg'][0].lower()}{error['msg'][1:]}.", name)


def error_location(error: Mapping[str, Any], body: Any) -> list[str | int]:
    """The path of an error in the body. pydantic's path also names types of a union, which are no keys of the body."""
    location: list[str | int] = []
    path = [key for index, key in enumerate(error["loc"]) if index or key not in ("body", "query", "path")]
    for index, key in enumerate(path):
        exists = key in body if isinstance(body, dict) else isinstance(body, list) and isinstance(key, int)
        is_missing = error["type"] == "missing" and index == len(path) - 1
        if not (exists or is_missing or error["loc"][0] in ("query", "path")):
            continue
        location.append(key)
        if exists:
            body = body[key]
    return location


async def check_text(request: Request) -> None:
    """Refuse half of a surrogate pair: a valid escape in JSON, but no character. Every route depends on this."""
    body = await request.body()
    if not SURROGATE.search(body):
        return
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidField("The body has half a character: an escape from \\uD800 to \\uDFFF alone.", "body") from None
    except (ValueError, RecursionError):
        return  # not JSON: the route refuses it
