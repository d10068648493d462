"""Ranks against threads: the speed of an engine of N ranks, and of one process with as many threads.

    python benchmarks/tensor_parallel.py [--ranks 2] [--threads 2] [--batch 1,8,32] [--prompt-tokens 512] [--rounds 5]

The engines run in turns, so that a busy machine slows down both. Each number is the best of the rounds: tokens a second
of decoding with each batch size, and of one prompt. A factor is that of the ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from quire.bench.offline import run_batch
from quire.config import DEFAULT_MODEL, EngineConfig
from quire.engine.client import InProcess
from quire.kernels.isa import usable_cores
from quire.store import resolve

DECODED_TOKENS = 32
DECODE_PROMPT = 16


@dataclass(frozen=True, slots=True)
class Measure:
    name: str
    run: Callable[[InProcess], float]  # tokens a second


def decode(batch: int) -> Measure:
    def run(client: InProcess) -> float:
        found = run_batch(client, batch, DECODE_PROMPT, DECODED_TOKENS)
        return found.num_decoded / found.decode_s

    return Measure(f"decode, batch {batch}", run)


def prefill(num_tokens: int) -> Measure:
    return Measure(f"prompt of {num_tokens}", lambda client: num_tokens / run_batch(client, 1, num_tokens, 1).total_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of both engines, in all")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batch.split(",")]
    path = resolve(options.model).path
    clients = [
        InProcess(
            EngineConfig(
                model=options.model, device="cpu", threads=options.threads, tensor_parallel_size=size,
                prefix_cache=False, speculate="off", max_len=2048, max_requests=max(batches), kv_memory=0.5,
            ),
            path,
        )
        for size in (1, options.ranks)
    ]  # fmt: skip
    print(f"{options.model}, {options.threads} threads: 1 process, and {options.ranks} ranks")
    for measure in [*map(decode, batches), prefill(options.prompt_tokens)]:
        best = [0.0, 0.0]
        for _ in range(options.rounds):
            best = [max(so_far, measure.run(client)) for so_far, client in zip(best, clients, strict=True)]
        print(f"{measure.name:>16}  {best[0]:9.1f}  {best[1]:9.1f} tokens/s  {best[1] / best[0]:.3f}x", flush=True)
    for client in clients:
        client.close()


if __name__ == "__main__":
    main()
