"""OpenAI's published schemas, to hold our documents against: `validate(name, document)` by a schema's name.

The file is no part of the repository: where it is not there, `validate` checks nothing, and a test whose only point it
is asks `is_there` first.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

PATH = Path(__file__).parents[3] / "shared" / "data" / "openai" / "openapi.json"
URI = "urn:openai"

is_there = PATH.exists()


def validate(name: str, document: object) -> None:
    """Raises jsonschema.ValidationError, which says where the document is not what the schema wants."""
    if is_there:
        validator(name).validate(document)


@functools.cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    if name not in schemas():
        raise LookupError(f"OpenAI has no schema {name!r}")
    return jsonschema.Draft202012Validator({"$ref": f"{URI}#/components/schemas/{name}"}, registry=registry())


@functools.cache
def schemas() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PATH.read_text())["components"]["schemas"]
    return found


@functools.cache
def registry() -> Registry[Any]:
    document = relax({"components": {"schemas": schemas()}})
    return Registry().with_resource(URI, Resource.from_contents(document, default_specification=DRAFT202012))


def relax(value: Any) -> Any:
    """What JSON Schema does not know, in its own words.

    A discriminator picks one of several schemas that may overlap: any will do. Nullable: null will do too.
    """
    if isinstance(value, list):
        return [relax(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if value.get("nullable") is True:
        return {"anyOf": [relax({key: entry for key, entry in value.items() if key != "nullable"}), {"type": "null"}]}
    if "discriminator" in value and "oneOf" in value:
        value = {("anyOf" if key == "oneOf" else key): entry for key, entry in value.items()}
    return {key: relax(entry) for key, entry in value.items()}


@functools.cache
def event_schemas() -> dict[str, str]:
    """The schema of each kind of event that a response's stream may have."""
    names = [entry["$ref"].rpartition("/")[2] for entry in schemas()["ResponseStreamEvent"]["anyOf"]]
    return {schemas()[name]["properties"]["type"]["enum"][0]: name for name in names}


def validate_event(document: dict[str, Any]) -> None:
    """One event of /v1/responses."""
    if is_there:
        validate(event_schemas()[document["type"]], document)
