"""Continuous, static and dynamic batching under the same load: requests of mixed length that arrive at random times.

    python benchmarks/batching.py [--model smollm2:135m] [--requests 32] [--rate 4] [--batch-size 8]

The three differ in when a waiting request may join the batch. Scheduler, runner and answers are the same. Prompts have
8 to 64 random tokens, answers 4 to 64. Arrivals are a Poisson process of --rate requests a second.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.client import InProcess
from quire.store import resolve


def workload(count: int, rate: float, vocabulary: int) -> list[tuple[float, Request]]:
    rng = random.Random(5)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
    arrival, work = 0.0, []
    for number in range(count):
        prompt = [rng.randrange(vocabulary) for _ in range(rng.randint(8, 64))]
        work.append((arrival, Request(str(number), prompt, params, max_tokens=rng.randint(4, 64))))
        arrival += rng.expovariate(rate)
    return work


def serve(
    client: InProcess, work: list[tuple[float, Request]]
) -> tuple[float, list[float], list[float], dict[str, list[int]]]:
    """Total seconds, each request's seconds to its first token and to its end, and the answers."""
    begin = time.perf_counter()
    waiting, arrivals = list(work), {request.id: arrival for arrival, request in work}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    while len(last) < len(work):
        now = time.perf_counter() - begin
        while waiting and waiting[0][0] <= now:
            client.add(waiting.pop(0)[1])
        for update in client.step():
            now = time.perf_counter() - begin
            first.setdefault(update.id, now - arrivals[update.id])
            if update.finish:
                last[update.id] = now - arrivals[update.id]
    answers = {request.id: request.tokens[request.num_prompt :] for _, request in work}
    return time.perf_counter() - begin, list(first.values()), list(last.values()), answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2:135m")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args()
    path = resolve(options.model).path
    print(f"{'batching':<12}{'tokens/s':>10}{'first token p50':>17}{'end p50':>10}{'end p99':>10}")
    seen = []
    for batching in ("continuous", "static", "dynamic"):
        config = EngineConfig(
            model=options.model, batching=batching, batch_size=options.batch_size, max_requests=options.batch_size,
            batch_wait=0.5, prefix_cache=False, max_len=256,
        )  # fmt: skip
        client = InProcess(config, path)
        work = workload(options.requests, options.rate, client.info.config.vocab_size)
        total_s, first, last, answers = serve(client, work)
        seen.append(answers)
        count = sum(len(tokens) for tokens in answers.values())
        worst = statistics.quantiles(last, n=100)[98]
        print(
            f"{batching:<12}{count / total_s:>10.1f}{statistics.median(first):>15.2f} s"
            f"{statistics.median(last):>8.2f} s{worst:>8.2f} s"
        )
    print("answers are", "the same" if all(answers == seen[0] for answers in seen) else "DIFFERENT")


if __name__ == "__main__":
    main()
