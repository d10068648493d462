"""Routes check bodies and queries before their functions run. No model, no server."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient

from quire.errors import QuireError
from quire.server.app import handle_quire_error
from quire.server.openapi import describe
from quire.server.request_model import RequestModel
from quire.server.router import Router
from quire.server.schemas import Status, response_schemas
from quire.server.streaming import JSONResponse

pytestmark = pytest.mark.cpu

JSON = {"content-type": "application/json"}
router = Router()


class Item(RequestModel):
    name: str
    body: int = 0


@router.post("/items/{shelf}", responses=response_schemas(Status))
async def add(request: Request, shelf: str, item: Item, limit: Annotated[int, Field(ge=1)] = 3) -> Response:
    """Add an item."""
    return JSONResponse({"shelf": shelf, "item": item.model_dump(), "limit": limit, "path": request.url.path})


@router.get("/items", responses=response_schemas(Status))
async def find(order: Literal["asc", "desc"] = "asc", whole: bool = False) -> Response:
    return JSONResponse({"order": order, "whole": whole})


@router.get("/hidden")
async def hidden() -> Response:
    return Response()


@pytest.fixture
def http():
    return TestClient(Starlette(routes=router.routes, exception_handlers={QuireError: handle_quire_error}))


def test_arguments_come_from_path_body_and_query(http):
    answer = http.post("/items/a%20b?limit=7", json={"name": "x"}).json()
    assert answer == {"shelf": "a b", "item": {"name": "x", "body": 0}, "limit": 7, "path": "/items/a b"}
    assert http.get("/items?order=desc&whole=true&unknown=1").json() == {"order": "desc", "whole": True}


@pytest.mark.parametrize(
    ("query", "body", "headers", "message"),
    [
        ("", b'{"name": 5}', JSON, "name: give a string."),
        ("", b'{"name": "x", "body": []}', JSON, "body: give a whole number."),
        ("", b'{"name": "x", "other": 1}', JSON, "other: quire does not know this field"),
        ("", b"{}", JSON, "name is missing; it is required."),
        ("", b"{", JSON, "The body is not JSON: "),
        ("", b'"\xff"', JSON, "The body is not JSON: it is not UTF-8."),
        ("", b"[" * 100_000, JSON, "The body is not JSON: "),
        ("", b'{"name": ' + b"9" * 5000 + b"}", JSON, "The body is not JSON: it is nested too deep, or has a number"),
        ("", b"", JSON, "The body is not a JSON object"),
        ("", b'{"name": "x"}', {}, "The body is not a JSON object"),
        ("", b'{"name": "x"}', {"content-type": "text/plain"}, "The body is not a JSON object"),
        ("", b'{"name": "\\ud800"}', JSON, "The body has half a character"),
        ("?limit=0", b'{"name": "x"}', JSON, "limit: "),
        ("?limit=many", b'{"name": "x"}', JSON, "limit: "),
    ],
)
def test_what_is_wrong_is_told(http, query, body, headers, message):
    answer = http.post(f"/items/1{query}", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["message"][: len(message)]) == (400, message)


def test_any_json_media_type_is_read(http):
    answer = http.post("/items/1", content=b'{"name": "x"}', headers={"content-type": "application/vnd.api+json; a=b"})
    assert answer.status_code == 200


def test_get_does_not_answer_head(http):
    assert http.head("/items").status_code == 405


def test_the_document_describes_parameters_and_bodies():
    document = describe(router.routes)
    assert sorted(document["paths"]) == ["/items", "/items/{shelf}"]
    add = document["paths"]["/items/{shelf}"]["post"]
    assert [(each["name"], each["in"], each["required"]) for each in add["parameters"]] == [
        ("shelf", "path", True),
        ("limit", "query", False),
    ]
    assert add["parameters"][1]["schema"]["minimum"] == 1
    reference = add["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert document["components"]["schemas"][reference.rpartition("/")[2]]["required"] == ["name"]
