"""Fields: the base of every request body. What a body does not declare is refused, by name.

And `explain`: what pydantic found wrong, in one sentence that names the field and speaks of JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from quire.errors import MAX_SHOWN, InvalidField

MAX_MISTAKES = 100  # more are not listed one by one, since that would hold up the event loop
WANTED = {
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
ArrayOf = Annotated[list[Item], Field(fail_fast=True)]  # checked up to its first mistake


class Fields(BaseModel):
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
    def _limit_mistakes(cls, value: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        known = {name for key, field in cls.model_fields.items() for name in (key, field.alias)}
        if isinstance(value, dict) and len(value) > len(known) + MAX_MISTAKES:
            unknown = next(key for key in value if key not in known)
            raise PydanticCustomError("extra_forbidden", "{name}", {"name": str(unknown)[:MAX_SHOWN]})
        try:
            return handler(value)
        except ValidationError as error:
            if error.error_count() <= MAX_MISTAKES:
                raise
        raise PydanticCustomError("too_many", "more than {most} values are wrong", {"most": MAX_MISTAKES})


def explain(errors: Sequence[Mapping[str, Any]], body: Any) -> InvalidField:
    """The mistake that lies deepest in the body: of the forms that a value may have, that one was probably meant."""
    places = [place_of(error, body) for error in errors]
    place = max(places, key=len)
    same = [error for error, other in zip(errors, places, strict=True) if other == place]
    error, name = same[0], ".".join(map(str, place)) or "body"
    match error["type"]:
        case "extra_forbidden":
            name = ".".join([*map(str, place), *filter(None, [error.get("ctx", {}).get("name")])])
            reason = "quire does not know this field, so it would have no effect; leave it out."
            return InvalidField(f"{name}: {reason}", name)
        case "json_invalid":
            return InvalidField(f"The body is not JSON: {error.get('ctx', {}).get('error', error['msg'])}.", "body")
        case "missing" if place:
            return InvalidField(f"{name} is missing; it is required.", name)
    if not place and error["type"] != "too_many":
        return InvalidField("The body is not a JSON object; send one, with `Content-Type: application/json`.", "body")
    wanted = list(dict.fromkeys(WANTED[other["type"]] for other in same if other["type"] in WANTED))
    if wanted:
        return InvalidField(f"{name}: give {' or '.join(wanted)}.", name)
    return InvalidField(f"{name}: {error['msg'][0].lower()}{error['msg'][1:]}.", name)


def place_of(error: Mapping[str, Any], body: Any) -> list[str | int]:
    """Where in the body the mistake is. pydantic's path also names the form that it tried; the body has no such key."""
    if error["type"] == "json_invalid":
        return []
    place: list[str | int] = []
    path = [part for index, part in enumerate(error["loc"]) if index or part not in ("body", "query", "path")]
    for index, part in enumerate(path):
        is_there = part in body if isinstance(body, dict) else isinstance(body, list) and isinstance(part, int)
        is_missing = error["type"] == "missing" and index == len(path) - 1
        if not (is_there or is_missing or error["loc"][0] in ("query", "path")):
            continue
        place.append(part)
        if is_there:
            body = body[part]
    return place
