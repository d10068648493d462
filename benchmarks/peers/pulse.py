"""The current speed of the machine: memory reads by numpy, fp32 products by torch. Runs as its own process.

    python -m peers.pulse THREADS

The figures are not upper bounds. They show whether an engine is slow or the machine has slowed down.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from quire.kernels import isa

BYTES_PER_THREAD = 1 << 27
SIDE = 768
BUDGET_S = 0.7


def best_of(work: Callable[[], object]) -> float:
    """Seconds of the fastest run within a small budget. The first run includes the setup and does not count."""
    work()
    end = time.perf_counter() + BUDGET_S
    best = float("inf")
    while time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best


def read_gb_per_s(threads: int) -> float:
    arrays = [np.ones(BYTES_PER_THREAD // 8, np.int64) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        read_s = best_of(lambda: list(pool.map(np.max, arrays)))
    return threads * BYTES_PER_THREAD / read_s / 1e9


def gflop_per_s(threads: int) -> float:
    torch.set_num_threads(threads)
    a, b = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)
    return 2 * SIDE**3 / best_of(lambda: a @ b) / 1e9


def main() -> None:
    threads = int(sys.argv[1])
    isa.prepare()
    print(json.dumps({"read_gb_per_s": read_gb_per_s(threads), "fp32_gflop_per_s": gflop_per_s(threads)}))


if __name__ == "__main__":
    main()
