"""The time of a routing decision, and the memory of the router after many requests.

    python benchmarks/routing.py [--replicas 8] [--blocks 100000] [--requests 1000000]

Prompts are conversations: 16 to 2,048 tokens whose first blocks are those of one of many published prefixes. The time
is the CPU time of `Router.choose`, of which most is hashing blocks.
"""

from __future__ import annotations

import argparse
import random
import resource
import time

from quire.core.routing import ReplicaState, Router, hash_blocks

BLOCK = 16


def published(rng: random.Random, num_blocks: int) -> list[list[int]]:
    """Prefixes that have as many blocks together."""
    prefixes = []
    while num_blocks > 0:
        length = rng.randrange(1, 129)
        prefixes.append([rng.randrange(50_000) for _ in range(length * BLOCK)])
        num_blocks -= length
    return prefixes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    arguments = parser.parse_args()
    rng = random.Random(1)
    states = [ReplicaState(256, arguments.blocks) for _ in range(arguments.replicas)]
    prefixes = []
    for state in states:
        own = published(rng, arguments.blocks)
        prefixes += own
        for prefix in own:
            state.publish(hash_blocks(prefix, b"", BLOCK), ())
    router, times, alive = Router(states, BLOCK), [], []
    memory = []
    for number in range(arguments.requests):
        prefix = rng.choice(prefixes)
        tokens = prefix[: rng.randrange(1, len(prefix))] + [rng.randrange(50_000) for _ in range(rng.randrange(1, 64))]
        begin = time.thread_time()
        router.choose(str(number), tokens, b"", 128)
        times.append(time.thread_time() - begin)
        alive.append(str(number))
        if len(alive) > 500:
            router.end(alive.pop(0), 128)
        if number % (arguments.requests // 10) == 0:
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    times.sort()
    p50, p99 = (1e6 * times[int(share * len(times))] for share in (0.5, 0.99))
    print(f"{arguments.replicas} replicas of {arguments.blocks:,} blocks, {arguments.requests:,} requests")
    print(f"a decision: p50 {p50:.0f} us, p99 {p99:.0f} us")
    print("peak memory, MiB: " + ", ".join(f"{each:.0f}" for each in memory))


if __name__ == "__main__":
    main()
