"""The time of verifying drafts on one GPU: attention of n queries a row, and whole steps. Llama-3-8B's shapes, bf16.

    python benchmarks/verify.py [--batches 1,16,64] [--contexts 512,4096] [--queries 1,2,4,6,8,16] [--steps]

Attention is timed in a captured graph of as many layers as fill more than the GPU's L2 cache, each with its own cache.
It is compared with the kernel for single queries over the same contexts, with `varlen`, and with the bytes of keys and
values at 4.2 TB/s. `--steps` times whole steps of an engine instead. Their drafts are random tokens, so nearly all are
wrong, which costs the same. Times are medians: on the GPU from a step's first kernel to the copy of its tokens, and
with the host from one step to the next. Steps of one query overlap with the host, those of drafts do not.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import gpu
import torch
import traffic
from limits import replay

from quire.core.plan import Plan
from quire.engine.gpu_graphs import Key
from quire.engine.gpu_runner import GpuRunner
from quire.engine.runner import RunningStep
from quire.kernels.cuda.attention.decode import decode_attention
from quire.kernels.cuda.attention.dispatch import Work, find_items, find_splits
from quire.kernels.cuda.attention.scoring import Scoring
from quire.kernels.cuda.attention.varlen import varlen_attention
from quire.kernels.cuda.attention.verify import round_queries, verify_attention
from quire.kernels.paging import LayerCache, Paging

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
BYTES = 4.2e12  # a second
L2_BYTES = 60e6
WARMUP_STEPS, TIMED_STEPS = 8, 40


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


class Rows:
    """Rows of `queries` tokens at the end of contexts of one length, in as many layers as do not fit into the L2."""

    def __init__(self, batch: int, context: int, queries: int) -> None:
        num_blocks = -(-context // PAGE)
        self.bytes = 2 * 2 * batch * context * KV_HEADS * DIM
        num_layers = max(2, min(64, int(3 * L2_BYTES / self.bytes)))
        shape = (num_layers, batch * num_blocks, KV_HEADS, PAGE, DIM)
        k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in "kv")
        self.caches = [LayerCache(k[layer], v[layer], 0, PAGE) for layer in range(num_layers)]
        starts = list(range(0, batch * queries + 1, queries))
        blocks = torch.randperm(batch * num_blocks, dtype=torch.int32, device="cuda").view(batch, num_blocks)
        as_tensor = {"dtype": torch.int32, "device": "cuda"}
        self.paging = Paging(
            torch.tensor(starts, **as_tensor), torch.full((batch,), context, **as_tensor), [blocks], [], PAGE, starts,
            [context] * batch,
        )  # fmt: skip
        self.q = torch.randn(batch * queries, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty_like(self.q)
        self.scoring = Scoring(DIM**-0.5, None, None, None)

    def time_us(self, attend: Callable[[LayerCache], None]) -> float:
        """Microseconds of one layer."""

        def run() -> None:
            for cache in self.caches:
                attend(cache)

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay(graph, 3)
        rounds = 1 + int(20 / replay(graph, 1))
        return 1e3 * min(replay(graph, rounds) for _ in range(3)) / (rounds * len(self.caches))


def time_verify(rows: Rows, queries: int) -> float:
    work = Work(True, False, max_queries=round_queries(queries))
    splits = find_splits(work, rows.paging, None, HEADS // KV_HEADS, KV_HEADS, exact=False)
    if queries == 1:
        return rows.time_us(lambda cache: decode_attention(rows.q, cache, rows.paging, splits, rows.out, rows.scoring))
    return rows.time_us(
        lambda cache: verify_attention(
            rows.q, cache, rows.paging, splits, rows.out, rows.scoring, max_queries=work.max_queries
        )
    )


def time_varlen(rows: Rows) -> float:
    items = find_items(Work(False, True), rows.paging, None, rows.q, rows.caches[0])
    return rows.time_us(lambda cache: varlen_attention(rows.q, cache, rows.paging, items, rows.out, rows.scoring))


def attention_table(batches: list[int], contexts: list[int], nums_queries: list[int]) -> str:
    lines = [
        "| batch | context | queries | attention | against one query | varlen | bytes at 4.2 TB/s | times that |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for batch in batches:
        for context in contexts:
            single = time_verify(Rows(batch, context, 1), 1)
            for queries in nums_queries:
                rows = Rows(batch, context, queries)
                taken = single if queries == 1 else time_verify(rows, queries)
                varlen = "" if queries == 1 else f"{time_varlen(rows):.1f} us"
                limit = 1e6 * rows.bytes / BYTES
                lines.append(
                    f"| {batch} | {context:,} | {queries} | {taken:.1f} us | {taken / single:.2f} | {varlen} "
                    f"| {limit:.1f} us | {taken / limit:.2f} |"
                )
    return "\n".join(lines)


class TimedRunner:
    """A runner that marks the beginning of a step's graph and the end of the step in the GPU's stream."""

    def __init__(self, runner: GpuRunner, depth: int) -> None:
        self._runner = runner
        self.depth = depth
        self.steps: list[tuple[Key, torch.cuda.Event, torch.cuda.Event]] = []  # the graph, beginning and end
        self._replay = runner.graphs.replay

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: Plan, is_behind: bool = False) -> RunningStep:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def replay(key: Key) -> torch.Tensor:
            begin.record()
            self.steps.append((key, begin, end))
            return self._replay(key)

        self._runner.graphs.replay = replay
        running = self._runner.launch(plan, is_behind)
        end.record()
        self._runner.graphs.replay = self._replay
        return running


def time_steps(bench: gpu.Bench, batch: int, context: int, queries: int) -> tuple[float, float]:
    """Milliseconds of a step of `batch` rows of that many queries: on the GPU, and from one call to the next."""
    client = bench.client
    engine = client.engine
    rng = random.Random(queries)
    for number in range(batch):
        prompt = traffic.random_prompt(rng, context)
        client.add(traffic.make_request(f"{batch} {context} {queries} {number}", prompt, 300))
    while engine.scheduler.num_waiting or any(not request.num_output for request in engine.scheduler.running):
        client.step()
    runner = engine.runner
    timed = engine.runner = TimedRunner(runner, 1 if queries > 1 else runner.depth)
    gaps_ms = []
    while len(timed.steps) < WARMUP_STEPS + TIMED_STEPS:
        before = time.perf_counter()
        for request in engine.scheduler.running if queries > 1 else ():
            request.drafts = traffic.random_prompt(rng, queries - 1)
        client.step()
        gaps_ms.append(1e3 * (time.perf_counter() - before))
        while len(timed.steps) < WARMUP_STEPS and runner.idle(1e9):  # capture what was missed
            pass
    engine.runner = runner
    for request in [*engine.scheduler.running]:
        client.abort(request.id)
    while engine.has_work:
        client.step()
    torch.cuda.synchronize()
    print(Counter(key for key, _, _ in timed.steps), file=sys.stderr)
    times_ms = [begin.elapsed_time(end) for _, begin, end in timed.steps[-TIMED_STEPS:]]
    return statistics.median(times_ms), statistics.median(gaps_ms[-TIMED_STEPS:])


def step_table(options: argparse.Namespace) -> str:
    bench = gpu.make_offline(options, 128, 8192)
    lines = [
        "| batch | context | queries | on the GPU | against one query | with the host | against one query |",
        "|---|---|---|---|---|---|---|",
    ]
    for batch in options.batches:
        for context in options.contexts:
            single = time_steps(bench, batch, context, 1)
            for queries in options.queries:
                taken = single if queries == 1 else time_steps(bench, batch, context, queries)
                columns = (f"{a:.2f} ms | {a / b:.3f}" for a, b in zip(taken, single, strict=True))
                lines.append(f"| {batch} | {context:,} | {queries} | {' | '.join(columns)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=numbers, default=[1, 16, 64])
    parser.add_argument("--contexts", type=numbers, default=[512, 4096])
    parser.add_argument("--queries", type=numbers, default=[1, 2, 4, 6, 8, 16])
    parser.add_argument("--steps", action="store_true", help="whole steps instead of attention")
    parser.set_defaults(sampling={}, exact=False)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use")
    gc.freeze()
    if options.steps:
        print(step_table(options))
    else:
        print(attention_table(options.batches, options.contexts, options.queries))


if __name__ == "__main__":
    main()
