"""What a live view costs: the engine's thread with and without it, a server's work on it, and 50,000 blocks.

    python benchmarks/live_view.py [--model MODEL] [--batch 16] [--steps 400] [--waiting 32] [--json FILE]

Spells of steps with a view and without one alternate on one engine. `view` is the share of the steps' time that the
engine's thread spends in the view, as processor time and without the first message, a snapshot. `watched` compares the
times of steps, and needs a quiet machine. `server` is what a server spends on the changes, for one reader.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from arguments import count

from quire.config import DEFAULT_MODEL, EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.engine.client import InProcess
from quire.engine.engine import Engine
from quire.engine.messages import encode
from quire.engine.observer import Observer
from quire.engine.view import EngineView
from quire.server.console.live import INTERVAL_S
from quire.server.console.lives import Lives
from quire.server.console.mirror import Mirror
from quire.store import resolve

SPELL_STEPS = 40
Result = TypeVar("Result")


class Clock:
    """Processor time of the calling thread that functions have used."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def run(self, function: Callable[[], Result]) -> Result:
        begin_s = time.thread_time()
        try:
            return function()
        finally:
            self.seconds += time.thread_time() - begin_s


class TimedObserver(Observer):
    """Passes calls on to a view, and counts their time."""

    def __init__(self, view: EngineView, clock: Clock) -> None:
        for name in ("on_add", "on_abort", "on_plan", "on_commit", "on_fail", "on_reset"):
            setattr(self, name, self._timed(getattr(view, name), clock))

    @staticmethod
    def _timed(method: Callable[..., None], clock: Clock) -> Callable[..., None]:
        return lambda *values: clock.run(lambda: method(*values))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--batch", type=count, default=16)
    parser.add_argument("--steps", type=count, default=400, help="with a view, and as many without")
    parser.add_argument("--waiting", type=count, default=32, help="requests that wait meanwhile")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def add_requests(engine: Engine, batch: int, num_waiting: int, max_tokens: int) -> None:
    rng = random.Random(1)
    for number in range(batch + num_waiting):
        prompt = [rng.randrange(100, 20_000) for _ in range(64)]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        engine.add(Request(f"0:r{number}", prompt, params, max_tokens=max_tokens))


def measure(engine: Engine, steps: int) -> dict[str, float]:
    """Alternate spells of steps. Their first step is not counted: it may wait for one of the spell before."""
    times: dict[bool, list[float]] = {True: [], False: []}
    view_clock, server_clock, watched_s, num_messages, num_bytes = Clock(), Clock(), 0.0, 0, 0
    mirror, lives, totals = Mirror(0), Lives(), dict.fromkeys(("requests_running", "requests_waiting"), 0.0)
    for spell in range(2 * steps // SPELL_STEPS):
        is_watched = spell % 2 == 0
        view = EngineView(engine, INTERVAL_S) if is_watched else None
        if view is not None:
            engine.observers[-1] = TimedObserver(view, view_clock)
        for step in range(SPELL_STEPS):
            begin_s = time.perf_counter()
            engine.step()
            if view is not None and view.due_in_s() == 0:
                clock = view_clock if step else Clock()
                changes = clock.run(view.take_changes)
                num_bytes += len(clock.run(lambda changes=changes: encode(changes)))
                num_messages += 1
                apply_s = time.perf_counter()
                server_clock.run(lambda changes=changes: serve(changes, mirror, lives, totals))
                begin_s += time.perf_counter() - apply_s  # another process does this
            if step:
                times[is_watched].append(time.perf_counter() - begin_s)
            watched_s += is_watched * (time.perf_counter() - begin_s)
        if view is not None:
            engine.observers.pop()
            engine.scheduler.kv.pool.changed = None
    return {
        "step_ms": 1e3 * median(times[False]),
        "watched_step_ms": 1e3 * median(times[True]),
        "watched": median(times[True]) / median(times[False]) - 1,
        "view": view_clock.seconds / watched_s,
        "server": server_clock.seconds / watched_s,
        "messages_per_s": num_messages / watched_s,
        "kilobytes_per_s": num_bytes / 1e3 / watched_s,
    }


def serve(changes: Any, mirror: Mirror, lives: Lives, totals: dict[str, float]) -> None:
    mirror.apply(changes, totals)
    lives.add(changes, 0)
    _ = mirror.deltas[-1].line(None) if mirror.deltas else mirror.snapshot(None)


def measure_blocks(num_blocks: int) -> dict[str, float]:
    """A full pool: the view's snapshot, a message after 64 requests have grown, and the server's snapshot."""
    scheduler = Scheduler(num_blocks, 16, 16384, 64)
    length = 16 * (num_blocks // 64) - 32
    for number in range(64):
        scheduler.add(Request(f"0:r{number}", range(number, number + length), max_tokens=16))
    while any(len(each.tokens) > each.num_planned for each in scheduler.requests.values()):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler._in_flight.clear()
        for request in plan.requests:
            request.num_in_flight = request.num_expected = 0
            request.num_computed = request.num_planned
    engine: Any = SimpleNamespace(scheduler=scheduler, observers=[], info=SimpleNamespace(device="cpu"), costs=None)
    view, mirror = EngineView(engine, 0.0), Mirror(0)
    snapshot, delta, server = Clock(), Clock(), Clock()
    changes = snapshot.run(view.take_changes)
    mirror.apply(changes, {})
    line = server.run(lambda: mirror.snapshot(None))
    assert scheduler.kv.pool.changed is not None
    scheduler.kv.pool.changed |= {each.tables[0][-1] for each in scheduler.running if each.tables[0][-1] is not None}
    delta.run(view.take_changes)
    return {
        "blocks": num_blocks,
        "snapshot_ms": 1e3 * snapshot.seconds,
        "delta_ms": 1e3 * delta.seconds,
        "server_snapshot_ms": 1e3 * server.seconds,
        "server_snapshot_kilobytes": len(line) / 1e3,
    }


def main() -> None:
    options = parse()
    config = EngineConfig.of({
        "model": options.model, "max_requests": options.batch, "max_len": 2048, "speculate": "off",
    })  # fmt: skip
    client = InProcess(config, resolve(options.model).path)
    engine = client.engine
    add_requests(engine, options.batch, options.waiting, 2 * options.steps + 200)
    for _ in range(20):
        engine.step()
    found = measure(engine, options.steps) | measure_blocks(50_000)
    for name, value in found.items():
        print(f"{name:>28}: {value:.2%}" if name in ("watched", "view", "server") else f"{name:>28}: {value:,.2f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
