"""Requests that arrive one by one at an engine in this process, and their latencies.

The engine is called as in a server: requests that have arrived are added, then a step is run. `gpu.py` calls it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.bench.serve.metrics import distribution
from quire.core.constraint import Constraint
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.client import InProcess

VOCABULARY = range(1000, 120_000)
SHORTEST_PROMPT, SHORTEST_ANSWER = 32, 16


class Arrival(NamedTuple):
    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Seen:
    """The times of one request, in seconds since the beginning."""

    due_s: float
    times_s: list[float] = field(default_factory=list)  # of tokens


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds, over all requests."""

    ttft: dict[str, float]
    itl: dict[str, float]
    seconds: float
    num_tokens: int


def make_request(
    name: str, prompt: Sequence[int], output_tokens: int, constraint: Constraint | None = None, **sampling: Any
) -> Request:
    params = SamplingParams(max_tokens=output_tokens, **{"ignore_eos": True, "temperature": 0.0} | sampling)
    return Request(name, prompt, params, max_tokens=output_tokens, seed=len(prompt), constraint=constraint)


def random_prompt(rng: random.Random, length: int, vocabulary: range = VOCABULARY) -> list[int]:
    return [rng.choice(vocabulary) for _ in range(length)]


def poisson(
    rate: float, seconds: float, seed: str, longest_prompt: int = 1024, longest_answer: int = 512
) -> list[Arrival]:
    """Poisson arrivals, at least one. The lengths of prompts and answers are uniformly distributed."""
    rng = random.Random(seed)
    arrivals, at_s = [], 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        prompt, answer = rng.randint(SHORTEST_PROMPT, longest_prompt), rng.randint(SHORTEST_ANSWER, longest_answer)
        arrivals.append(Arrival(at_s, prompt, answer))
    return arrivals or [Arrival(0.0, longest_prompt, longest_answer)]


def drive(
    client: InProcess, arrivals: Iterable[Arrival], seed: str, vocabulary: range = VOCABULARY, **sampling: Any
) -> Figures:
    rng = random.Random(seed)
    requests = [
        (at_s, make_request(f"{seed}.{number}", random_prompt(rng, prompt, vocabulary), output, **sampling))
        for number, (at_s, prompt, output) in enumerate(arrivals)
    ]
    return serve(client, requests)


def serve(client: InProcess, requests: list[tuple[float, Request]]) -> Figures:
    """Add each request at its time and step the engine until all are answered."""
    seen = {request.id: Seen(at_s) for at_s, request in requests}
    waiting = list(reversed(requests))
    begin = time.perf_counter()
    while waiting or client.engine.has_work:
        now_s = time.perf_counter() - begin
        while waiting and waiting[-1][0] <= now_s:
            client.add(waiting.pop()[1])
        if not client.engine.has_work:
            if not client.engine.idle():
                time.sleep(max(0.0, waiting[-1][0] - (time.perf_counter() - begin)))
            continue
        updates = client.step()
        landed_s = time.perf_counter() - begin
        for update in updates:
            assert update.finish is None or update.finish.value == "length", update
            seen[update.id].times_s += [landed_s] * len(update.tokens)
    return summarize(list(seen.values()))


def summarize(seen: Sequence[Seen]) -> Figures:
    ttft = distribution(1e3 * (each.times_s[0] - each.due_s) for each in seen)
    gaps = (1e3 * (b - a) for each in seen for a, b in zip(each.times_s, each.times_s[1:], strict=False))
    itl = distribution(gaps) or {"p50": 0.0, "p99": 0.0, "max": 0.0}
    assert ttft is not None
    ends_s = max(each.times_s[-1] for each in seen)
    return Figures(ttft, itl, ends_s, sum(len(each.times_s) for each in seen))
