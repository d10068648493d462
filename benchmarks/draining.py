"""A replica with many streams is drained: what moves, how long streams pause, and whether a token is computed twice.

    python benchmarks/draining.py [--streams 32] [--tokens 200] [--prompt 300]

Two replicas of the default model on this machine; some requests have 4 samples. All run on one replica, which is
drained when each has begun. The answers are compared with those of a run without the drain.
"""

from __future__ import annotations

import argparse
import asyncio
import random

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.fleet import Fleet, FleetCallbacks
from quire.store import resolve

MODEL = "smollm2:135m"


def make_groups(num_streams: int, num_prompt: int, max_tokens: int) -> list[list[Request]]:
    rng, groups, left = random.Random(1), [], num_streams
    while left:
        size = 4 if left % 16 == 0 and left >= 4 else 1
        prompt = [rng.randrange(100, 40_000) for _ in range(rng.randrange(num_prompt // 2, num_prompt))]
        params = SamplingParams(temperature=rng.choice([0.0, 0.8]), ignore_eos=True)
        group: list[Request] = []
        for sample in range(size):
            leader = group[0] if group else None
            name = f"{len(groups)}-{sample}"
            group.append(Request(name, prompt, params, seed=left, max_tokens=max_tokens, leader=leader))
        groups.append(group)
        left -= size
    return groups


async def collect(client: Fleet, group: list[Request], tokens: dict[str, list[int]]) -> None:
    async for updates in client.submit(group):
        for update in updates:
            tokens.setdefault(update.id, []).extend(update.tokens)


async def run(options: argparse.Namespace, *, drains: bool):
    computed: dict[int, int] = {}
    config = EngineConfig(device="cpu", max_len=1024, max_requests=options.streams, kv_memory=1.0, speculate="off")
    callbacks = FleetCallbacks(lambda outputs, replica: computed.update({replica: outputs.computed_tokens}))
    fleet = Fleet(config, resolve(MODEL).path, 2, callbacks=callbacks)
    await fleet.start()
    try:
        groups, tokens, report = make_groups(options.streams, options.prompt, options.tokens), {}, None
        await fleet.drain(0)
        working = [asyncio.ensure_future(collect(fleet, group, tokens)) for group in groups]
        while len(tokens) < options.streams:
            await asyncio.sleep(0.005)
        fleet.undrain(0)
        if drains:
            report = await fleet.drain(1)
        await asyncio.gather(*working)
    finally:
        await fleet.close()
    return tokens, sum(computed.values()), report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=300)
    options = parser.parse_args()
    expected, computed_undisturbed, _ = asyncio.run(run(options, drains=False))
    found, computed, report = asyncio.run(run(options, drains=True))
    different = sum(found[name] != tokens for name, tokens in expected.items())
    print(
        f"{report}\n{different} of {len(expected)} answers differ; "
        f"{computed - computed_undisturbed} tokens are computed again"
    )


if __name__ == "__main__":
    main()
