"""A load on several simulated engines: servers of N replicas, each with the real router, and requests that servers get
in turn. Servers share nothing, so processes simulate them side by side.

Memory does not grow with the load: a request that has ended leaves three numbers, and its gaps are counted in bins.
"""

from __future__ import annotations

import math
import signal
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from multiprocessing import get_context
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.bench.serve.metrics import distribution
from quire.bench.serve.traces import TraceRequest
from quire.bench.simulate import arrivals, random_entries
from quire.capacity.profile import CapacityProfile
from quire.capacity.simulator import Arrival, SimulatedRequest, Simulation
from quire.core.policy import Policy
from quire.core.routing import ReplicaState, Router
from quire.kernels.isa import usable_cores

BINS_PER_DOUBLING = 64  # of gaps between tokens: 1.1% each
SMALLEST_GAP_S = 1e-6
NUM_BINS = 40 * BINS_PER_DOUBLING  # up to 12 days

MakePolicy = Callable[[], Policy]


@dataclass(slots=True)
class Totals:
    """What requests got. Seconds of each in arrays, gaps in bins of equal ratio."""

    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    tpot_s: array[float] = field(default_factory=lambda: array("d"))
    e2e_s: array[float] = field(default_factory=lambda: array("d"))
    gaps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))  # by bin
    num_refused: int = 0
    num_met: int = 0
    num_missed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    first_s: float = math.inf
    end_s: float = 0.0

    def add(self, request: SimulatedRequest, limits: Mapping[str, float]) -> None:
        self.first_s = min(self.first_s, request.arrival_s)
        if request.refused or not request.times:
            self.num_refused += 1
            self.num_missed += 1
            return
        times = request.times
        found = {"ttft": times[0] - request.arrival_s, "e2e": times[-1] - request.arrival_s, "tpot": 0.0}
        if len(times) > 1:
            found["tpot"] = (times[-1] - times[0]) / (len(times) - 1)
            self.tpot_s.append(found["tpot"])
        self.ttft_s.append(found["ttft"])
        self.e2e_s.append(found["e2e"])
        self._count_gaps(times)
        is_met = all(1e3 * found[name] <= limit for name, limit in limits.items())
        self.num_met += is_met
        self.num_missed += not is_met
        self.prompt_tokens += request.prompt_tokens
        self.output_tokens += len(times)
        self.cached_tokens += request.cached_tokens
        self.num_preemptions += request.num_preemptions
        self.end_s = max(self.end_s, times[-1])

    def _count_gaps(self, times: Sequence[float]) -> None:
        gaps = np.maximum(np.diff(times), SMALLEST_GAP_S) / SMALLEST_GAP_S
        bins = (BINS_PER_DOUBLING * np.log2(gaps)).astype(np.int64)
        self.gaps += np.bincount(np.minimum(bins, NUM_BINS - 1), minlength=NUM_BINS)

    def merge(self, other: Totals) -> None:
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            getattr(self, name).extend(getattr(other, name))
        self.gaps += other.gaps
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first_s, self.end_s = min(self.first_s, other.first_s), max(self.end_s, other.end_s)

    def summary(self) -> dict[str, Any]:
        """With the names of `quire bench serve --json`. Gaps are within 0.6%."""
        duration_s = max(0.0, self.end_s - self.first_s)
        rates = {"requests_per_s": len(self.e2e_s), "output_tokens_per_s": self.output_tokens}
        return {
            "duration_s": duration_s,
            "num_requests": len(self.e2e_s) + self.num_refused,
            "num_ok": len(self.e2e_s),
            "num_failed": self.num_refused,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            **{name: count / duration_s if duration_s else None for name, count in rates.items()},
            "ttft_ms": in_ms(distribution(self.ttft_s)),
            "tpot_ms": in_ms(distribution(self.tpot_s)),
            "itl_ms": in_ms(self._gap_distribution()),
            "e2e_ms": in_ms(distribution(self.e2e_s)),
            "attainment": self.num_met / (self.num_met + self.num_missed) if self.num_met + self.num_missed else None,
        }

    def _gap_distribution(self) -> dict[str, float] | None:
        passed = np.cumsum(self.gaps)
        total = int(passed[-1])
        if not total:
            return None
        middles = SMALLEST_GAP_S * 2 ** ((np.arange(NUM_BINS) + 0.5) / BINS_PER_DOUBLING)
        percents = {f"p{percent}": total * percent / 100 for percent in (50, 90, 99)}
        found = {name: float(middles[np.searchsorted(passed, count)]) for name, count in percents.items()}
        largest = float(middles[np.flatnonzero(self.gaps)[-1]])
        return {"mean": float(self.gaps @ middles) / total, **found, "max": largest}


COUNTS = (
    "num_refused", "num_met", "num_missed", "prompt_tokens", "output_tokens", "cached_tokens", "num_preemptions",
    "num_steps",
)  # fmt: skip


def in_ms(found: dict[str, float] | None) -> dict[str, float] | None:
    return None if found is None else {name: 1e3 * value for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """What one process simulates: a server of `num_replicas` engines, and every `num_servers`-th request from the
    `number`-th on. `read` gives all requests."""

    profile: CapacityProfile
    make_policy: MakePolicy
    read: Callable[[], Iterable[TraceRequest]]
    num_replicas: int
    num_servers: int
    limits: Mapping[str, float]
    max_missed: float = math.inf  # the simulation ends when more requests have missed the limits

    def simulate(self, number: int) -> Totals:
        entries = islice(self.read(), number, None, self.num_servers)
        return Server(self).run(arrivals(entries))


@dataclass(frozen=True, slots=True, order=True)
class Event:
    """A request's first token or its end, which the router learns of at that time."""

    at_s: float
    name: str
    num_output: int | None = None  # of one that has ended


class Server:
    """Several engines and the router before them, on one clock."""

    def __init__(self, load: ServerLoad) -> None:
        sizes = load.profile.sizes
        num_blocks = sizes.num_blocks if sizes.prefix_cache else 0
        self.states = [ReplicaState(sizes.max_requests, num_blocks) for _ in range(load.num_replicas)]
        self.totals = Totals()
        self._router = Router(self.states, sizes.block_size)
        self._load = load
        self._events: list[Event] = []  # a heap
        self._pending: dict[int, SimulatedRequest] = {}  # without a first token
        self._engines = [
            Simulation(load.profile, load.make_policy(), on_end=self._on_end, on_step=state.measure)
            for state in self.states
        ]
        self._keeps_prefixes = sizes.prefix_cache
        if self._keeps_prefixes:
            self._report_prefixes()

    def run(self, load: Iterable[Arrival]) -> Totals:
        for number, arrival in enumerate(load):
            self._advance(arrival.at_s)
            index = self._router.choose(str(number), arrival.prompt, b"", arrival.output_tokens)
            assert index is not None, "simulated replicas are always ready"
            simulated = self._engines[index].add(arrival, number)
            if simulated.refused:
                self._router.end(str(number))
            else:
                self._pending[number] = simulated
            if self.totals.num_missed > self._load.max_missed:
                return self.totals
        self._advance(math.inf)
        self.totals.num_steps = sum(engine.num_steps for engine in self._engines)
        return self.totals

    def _advance(self, until_s: float) -> None:
        """All engines, and what the router has learned by then."""
        for engine in self._engines:
            engine.advance(until_s)
        for number in [number for number, simulated in self._pending.items() if simulated.times]:
            heappush(self._events, Event(self._pending.pop(number).times[0], str(number)))
        while self._events and self._events[0].at_s <= until_s:
            event = heappop(self._events)
            if event.num_output is None:
                self._router.begin(event.name)
            else:
                self._router.end(event.name, event.num_output)
        if self._keeps_prefixes:
            self._report_prefixes()

    def _report_prefixes(self) -> None:
        for engine, state in zip(self._engines, self.states, strict=True):
            changes = engine.scheduler.kv.tree.report_changes()
            state.publish(changes.published, changes.evicted)

    def _on_end(self, request: SimulatedRequest) -> None:
        self.totals.add(request, self._load.limits)
        if not request.refused:
            self._pending.pop(request.number, None)
            heappush(self._events, Event(request.times[-1], str(request.number), len(request.times)))


def simulate_servers(load: ServerLoad, num_processes: int | None = None) -> Totals:
    """All servers, in as many processes as there are cores."""
    num_processes = min(num_processes or usable_cores(), load.num_servers)
    numbers = range(load.num_servers)
    totals = Totals()
    if num_processes == 1:
        for number in numbers:
            totals.merge(load.simulate(number))
        return totals
    with get_context("spawn").Pool(num_processes, ignore_interrupts) as pool:  # the pool's end ends its processes
        for found in pool.imap_unordered(load.simulate, numbers):
            totals.merge(found)
    return totals


def ignore_interrupts() -> None:
    """Ctrl-C reaches this process too; the one that started it ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@dataclass(frozen=True, slots=True)
class PoissonLoad:
    """Requests of one kind at random times, made one by one."""

    rate: float
    count: int
    prompt_tokens: int
    output_tokens: int
    seed: int = 0

    def __call__(self) -> Iterator[TraceRequest]:
        return random_entries(self.rate, self.count, self.prompt_tokens, self.output_tokens, self.seed)


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """The requests of a trace."""

    entries: Sequence[TraceRequest]

    def __call__(self) -> Sequence[TraceRequest]:
        return self.entries
