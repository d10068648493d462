"""How many replicas keep limits of latency on a trace: the fewest for which enough requests do, found by simulation.

A simulation ends as soon as too many requests have missed the limits. `quire plan` calls this.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.bench.replicas import MakePolicy, RecordedLoad, ServerLoad, Totals, simulate_servers
from quire.bench.serve.traces import TraceRequest
from quire.bench.simulate import without_idle_cache
from quire.capacity.figures import Load, batch_figures
from quire.capacity.memory import requests_that_fit
from quire.capacity.model_size import ModelSize
from quire.capacity.profile import CapacityProfile
from quire.errors import InvalidParams

MAX_REQUESTS = 10_000  # of a trace, the busiest ones in a row
REPLICAS_PER_SERVER = 16
MAX_REPLICAS = 4096
RANGE_BUDGET_S = 12.0  # ranges are searched only if the search itself took less


@dataclass(frozen=True, slots=True)
class Objective:
    """At least `attainment` of the requests keep all limits (milliseconds by name)."""

    limits: Mapping[str, float]
    attainment: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The fewest replicas, what requests get from them, and what was tried."""

    replicas: int
    totals: Totals
    tried: dict[int, float | None]  # share of requests within the limits; None: the simulation was ended early


def busiest(entries: Sequence[TraceRequest], count: int) -> list[TraceRequest]:
    """The `count` consecutive requests that arrive in the shortest time, from time 0 on."""
    if len(entries) > count:
        first = min(range(len(entries) - count + 1), key=lambda i: entries[i + count - 1].at_s - entries[i].at_s)
        entries = entries[first : first + count]
    begin_s = entries[0].at_s
    return [replace(entry, at_s=entry.at_s - begin_s) for entry in entries]


def plan_replicas(
    profile: CapacityProfile,
    size: ModelSize,
    entries: Sequence[TraceRequest],
    objective: Objective,
    make_policy: MakePolicy,
) -> dict[str, Any]:
    """The document of `quire plan --trace --slo`."""
    begin_s = time.perf_counter()
    fitting = [entry for entry in entries if entry.prompt_tokens + entry.output_tokens <= profile.sizes.max_len]
    if not fitting:
        raise InvalidParams(f"No request of the trace is within {profile.sizes.max_len:,} tokens, the longest request.")
    used = busiest(fitting, MAX_REQUESTS)
    check_alone(profile, used, objective)
    search = Search(profile, used, objective, make_policy)
    found = search.find(guess(profile, size, used))
    document = {
        "replicas": found.replicas,
        "servers": math.ceil(found.replicas / REPLICAS_PER_SERVER),
        "limits_ms": dict(objective.limits),
        "attainment_wanted": objective.attainment,
        "summary": found.totals.summary(),
        "tried": found.tried,
        "num_requests": len(used),
        "num_left_out": len(fitting) - len(used),
        "num_too_long": len(entries) - len(fitting),
        "range": None,
    }
    if time.perf_counter() - begin_s < RANGE_BUDGET_S:
        document["range"] = find_range(search, found.replicas)
    return {**document, "seconds": time.perf_counter() - begin_s}


def check_alone(profile: CapacityProfile, entries: Sequence[TraceRequest], objective: Objective) -> None:
    """Raise InvalidParams if too many requests miss a limit on an engine of their own."""
    for name, limit_ms in objective.limits.items():
        num_missed = sum(alone_ms(profile, entry)[name] > limit_ms for entry in entries)
        if num_missed > (1 - objective.attainment) * len(entries):
            raise InvalidParams(
                f"No number of replicas keeps {name} within {limit_ms:g} ms: {100 * num_missed / len(entries):.0f}% of "
                "the requests miss it on an engine of their own. Raise the limit, lower --attainment, or take a faster "
                "machine or a smaller model."
            )


def alone_ms(profile: CapacityProfile, entry: TraceRequest) -> dict[str, float]:
    """What a request gets from an engine of its own, in milliseconds by the names of limits."""
    load = Load(entry.prompt_tokens, max(2, entry.output_tokens))
    figures = batch_figures(profile.cost, profile.sizes, load, 1)
    ttft_ms, tpot_ms = 1e3 * figures.ttft_s, 1e3 * figures.step_s if entry.output_tokens > 1 else 0.0
    return {"ttft": ttft_ms, "tpot": tpot_ms, "e2e": ttft_ms + max(0, entry.output_tokens - 1) * tpot_ms}


def guess(profile: CapacityProfile, size: ModelSize, entries: Sequence[TraceRequest]) -> int:
    """Replicas whose throughput is what arrives, by the formulas of figures.py for the mean request."""
    count = len(entries)
    load = Load(
        max(1, sum(entry.prompt_tokens for entry in entries) // count),
        max(2, sum(entry.output_tokens for entry in entries) // count),
    )
    batch = max(1, requests_that_fit(size, profile.sizes, min(load.length, profile.sizes.max_len)))
    per_second = batch_figures(profile.cost, profile.sizes, load, batch).requests_per_s
    duration_s = max(entries[-1].at_s, 1.0)
    return max(1, min(MAX_REPLICAS, math.ceil(count / duration_s / per_second)))


@dataclass(slots=True)
class Search:
    """Simulations of one load with different numbers of replicas."""

    profile: CapacityProfile
    entries: Sequence[TraceRequest]
    objective: Objective
    make_policy: MakePolicy

    def find(self, first: int) -> SearchResult:
        """Doubles or halves from the guess on, then bisects."""
        results: dict[int, Totals] = {}
        shares: dict[int, float | None] = {}

        def keeps(count: int) -> bool:
            totals = results[count] = self.simulate(count)
            is_complete = totals.num_met + totals.num_missed == len(self.entries)
            shares[count] = totals.num_met / len(self.entries) if is_complete else None
            return totals.num_missed <= self.max_missed

        replicas = fewest(keeps, first)
        return SearchResult(replicas, results[replicas], dict(sorted(shares.items())))

    @property
    def max_missed(self) -> float:
        return (1 - self.objective.attainment) * len(self.entries) + 1e-9

    def simulate(self, replicas: int) -> Totals:
        num_servers = math.ceil(replicas / REPLICAS_PER_SERVER)
        load = ServerLoad(
            without_idle_cache(self.profile, self.entries),
            self.make_policy,
            RecordedLoad(self.entries),
            math.ceil(replicas / num_servers),
            num_servers,
            self.objective.limits,
            self.max_missed,
        )
        return simulate_servers(load)


def fewest(keeps: Callable[[int], bool], first: int) -> int:
    """The smallest number that keeps the limits, if more replicas never do worse."""
    low, high = 0, first  # low does not keep them
    while not keeps(high):
        low, high = high, 2 * high
        if low >= MAX_REPLICAS:
            raise InvalidParams(
                f"{low:,} replicas do not keep the limits for enough of the requests. Raise the limits or lower "
                "--attainment."
            )
    while high - low > 1:
        middle = max(low + 1, high // 2 if low == 0 else (low + high) // 2)
        if keeps(middle):
            high = middle
        else:
            low = middle
    return high


def find_range(search: Search, replicas: int) -> list[int | None]:
    """The fewest replicas with the fastest and the slowest of the costs that fit the measurements. None: no number of
    replicas keeps the limits with the slowest."""
    costs = search.profile.cost.alternatives() or [search.profile.cost]
    probe = max(search.entries, key=lambda entry: entry.prompt_tokens)
    ordered = sorted(costs, key=lambda cost: alone_ms(replace(search.profile, cost=cost), probe)["e2e"])
    fast, slow = (replace(search, profile=replace(search.profile, cost=cost)) for cost in (ordered[0], ordered[-1]))
    fewest_fast = min(replicas, fast.find(replicas).replicas)
    try:
        check_alone(slow.profile, slow.entries, slow.objective)
        return [fewest_fast, max(replicas, slow.find(replicas).replicas)]
    except InvalidParams:
        return [fewest_fast, None]
