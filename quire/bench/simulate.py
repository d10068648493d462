"""`quire simulate`: a trace on a simulated engine, with the report of `quire bench serve`. With a server beside it, the
errors of the simulation.

A trace's lengths and times are those of the load; prompts that share blocks in the trace share tokens here.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from quire.bench.in_process import request_rows
from quire.bench.serve.metrics import RequestRecord, errors_by_kind, summarize
from quire.bench.serve.traces import MAX_TOKENS, TraceRequest
from quire.capacity.profile import CapacityProfile
from quire.capacity.simulator import Arrival, SimulatedRequest, Simulation
from quire.core.policy import Policy

COMPARED = (
    ("cached_tokens", None),
    ("output_tokens_per_s", None),
    *((name, tail) for name in ("ttft_ms", "itl_ms", "e2e_ms") for tail in ("mean", "p50", "p99")),
)
PROMPT_STRIDE = MAX_TOKENS  # tokens of one prompt lie apart from those of another by this
BLOCK_BASE = 1 << 48  # tokens of blocks that a trace names


def arrivals(entries: Iterable[TraceRequest]) -> Iterator[Arrival]:
    """The requests of a trace. A named block has the same tokens wherever it occurs."""
    numbers: dict[int, int] = {}  # of blocks, whose ids may be hashes
    for number, entry in enumerate(entries):
        prompt: list[int] = []
        for block in entry.blocks[: -(-entry.prompt_tokens // entry.block_tokens)]:
            start = BLOCK_BASE + numbers.setdefault(block, len(numbers)) * entry.block_tokens
            prompt += range(start, start + entry.block_tokens)
        own = (number + 1) * PROMPT_STRIDE
        if entry.blocks:
            # The last block of a prompt is shorter than its name says.
            prompt = prompt[: entry.prompt_tokens]
        prompt += range(own, own + entry.prompt_tokens - len(prompt))
        yield Arrival(entry.at_s, prompt, entry.output_tokens)


def random_entries(
    rate: float, count: int, prompt_tokens: int, output_tokens: int, seed: int
) -> Iterator[TraceRequest]:
    """Poisson arrivals of equal requests, as `quire bench serve --rate` sends them, made one by one."""
    rng, at_s = random.Random(seed), 0.0
    for _ in range(count):
        yield TraceRequest(at_s, prompt_tokens, output_tokens)
        at_s += rng.expovariate(rate)


def simulate(
    profile: CapacityProfile,
    entries: Sequence[TraceRequest],
    policy: Policy | None = None,
    limits: dict[str, float] | None = None,
    *,
    with_requests: bool = False,
) -> dict[str, Any]:
    """The document of a run, as `quire bench serve --json` prints it, with the simulation's own numbers."""
    begin_s = time.perf_counter()
    simulation = Simulation(without_idle_cache(profile, entries), policy)
    finished = simulation.run(arrivals(entries))
    seconds = time.perf_counter() - begin_s
    records = [as_record(request) for request in finished]
    return {
        "model": profile.model,
        "machine": profile.machine,
        "summary": summarize(records, limits or {}),
        "errors": errors_by_kind(records),
        "engine": {
            "steps": simulation.num_steps,
            "busy_share": simulation.busy_s / simulation.now_s if simulation.now_s else 0.0,
            "preemptions": simulation.scheduler.counters.preemptions,
            "cached_tokens": simulation.scheduler.counters.cached_tokens,
        },
        "simulated_s": simulation.now_s,
        "wall_s": seconds,
        "step_error": {"median": profile.median_error, "p95": profile.p95_error},
        **({"requests": request_rows(records)} if with_requests else {}),
    }


def without_idle_cache(profile: CapacityProfile, entries: Iterable[TraceRequest]) -> CapacityProfile:
    """If no two prompts share a block, a prefix cache finds nothing, and keeping it would take most of the time. Blocks
    of ended requests can be allocated at once with it too, so times are the same."""
    first_blocks = [entry.blocks[0] for entry in entries if entry.blocks]
    shares = len(set(first_blocks)) < len(first_blocks)
    return profile if shares else profile.resized(prefix_cache=False)


def as_record(request: SimulatedRequest) -> RequestRecord:
    ended = request.times[-1] if request.times else request.arrival_s
    return RequestRecord(
        number=request.number,
        wanted_tokens=request.output_tokens,
        due=None,
        sent=request.arrival_s,
        ended=ended,
        times=request.times,
        output_tokens=len(request.times),
        counted_by="usage",
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        num_chunks=len(request.times),
        failure="refused" if request.refused else None,
        detail=request.refused,
    )


def ranges(
    profile: CapacityProfile, entries: Sequence[TraceRequest], make_policy: Callable[[], Policy] = Policy
) -> dict[str, Any]:
    """The 5th and 95th percentile of each figure, from simulations with the resampled costs."""
    summaries = [
        summarize(
            [as_record(request) for request in Simulation(profile, make_policy(), cost).run(arrivals(entries))], {}
        )
        for cost in profile.cost.alternatives()
    ]
    found = {}
    for name, tail in COMPARED:
        values = sorted(value for summary in summaries if (value := figure(summary, name, tail)) is not None)
        if values:
            low, high = (values[round(share * (len(values) - 1))] for share in (0.05, 0.95))
            found[label(name, tail)] = [low, high]
    return found


def compare(simulated: dict[str, Any], measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Each figure simulated and measured, and the error relative to the measurement."""
    made = []
    for name, tail in COMPARED:
        predicted, real = (figure(document["summary"], name, tail) for document in (simulated, measured))
        error = predicted / real - 1 if predicted is not None and real else None
        made.append({"figure": label(name, tail), "simulated": predicted, "measured": real, "error": error})
    return made


def figure(summary: dict[str, Any], name: str, tail: str | None) -> float | None:
    value = summary[name]
    if tail is not None and value is not None:
        value = value[tail]
    return None if value is None else float(value)


def label(name: str, tail: str | None) -> str:
    return name if tail is None else f"{name} {tail}"
