"""The time of quire's own CPU kernels from logits to tokens: sampling and log probabilities.

    python benchmarks/sample.py [--rows 1,8,32] [--threads 1,2] [--vocab 49152] [--repeats 200]

Logits are normal noise with a standard deviation of 2.5 and one likelier token a row: `peaked` rows give it about half
of the probability, `flat` rows have none. A figure is the best of all repeats, in milliseconds.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quire.kernels import isa
from quire.kernels.cpu.native import Missing, Native, find

SETTINGS = {  # temperature, top-k, top-p, min-p's floor
    "greedy": (0.0, 0, 1.0, -math.inf),
    "temperature 1": (1.0, 0, 1.0, -math.inf),
    "temperature 0.8, top-p 0.95": (0.8, 0, 0.95, -math.inf),
    "top-k 40": (1.0, 40, 1.0, -math.inf),
    "min-p 0.05": (1.0, 0, 1.0, math.log(0.05)),
}


def make_logits(rows: int, vocab: int, is_peaked: bool) -> NDArray[np.float32]:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2.5, (rows, vocab)).astype(np.float32)
    if is_peaked:
        logits[:, rng.integers(0, vocab)] = np.log(np.exp(logits.astype(np.float64)).sum(1)) + 0.5
    return logits


def sample(native: Native, logits: NDArray[np.float32], setting: tuple[float, ...]) -> Callable[[], None]:
    rows, size = logits.shape
    settings, numbers = np.tile(np.array(setting, np.float64), (rows, 1)), np.arange(rows)
    tokens, largest = np.zeros(rows, np.int64), np.zeros(rows, np.float32)

    def run() -> None:
        native.module.sample(
            native.isa, native.threads, (logits.ctypes.data, size), rows, size,
            *(each.ctypes.data for each in (settings, numbers, numbers, tokens, largest)),
        )  # fmt: skip

    return run


def logprobs(native: Native, logits: NDArray[np.float32], num_top: int) -> Callable[[], None]:
    rows, size = logits.shape
    tokens, ranks, values = np.zeros(rows, np.int64), np.zeros(rows, np.int64), np.zeros(rows, np.float32)
    top, top_values = np.zeros((rows, num_top), np.int64), np.zeros((rows, num_top), np.float32)

    def run() -> None:
        native.module.logprobs(
            native.isa, native.threads, (logits.ctypes.data, size), rows, size, tokens.ctypes.data, num_top,
            *(each.ctypes.data for each in (values, ranks, top, top_values)),
        )  # fmt: skip

    return run


def best_ms(run: Callable[[], None], repeats: int) -> float:
    best = math.inf
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return 1e3 * best


def report(native: Native, row_counts: list[int], vocab: int, repeats: int) -> None:
    print(f"\n{native.isa}, threads {native.threads}; ms for rows: {', '.join(map(str, row_counts))}")
    for is_peaked in (True, False):
        logits = make_logits(max(row_counts), vocab, is_peaked)
        label = "peaked" if is_peaked else "flat"
        for name, setting in SETTINGS.items():
            times = [best_ms(sample(native, logits[:rows], setting), repeats) for rows in row_counts]
            print(f"{label:8}{name:30}" + "".join(f"{value:9.3f}" for value in times))
        times = [best_ms(logprobs(native, logits[:rows], min(20, vocab)), repeats) for rows in row_counts]
        print(f"{label:8}{'log probabilities, top 20':30}" + "".join(f"{value:9.3f}" for value in times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=200)
    arguments = parser.parse_args()
    for threads in map(int, arguments.threads.split(",")):
        native = find(isa.prepare(), threads)
        if isinstance(native, Missing):
            raise SystemExit(f"There is nothing to measure: {native.reason}.")
        report(native, [int(rows) for rows in arguments.rows.split(",")], arguments.vocab, arguments.repeats)


if __name__ == "__main__":
    main()
