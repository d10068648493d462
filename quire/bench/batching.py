"""`quire bench batching`: continuous, dynamic and static batching of the same requests, on one engine.

The three differ in when a waiting request may join the running batch. Engine, kernels, prompts and arrivals are the
same, and so must the answers be. Lengths are uniformly distributed up to the longest: requests of a batch that end
early are what static batching leaves idle. The prefix cache is off.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quire.bench.in_process import TimedRequest, answer, answers, make_request, request_rows
from quire.bench.serve.arrivals import random_times
from quire.bench.serve.metrics import RequestRecord, errors_by_kind, summarize
from quire.config import EngineConfig
from quire.core.policy import Policy
from quire.engine.batching import choose_batching
from quire.engine.client import InProcess
from quire.engine.machine import machine
from quire.errors import InvalidParams

SHORTEST = 8  # the shortest request is the longest divided by this

Report = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True)
class Load:
    """Poisson arrivals of random prompts. `prompt_tokens` and `output_tokens` are those of the longest request."""

    rate: float
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    seed: int = 5

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise InvalidParams(f"--rate is {self.rate}; give requests a second above 0.")
        for name in ("num_requests", "prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise InvalidParams(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}; give a whole number of at least 1."
                )

    def requests(self, vocab_size: int) -> list[TimedRequest]:
        rng = random.Random(self.seed)
        made = []
        for number, at_s in enumerate(random_times(self.rate, 1.0, self.num_requests, f"{self.seed} arrivals")):
            prompt = [rng.randrange(vocab_size) for _ in range(draw_length(rng, self.prompt_tokens))]
            request = make_request(str(number), prompt, draw_length(rng, self.output_tokens))
            made.append(TimedRequest(at_s, request))
        return made


@dataclass(frozen=True, slots=True)
class Run:
    """One policy and one run of the load."""

    batching: str
    records: list[RequestRecord]
    summary: dict[str, Any]
    answers: list[list[int]]


def draw_length(rng: random.Random, longest: int) -> int:
    return rng.randint(-(-longest // SHORTEST), longest)


def run(
    config: EngineConfig, path: Path, load: Load, *, repeats: int = 1, report: Report | None = None
) -> dict[str, Any]:
    """Run the load with each policy in turns. Of several runs of a policy the one of median throughput counts."""
    if repeats < 1:
        raise InvalidParams(f"--repeats is {repeats}; give a whole number of at least 1.")
    assert not config.prefix_cache
    client = InProcess(config, path)
    policies = make_policies(config, client.info.max_requests)
    count, done = repeats * len(policies) * load.num_requests, 0

    def on_end(record: RequestRecord) -> None:
        nonlocal done
        done += 1
        if report:
            report(done, count)

    warm_up(client, load)
    runs: dict[str, list[Run]] = {name: [] for name in policies}
    for _ in range(repeats):
        for name in policies:
            # A policy has a state, so each run has its own.
            client.engine.scheduler.policy = make_policies(config, client.info.max_requests)[name]
            runs[name].append(run_load(client, name, load, on_end))
    chosen = [median_run(each) for each in runs.values()]
    return {
        "machine": machine(config),
        "model": config.model,
        "engine": client.info.summary,
        "load": asdict(load),
        "batch_size": config.max_requests,
        "repeats": repeats,
        "different": num_different([run for each in runs.values() for run in each]),
        "runs": [
            {
                "batching": run.batching,
                "summary": run.summary,
                "errors": errors_by_kind(run.records),
                "requests": request_rows(run.records),
            }
            for run in chosen
        ],
    }


def warm_up(client: InProcess, load: Load) -> None:
    """A batch of the longest requests. On a GPU the steps that were missed are captured."""
    size = client.info.max_requests
    vocabulary = range(client.info.config.vocab_size)
    rng = random.Random("warm-up")
    prompts = [rng.choices(vocabulary, k=load.prompt_tokens) for _ in range(size)]
    answer(client, [TimedRequest(None, make_request(f"{n}", prompt, 4)) for n, prompt in enumerate(prompts)])
    while client.engine.idle():
        pass


def make_policies(config: EngineConfig, max_requests: int) -> dict[str, Policy]:
    """The three policies. `config` is that of dynamic batching, which has all options."""
    assert config.batching == "dynamic"
    static = replace(config, batching="static", batch_wait=None)
    continuous = replace(config, batching="continuous", batch_wait=None, batch_size=None)
    return {each.batching: Policy(choose_batching(each, max_requests)) for each in (continuous, config, static)}


def run_load(client: InProcess, batching: str, load: Load, on_end: Callable[[RequestRecord], None]) -> Run:
    requests = load.requests(client.info.config.vocab_size)
    records = answer(client, requests, on_end=on_end)
    return Run(batching, records, summarize(records, {}), answers(requests))


def median_run(runs: Sequence[Run]) -> Run:
    ordered = sorted(runs, key=lambda run: run.summary["output_tokens_per_s"] or 0.0)
    return ordered[len(ordered) // 2]


def num_different(runs: Sequence[Run]) -> int:
    """Requests whose answers differ between runs: 0 where logits do not depend on the batch."""
    return sum(
        any(answer != first for answer in rest) for first, *rest in zip(*(run.answers for run in runs), strict=True)
    )
