"""The cost per token of each layer around the engine: the same load on the engine alone, and on its own process.

    python benchmarks/hop.py [--streams 16] [--num-requests 64] [--output-tokens 64]

Closed loop, random token ids, greedy. `engine` runs in this process. `process` is the supervisor's client with the
engine in its own process, without text. `quire bench serve` measures HTTP (benchmarks/serve_peers.py). Rounds
alternate, because the machine's speed may change.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.client import InProcess
from quire.engine.supervisor import Supervised
from quire.store import resolve

PROMPT_TOKENS = 115


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def make_requests(options: argparse.Namespace, name: str) -> list[Request]:
    rng = random.Random(1)
    params = SamplingParams(temperature=0.0, max_tokens=options.output_tokens, ignore_eos=True)
    return [
        Request(
            f"{name}{number}",
            [rng.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)],
            params,
            max_tokens=options.output_tokens,
        )
        for number in range(options.num_requests)
    ]


def run_engine(client: InProcess, options: argparse.Namespace, name: str) -> float:
    waiting, num_open = make_requests(options, name), 0
    begin = time.perf_counter()
    while waiting or num_open:
        while waiting and num_open < options.streams:
            client.add(waiting.pop())
            num_open += 1
        num_open -= sum(update.finish is not None for update in client.step())
    return time.perf_counter() - begin


async def run_process(client: Supervised, options: argparse.Namespace, name: str) -> float:
    waiting = make_requests(options, name)

    async def stream() -> None:
        while waiting:
            async for _ in client.submit([waiting.pop()]):
                pass

    begin = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(options.streams)))
    return time.perf_counter() - begin


async def main() -> None:
    options = parse()
    path = resolve("smollm2:135m").path
    config = EngineConfig(prefix_cache=False, kv_memory=1.0)
    alone, behind = InProcess(config, path), Supervised(config, path)
    await behind.start()
    times: dict[str, list[float]] = {"engine": [], "process": []}
    for number in range(options.rounds + 1):
        for name, seconds in (
            ("engine", run_engine(alone, options, f"e{number}-")),
            ("process", await run_process(behind, options, f"p{number}-")),
        ):
            if number:  # the first round warms up
                times[name].append(seconds)
    await behind.close()
    num_tokens = options.num_requests * options.output_tokens
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, seconds in medians.items():
        print(f"{name}: {num_tokens / seconds:.0f} tok/s, {1e6 * seconds / num_tokens:.0f} us a token")
    print(f"the hop: {1e6 * (medians['process'] - medians['engine']) / num_tokens:.0f} us a token")


if __name__ == "__main__":
    asyncio.run(main())
