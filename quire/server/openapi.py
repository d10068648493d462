"""The OpenAPI document of the routes, made from their functions and pydantic models. `app.py` serves it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from quire import __version__
from quire.server.router import Operation

Document = dict[str, Any]


class Schemas:
    """JSON schemas of models. Those that models share are components of the document."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        """All models are described together, so that two with one name get different ones."""
        self._keys: list[object] = []
        inputs: list[tuple[int, JsonSchemaMode, TypeAdapter[Any]]] = []
        for operation in operations:
            answers = [each["model"] for each in (operation.responses or {}).values() if "model" in each]
            for model, mode in ((operation.body, "validation"), *((each, "serialization") for each in answers)):
                if model is not None and model not in self._keys:
                    inputs.append((len(self._keys), mode, TypeAdapter(model)))  # type: ignore[arg-type]
                    self._keys.append(model)
        found, definitions = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")
        self._schemas = {key: schema for (key, _), schema in found.items()}
        self.components: Document = definitions.get("$defs", {})

    def of(self, model: object) -> Document:
        return self._schemas[self._keys.index(model)]


def describe(operations: Iterable[Operation]) -> Document:
    """The document for all operations that say what they respond."""
    shown = [each for each in operations if each.responses is not None]
    schemas, paths = Schemas(shown), dict[str, Document]()
    for operation in shown:
        paths.setdefault(operation.path_format, {})[operation.method.lower()] = describe_operation(operation, schemas)
    info = {"title": "quire", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas.components}}


def describe_operation(operation: Operation, schemas: Schemas) -> Document:
    name = operation.function.__name__
    responses = {str(status): describe_response(each, schemas) for status, each in (operation.responses or {}).items()}
    document: Document = {
        "summary": name.replace("_", " ").capitalize(),
        "description": operation.function.__doc__ or "",
        "operationId": f"{name}_{operation.method.lower()}",
        "parameters": parameters(operation),
        "responses": responses,
    }
    if operation.body is not None:
        content = {"application/json": {"schema": schemas.of(operation.body)}}
        document["requestBody"] = {"required": True, "content": content}
    return document


def parameters(operation: Operation) -> list[Document]:
    found: list[Document] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in operation.path_names
    ]
    if operation.query is not None:
        schema = operation.query.model_json_schema()
        required = schema.get("required", [])
        for name, own in schema["properties"].items():
            found.append({"name": name, "in": "query", "required": name in required, "schema": own})
    return found


def describe_response(response: Document, schemas: Schemas) -> Document:
    content = dict(response.get("content", {}))
    if "model" in response:
        content["application/json"] = {"schema": schemas.of(response["model"])}
    return {"description": response["description"], "content": content}
