"""The routes behind the console's Batching and Plan screens: on a made-up service, and a live run on a real one."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette

from quire.capacity.step_cost import FIRST_KEYS, StepCost
from quire.errors import QuireError
from quire.server.app import handle_quire_error
from quire.server.console import planning
from quire.server.console.planning import measured_events
from tests.browser.fake_engine import PROFILE

LOAD = {"rate": 5.0, "num_requests": 6, "prompt_tokens": 20, "output_tokens": 10, "seed": 2}
BATCHING = {**LOAD, "batch_size": 3, "batch_wait_s": 0.1}


def ask(method: str, path: str, profile: Any = PROFILE, **options: Any) -> httpx2.Response:
    """One request to the routes, with a service whose client has a profile."""
    return ask_at_once(1, method, path, profile, **options)[0]


def ask_at_once(count: int, method: str, path: str, profile: Any = PROFILE, **options: Any) -> list[httpx2.Response]:
    service = SimpleNamespace(model="made-up", client=SimpleNamespace(capacity_profile=profile))
    app = Starlette(routes=planning.router.routes, exception_handlers={QuireError: handle_quire_error})

    app.state.simulating = asyncio.Semaphore(1)

    async def with_context(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "quire": SimpleNamespace(service=service)}, receive, send)

    async def send() -> list[httpx2.Response]:
        transport = httpx2.ASGITransport(with_context)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
            return await asyncio.gather(*(http.request(method, path, **options) for _ in range(count)))

    return asyncio.run(send())


@pytest.mark.cpu
def test_simulations_of_several_servers_do_not_share_a_lock():
    """A lock belongs to the event loop in which it was waited for."""
    for _ in range(2):
        answers = ask_at_once(2, "POST", "/console/batching", json=BATCHING)
        assert [answer.status_code for answer in answers] == [200, 200]


@pytest.mark.cpu
def test_three_policies_have_the_same_requests():
    answer = ask("POST", "/console/batching", json=BATCHING).json()
    assert set(answer["policies"]) == {"static", "dynamic", "continuous"}
    for policy in answer["policies"].values():
        assert [request[0] for request in policy["requests"]] == [request[0] for request in answer["requests"]]
        assert all(arrival <= start < first <= end for arrival, start, first, end in policy["requests"])
        tokens = sum(request[2] for request in answer["requests"])
        assert policy["output_tokens_per_s"] == pytest.approx(tokens / policy["end_s"])
    first = {name: policy["ttft_mean_s"] for name, policy in answer["policies"].items()}
    assert first["continuous"] < min(first["static"], first["dynamic"])


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rate": 0}, "rate"),
        ({"num_requests": 1000}, "num_requests"),
        ({"batch_size": 0}, "batch_size"),
        ({"burst": 1}, "burst"),
        ({"prompt_tokens": 4090, "output_tokens": 400}, "longest request"),
    ],
)
def test_a_wrong_load_is_refused_by_name(fields, named):
    answer = ask("POST", "/console/batching", json={**BATCHING, **fields})
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


@pytest.mark.cpu
def test_an_engine_without_costs_says_how_to_get_them():
    for method, path, body in (("POST", "/console/batching", BATCHING), ("GET", "/console/plan", None)):
        answer = ask(method, path, profile=None, json=body)
        assert answer.status_code == 503
        assert "quire bench phases MODEL --save" in answer.json()["error"]["message"]


@pytest.mark.cpu
def test_predicted_steps_of_a_context():
    answer = ask("GET", "/console/plan?context_tokens=1000").json()
    assert answer["context_tokens"] == 1000
    assert [point["tokens"] for point in answer["decode"]][-1] == PROFILE.sizes.max_requests
    for point in (*answer["decode"], *answer["prompt"]):
        parts = point["fixed_s"] + point["tokens_s"] + point["cache_s"]
        assert point["seconds"] == pytest.approx(parts)
        assert point["low_s"] < point["seconds"] < point["high_s"]
    assert ask("GET", "/console/plan?context_tokens=99999").status_code == 400
    assert ask("GET", "/console/plan?context_tokens=many").status_code == 400


@dataclass
class SlowService:
    """Answers nothing until its requests are aborted."""

    ready: Any = field(default_factory=lambda: SimpleNamespace(vocab_size=100))
    prompts: list[list[int]] = field(default_factory=list)
    num_closed: int = 0

    async def open(self, prompt: Any, params: Any, context: Any) -> Any:
        self.prompts.append(prompt["prompt_token_ids"])
        assert params.ignore_eos
        return object()

    async def generate(self, processors: Any) -> Any:
        try:
            yield set()
            await asyncio.Event().wait()
        finally:
            self.num_closed += 1


@pytest.mark.cpu
def test_a_live_run_that_is_left_aborts_its_requests():
    service = SlowService()

    async def leave() -> None:
        requests = planning.LoadFields(**{**LOAD, "rate": 1000.0}).load().requests()
        stream = measured_events(SimpleNamespace(service=service), requests)
        for _ in requests:
            assert json.loads((await anext(stream))[6:])["kind"] == "first"
        async with asyncio.timeout(10):  # requests that are not aborted never end
            await stream.aclose()

    asyncio.run(leave())
    assert service.num_closed == len(service.prompts) == LOAD["num_requests"]
    assert len({tuple(prompt) for prompt in service.prompts}) == LOAD["num_requests"]


@pytest.mark.cpu
def test_a_live_run_ends_if_the_server_fails_on_its_requests():
    class FailingService(SlowService):
        async def open(self, *values: Any) -> Any:
            raise RuntimeError("a bug")

    async def read() -> list[dict[str, Any]]:
        requests = planning.LoadFields(**{**LOAD, "rate": 1000.0}).load().requests()
        async with asyncio.timeout(10):
            stream = measured_events(SimpleNamespace(service=FailingService()), requests)
            return [json.loads(each[6:]) async for each in stream]

    events = asyncio.run(read())
    assert [event["kind"] for event in events] == ["failed"] * LOAD["num_requests"]
    assert {event["message"] for event in events} == {"The server failed on this request."}


@pytest.mark.cpu
def test_a_load_that_the_groups_of_a_cache_have_no_room_for_is_refused():
    windows = (None, 64, 64, 64)
    zeros = (0.0,) * len(windows)
    coefficients = (*PROFILE.cost.coefficients[:FIRST_KEYS], *zeros, *zeros)
    sizes = replace(PROFILE.sizes, num_blocks=16, block_size=16, max_len=512, windows=windows)
    profile = replace(PROFILE, sizes=sizes, cost=StepCost(windows, coefficients))
    answer = ask("POST", "/console/batching", profile, json={**BATCHING, "prompt_tokens": 150})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "has 181 tokens and needs 48 blocks; this engine takes at most 512 tokens and has 16 blocks" in message


@pytest.mark.server
def test_a_live_run_on_a_real_engine(server):
    with server.client() as http:
        about = http.get("/console/engine").json()
        assert about["batching"] == "continuous"
        assert {"temperature", "top_p"} <= about["sampling"].keys()
        body = {**LOAD, "rate": 50.0, "prompt_tokens": 8, "output_tokens": 4}
        lines = http.post("/console/batching/run", json=body).text.split("\n\n")
        events = [json.loads(line[6:]) for line in lines if line]
    for number in range(LOAD["num_requests"]):
        first, end = (event for event in events if event["number"] == number)
        assert (first["kind"], end["kind"]) == ("first", "end")
        assert 0 < first["at_s"] <= end["at_s"]
