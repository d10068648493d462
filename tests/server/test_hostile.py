"""Whatever is sent, the server answers as its own OpenAPI says it does, and goes on."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.server.running import Running

pytestmark = pytest.mark.server

SERVER_ERRORS = {500, 501, 502}


@pytest.fixture(scope="module")
def server(default_model):
    """With a short context: most of what is sent does not say when to stop."""
    with Running("--max-len", "64", "--kv-memory", "0.25", "--no-log-requests") as running:
        yield running


@pytest.fixture(scope="module")
def api(server):
    """All routes but the stream that has no end."""
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json").exclude(path="/console/live")


def test_malformed_requests_never_break_it(server, api):
    """Requests made from the schema, right and wrong ones: none may end in an error of ours."""
    num_asked, broken = 0, []

    def ask(operation, case):
        nonlocal num_asked
        answer = case.call(timeout=60)
        num_asked += 1
        if answer.status_code in SERVER_ERRORS:
            broken.append((operation.label, answer.status_code, case.body, answer.text[:200]))

    for found in api.get_all_operations():
        try_out(found.ok(), ask)
    assert num_asked > 100
    assert not broken
    with server.client() as http:
        assert http.get("/health/generate").status_code == 200


def try_out(operation, ask):
    """Ask an operation a number of things that its schema allows, and some that it does not."""
    limits = settings(
        max_examples=15,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    limits(given(case=operation.as_strategy())(lambda case: ask(operation, case)))()
