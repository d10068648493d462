"""An hour of traffic on a GPU, without the waiting: a request a second, alone or with forks, of any length and any kind
of sampling; some are given up; the cache is far too small. The core's invariants hold, everything ends, and who was
not given up gets the answer it gets alone.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.cuda import gpu  # skips this module where there is no GPU

from quire.core.params import SamplingParams  # isort: skip
from quire.core.plan import Update
from quire.core.request import Finish, Request
from quire.engine.client import InProcess
from tests.core import invariants

pytestmark = pytest.mark.cuda

HOUR = 3600  # arrivals
NUM_BLOCKS = 90
ENDS = frozenset(range(2, 60))
CHECKED_EVERY = 37  # steps; the invariants look at every block
ANSWERED_AGAIN = 60
PARAMS = [
    {"temperature": 0.0}, {"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.1, "top_k": 20}, {"temperature": 0.8, "min_p": 0.05, "top_k": 50, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.2}, {"temperature": 0.5, "logprobs": 2},
]  # fmt: skip
WEIGHTS = [6, 6, 6, 6, 6, 6, 1, 1]  # the last two wait for the host: most steps are to run ahead of it


class Traffic:
    """Requests of one seed: which arrive, which are given up, and what came of them."""

    def __init__(self, client: InProcess, seed: int) -> None:
        self.client = client
        self.rng = random.Random(seed)
        self.shared = [self.rng.randrange(2, 2000) for _ in range(300)]
        self.requests: dict[str, Request] = {}
        self.given_up: set[str] = set()
        self.ends: dict[str, Finish] = {}
        self.tokens: dict[str, list[int]] = {}

    def arrive(self, number: int) -> None:
        rng, leader = self.rng, None
        params = SamplingParams(
            **rng.choices(PARAMS, WEIGHTS)[0], max_tokens=rng.choice([1, 10, 60, 100]), ignore_eos=rng.random() < 0.5
        )
        prompt = self.shared[: rng.choice([0, 0, 16, 90, 300])]
        prompt = prompt + [rng.randrange(2, 2000) for _ in range(rng.choice([1, 2, 17, 60, 200, 600]))]
        for sample in range(rng.choice([1, 1, 1, 1, 3])):
            request = Request(
                f"{number}.{sample}", prompt, params, max_tokens=params.max_tokens, seed=number * 10 + sample,
                end_token_ids=ENDS, leader=leader,
            )  # fmt: skip
            leader = leader or request
            self.requests[request.id] = request
            self.client.add(request)

    def give_up(self) -> None:
        live = list(self.client.engine.scheduler.requests)
        if live:
            name = self.rng.choice(live)
            self.given_up.add(name)
            self.take([update for update in [self.client.abort(name)] if update is not None])

    def take(self, updates: list[Update]) -> None:
        for update in updates:
            self.tokens.setdefault(update.id, []).extend(update.tokens)
            if update.finish is not None:
                assert update.id not in self.ends
                self.ends[update.id] = update.finish

    def check(self) -> None:
        scheduler = self.client.engine.scheduler
        held = [request for launched in self.client.engine._launched for request in launched.plan.requests]
        invariants.check(scheduler, [request for request in held if request.tables])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.mark.parametrize(
    ("num_arrivals", "options"),
    [(HOUR, {"swap_memory": 0.1}), (HOUR // 4, {"swap_memory": 0.0}), (HOUR // 4, {"exact": True})],
    ids=str,
)
def test_an_hour_of_traffic(model, num_arrivals, options):
    client = gpu.start(model, dtype="float32", num_blocks=NUM_BLOCKS, max_requests=24, max_len=1024, **options)
    traffic, number, num_steps = Traffic(client, len(options)), 0, 0
    while number < num_arrivals or client.engine.has_work:
        if number < num_arrivals and client.engine.scheduler.num_waiting < 30:
            traffic.arrive(number)
            number += 1
        if traffic.rng.random() < 0.03:
            traffic.give_up()
        traffic.take(client.step())
        num_steps += 1
        if num_steps % CHECKED_EVERY == 0:
            traffic.check()
    traffic.check()
    assert traffic.ends.keys() == traffic.requests.keys()
    assert {traffic.ends[name] for name in traffic.given_up} <= {Finish.ABORT, Finish.LENGTH, Finish.STOP}
    assert {traffic.ends[name] for name in traffic.ends.keys() - traffic.given_up} == {Finish.LENGTH, Finish.STOP}
    assert client.engine.scheduler.counters.preemptions > num_arrivals // 50
    assert client.engine.scheduler.kv.pool.num_free == NUM_BLOCKS
    compare_with_answers_alone(model, traffic)


def compare_with_answers_alone(model: Path, traffic: Traffic) -> None:
    client = gpu.start(model, dtype="float32", num_blocks=NUM_BLOCKS, max_len=1024, prefix_cache=False)
    kept = sorted(traffic.ends.keys() - traffic.given_up)
    for name in traffic.rng.sample(kept, ANSWERED_AGAIN):
        old = traffic.requests[name]
        again = Request(
            name, old.tokens[: old.num_prompt], old.params, max_tokens=old.max_tokens, seed=old.seed,
            end_token_ids=old.end_token_ids,
        )  # fmt: skip
        client.add(again)
        while client.engine.has_work:
            client.step()
        assert again.tokens[again.num_prompt :] == traffic.tokens[name], name
