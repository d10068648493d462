"""Memory that `quire plan` predicts against the resident memory of engines, each in a process of its own.

    python benchmarks/plan_memory.py smollm2:135m other.gguf [--kv-dtype float32] [--max-len 2048]

An engine answers as many requests at once as it runs, with sampling, then one of 8,000 tokens at most. The cache counts
with the blocks that have been used: a block takes memory when it is first written.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
from pathlib import Path

from quire.cli.options import add_engine_options, engine_config
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.client import InProcess
from quire.store import resolve

MIB = 1 << 20
OUTPUT_TOKENS = 24  # so that all requests decode at once


def resident_bytes() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, "this needs Linux"
    return 1024 * int(found[1])


def run_engine(arguments: argparse.Namespace) -> None:
    """In the child: loads, answers, and prints what it takes."""
    config = engine_config(arguments)
    client = InProcess(config, resolve(config.model).path)
    stages = []
    scheduler, info = client.engine.scheduler, client.info
    for name, count, prompt_tokens in (
        ("batch", scheduler.max_requests, min(40, info.max_len - OUTPUT_TOKENS)),
        ("longest", 1, info.max_len - OUTPUT_TOKENS),
    ):
        answer(client, count, min(prompt_tokens, 8000))
        used = sum(number > 0 for number in scheduler.kv.pool.num_allocations)
        stages.append((name, resident_bytes(), used * info.cache.block_bytes))
    print(json.dumps(stages))


def answer(client: InProcess, count: int, prompt_tokens: int) -> None:
    rng, vocabulary = random.Random(count), client.info.config.vocab_size
    params = SamplingParams(temperature=1.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)  # greedy rows need no logits
    for number in range(count):
        prompt = [rng.randrange(vocabulary) for _ in range(prompt_tokens)]
        client.add(Request(f"{count} {number}", prompt, params, max_tokens=OUTPUT_TOKENS))
    while client.engine.has_work:
        client.step()


def compare(model: str, options: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    config = engine_config(parser.parse_args([model, *options]))
    command = [sys.executable, __file__, "--child", model, *options]
    stages = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    plan = [sys.executable, "-m", "quire", "plan", model, *options, "--json"]
    memory = json.loads(subprocess.run(plan, capture_output=True, text=True, check=True).stdout)["memory"]
    for name, measured, cache in stages:
        predicted = memory["idle_bytes"] + cache
        both = f"{predicted / MIB:>10,.1f} MiB predicted{measured / MIB:>10,.1f} measured"
        print(f"{config.model[-40:]:<42}{name:<10}{both}{100 * (predicted / measured - 1):>+8.1f}%", flush=True)


def main() -> None:
    if "--child" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--child", action="store_true")
        add_engine_options(parser)
        run_engine(parser.parse_args())
        return
    models = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    first = next((index for index, argument in enumerate(sys.argv[1:]) if argument.startswith("-")), len(sys.argv) - 1)
    options = sys.argv[1 + first :]
    for model in models[:first] or ["smollm2:135m"]:
        compare(model, options)


if __name__ == "__main__":
    main()
