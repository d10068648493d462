"""Limits: what this machine reads from memory and multiplies in a second, at best, by the means that the engine has.

`quire bench phases` draws them as a roofline. Both are the best of many short runs, so that other programs disturb them
little, and both depend on nothing that a step does besides.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quire.config import EngineConfig
from quire.engine.backend import find_native
from quire.engine.engine import EngineInfo
from quire.kernels import isa
from quire.kernels.cpu.native import Native
from quire.quant.panels import PanelWeight, rounded_format
from quire.weights.matrices import describe_matrices

BYTES_PER_THREAD = 1 << 26  # more than a core's share of the caches
GPU_BYTES = 1 << 28
SIDE, ROWS = 2048, 256  # of a matrix, and rows that are multiplied with it
GPU_SIDE = 4096
BUDGET_S = 0.5


@dataclass(frozen=True, slots=True)
class Limits:
    """The best that was measured, and how."""

    read_gb_per_s: float
    gflop_per_s: float
    read_by: str
    products_by: str

    def best(self, other: Limits) -> Limits:
        """The larger of two measurements by the same means: other programs make both smaller."""
        read, products = max(self.read_gb_per_s, other.read_gb_per_s), max(self.gflop_per_s, other.gflop_per_s)
        return replace(self, read_gb_per_s=read, gflop_per_s=products)


def measure_limits(config: EngineConfig, info: EngineInfo, path: Path) -> Limits:
    """Called while the engine has no requests."""
    if info.device != "cpu":
        return gpu_limits()
    native = find_native(config, info.config, "float32", "cpu")
    if isinstance(native, Native):
        return native_limits(native, common_format(config, native, path))
    return torch_limits(config.threads or isa.read_cpu().cores)


def best_s(work: Callable[[], object]) -> float:
    """Seconds of the fastest run. The first run does not count."""
    work()
    end_s, best = time.perf_counter() + BUDGET_S, float("inf")
    while time.perf_counter() < end_s:
        begin_s = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin_s)
    return best


def native_limits(native: Native, format: str) -> Limits:
    weight = PanelWeight([native.module.Panels(format, SIDE, SIDE)], native)
    x, out = np.zeros((ROWS, SIDE), np.float32), np.empty((ROWS, SIDE), np.float32)
    seconds = best_s(lambda: weight.multiply(x, out))
    return Limits(
        read_gb_per_s(native.threads),
        2 * ROWS * SIDE * SIDE / seconds / 1e9,
        read_by(native.threads),
        f"{ROWS} rows times {SIDE:,} x {SIDE:,} in {format}, as most of the model is, on {native.threads} threads",
    )


def common_format(config: EngineConfig, native: Native, path: Path) -> str:
    """The format of panels that most bytes of the model are in."""
    quantize = None if config.quantize == "none" else config.quantize
    if config.weights == "random":
        return rounded_format("f32", "model.layers.0", SIDE, quantize)
    sizes: Counter[str] = Counter()
    for matrix in describe_matrices(path, native):
        sizes[rounded_format(matrix["panels"], matrix["name"], matrix["shape"][1], quantize)] += matrix["bytes"]
    return sizes.most_common(1)[0][0]


def read_gb_per_s(threads: int) -> float:
    """numpy finds the largest of many numbers, in each thread of its own array."""
    arrays = [np.ones(BYTES_PER_THREAD // 8, np.int64) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        seconds = best_s(lambda: list(pool.map(np.max, arrays)))
    return threads * BYTES_PER_THREAD / seconds / 1e9


def read_by(threads: int) -> str:
    return f"the largest number of {BYTES_PER_THREAD >> 20} MiB in each of {threads} threads"


def torch_limits(threads: int) -> Limits:
    import torch

    a, b = torch.zeros(SIDE, SIDE), torch.zeros(ROWS, SIDE)
    seconds = best_s(lambda: b @ a)
    gflop_per_s = 2 * ROWS * SIDE * SIDE / seconds / 1e9
    return Limits(
        read_gb_per_s(threads), gflop_per_s, read_by(threads), f"{ROWS} rows times {SIDE:,} x {SIDE:,} in float32"
    )


def gpu_limits() -> Limits:
    import torch

    data = torch.zeros(GPU_BYTES // 8, dtype=torch.int64, device="cuda")
    a = torch.zeros(GPU_SIDE, GPU_SIDE, dtype=torch.bfloat16, device="cuda")

    def timed(work: Callable[[], object]) -> float:
        def run() -> None:
            work()
            torch.cuda.synchronize()

        return best_s(run)

    read_s, product_s = timed(data.amax), timed(lambda: a @ a)
    return Limits(
        GPU_BYTES / read_s / 1e9,
        2 * GPU_SIDE**3 / product_s / 1e9,
        f"the largest number of {GPU_BYTES >> 20:,} MiB",
        f"{GPU_SIDE:,} x {GPU_SIDE:,} times the same in bfloat16",
    )
