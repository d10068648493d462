"""The cost of planning: milliseconds of Python per step, for a constant batch of running requests, without a model.

    python benchmarks/scheduler.py [--requests 256] [--context 1024] [--steps 400]

One step is `schedule()` plus `commit()`. Prompts have random lengths around --context. Requests decode one token a step
and never end. The cache is large enough for all of them. So every step plans every request, and some need a new block.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from quire.core.params import SamplingParams
from quire.core.plan import Sampled
from quire.core.request import Request
from quire.core.scheduler import Scheduler


def build(num_requests: int, context: int, num_steps: int) -> Scheduler:
    rng = random.Random(0)
    longest = 2 * context + num_steps + 16
    scheduler = Scheduler(num_requests * (longest // 16 + 2), 16, max(8192, num_requests), num_requests)
    for number in range(num_requests):
        prompt = [rng.randrange(50_000) for _ in range(rng.randint(context // 2, 3 * context // 2))]
        scheduler.add(Request(str(number), prompt, SamplingParams(max_tokens=None), max_tokens=num_steps + context))
    return scheduler


def step(scheduler: Scheduler) -> tuple[float, float, int]:
    begin = time.perf_counter()
    plan = scheduler.schedule()
    planned = time.perf_counter()
    assert plan is not None
    sampled = Sampled([[7] if num_yields else [] for num_yields in plan.yields])
    sampled_at = time.perf_counter()
    scheduler.commit(plan, sampled)
    return planned - begin, time.perf_counter() - sampled_at, len(plan)


def measure(num_requests: int, context: int, num_steps: int) -> dict[str, float]:
    scheduler = build(num_requests, context, num_steps)
    while any(request.num_output == 0 for request in scheduler.requests.values()):
        step(scheduler)
    times = [step(scheduler) for _ in range(num_steps)]
    assert all(rows == num_requests for _, _, rows in times)
    schedule = [1e3 * t for t, _, _ in times]
    commit = [1e3 * t for _, t, _ in times]
    total = [a + b for a, b in zip(schedule, commit, strict=True)]
    return {
        "requests": num_requests,
        "context": context,
        "schedule_ms": round(statistics.median(schedule), 4),
        "commit_ms": round(statistics.median(commit), 4),
        "step_ms": round(statistics.median(total), 4),
        "step_p99_ms": round(statistics.quantiles(total, n=100)[98], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.requests, arguments.context, arguments.steps)))


if __name__ == "__main__":
    main()
