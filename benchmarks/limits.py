"""The time of steps under real traffic, compared with the least time that their products and their attention need.

    python benchmarks/limits.py [--rate 30] [--seconds 20] [--exact] [--itl-target-ms MS] [--trace]

Poisson arrivals on Llama-3-8B's shapes, as in `gpu.py`, after a warmup. Each step is timed by GPU events, so gaps in
which the GPU waits for the host count. The limit of a step is the time of its products plus that of its attention.
Products are those of cuBLAS for as many tokens. They are repeated for a third of a second, so that the GPU's power
limits its clock as under traffic. Attention has 650 TFLOP/s for chunks of prompts, and 4.2 TB/s for keys and values
that single queries read. `--trace` also lists the kernels of one step of 64 single tokens and a prompt of 540, and the
time without a kernel.
"""

from __future__ import annotations

import argparse
import gc
import random
from bisect import bisect_left
from typing import Any, NamedTuple

import gpu
import numpy as np
import torch
import traffic
from arguments import milliseconds, positive

from quire.core.plan import Plan
from quire.engine.runner import Runner, RunningStep

SHAPE = gpu.LLAMA_3_8B
HIDDEN, INNER, NUM_LAYERS = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_hidden_layers"]
HEAD_DIM = HIDDEN // SHAPE["num_attention_heads"]
KV_WIDTH = HEAD_DIM * SHAPE["num_key_value_heads"]
LAYER = ((HIDDEN + 2 * KV_WIDTH, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))  # outputs, inputs
HEAD = (SHAPE["vocab_size"], HIDDEN)
SIZES = (1, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
TIMED_LAYERS = 4  # their weights do not fit into the GPU's L2 cache
TIMED_MS = 330.0
FLOPS, BYTES = 650e12, 4.2e12  # a second
CLASSES = (256, 512, 1024, 2048, 8192)  # steps with prompts, by tokens


class Timed(NamedTuple):
    plan: Plan
    begin: torch.cuda.Event
    end: torch.cuda.Event


class TimedRunner:
    """A runner that marks the beginning and the end of each step in the GPU's stream."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.steps: list[Timed] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: Plan, is_behind: bool = False) -> RunningStep:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        running = self._runner.launch(plan, is_behind)
        end.record()
        self.steps.append(Timed(plan, begin, end))
        return running


def time_products(shapes: tuple[tuple[int, int], ...], num_tokens: int, copies: int) -> float:
    """Milliseconds of the products of one layer, or of the head, as a captured step runs them."""
    weights = [
        [torch.randn(*shape, dtype=torch.bfloat16, device="cuda") * 0.02 for shape in shapes] for _ in range(copies)
    ]
    inputs = [torch.randn(num_tokens, shape[1], dtype=torch.bfloat16, device="cuda") for shape in shapes]

    def run() -> None:
        for layer in weights:
            for weight, x in zip(layer, inputs, strict=True):
                torch.mm(x, weight.t())

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay(graph, 1)
    rounds = 1 + int(TIMED_MS / replay(graph, 1))
    return replay(graph, rounds) / (rounds * copies)


def replay(graph: torch.cuda.CUDAGraph, rounds: int) -> float:
    """Milliseconds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(rounds):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


class Limits:
    """The least time of a step, in milliseconds."""

    def __init__(self) -> None:
        self._layers = [NUM_LAYERS * time_products(LAYER, size, TIMED_LAYERS) for size in SIZES]
        self._heads = [time_products((HEAD,), size, 1) for size in SIZES if size <= 512]

    def products(self, plan: Plan) -> float:
        layers = np.interp(plan.num_tokens, SIZES, self._layers)
        return float(layers + np.interp(sum(plan.yields), SIZES[: len(self._heads)], self._heads))

    def attention(self, plan: Plan) -> float:
        flops = read = 0.0
        for start, count in zip(plan.starts, plan.counts, strict=True):
            if count == 1:
                read += 2 * 2 * KV_WIDTH * NUM_LAYERS * (start + 1)
            else:
                flops += 4 * HIDDEN * NUM_LAYERS * count * (start + count / 2)
        return 1e3 * (flops / FLOPS + read / BYTES)


def classify(plan: Plan) -> str:
    if plan.num_tokens == len(plan):
        return "single tokens only"
    return f"with prompts, up to {CLASSES[min(bisect_left(CLASSES, plan.num_tokens), len(CLASSES) - 1)]:,} tokens"


def table(steps: list[Timed], limits: Limits) -> str:
    classes: dict[str, list[Timed]] = {}
    for step in steps:
        classes.setdefault(classify(step.plan), []).append(step)
    lines = [
        "| steps | number | tokens | rows | takes | products | attention | times its limit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, members in sorted(classes.items(), key=lambda item: item[1][0].plan.num_tokens):
        means = np.mean(
            [
                (
                    step.plan.num_tokens, len(step.plan), step.begin.elapsed_time(step.end),
                    limits.products(step.plan), limits.attention(step.plan),
                )
                for step in members
            ],
            axis=0,
        )  # fmt: skip
        tokens, rows, taken, products, attention = means
        lines.append(
            f"| {name} | {len(members):,} | {tokens:,.0f} | {rows:.0f} | {taken:.2f} ms | {products:.2f} ms "
            f"| {attention:.2f} ms | {taken / (products + attention):.2f} |"
        )
    return "\n".join(lines)


def trace_step(bench: gpu.Bench) -> str:
    """The kernels of the first step that has a prompt beside 64 running requests."""
    client = bench.client
    for number in range(64):
        prompt = traffic.random_prompt(random.Random(number), 600)
        client.add(traffic.make_request(f"running {number}", prompt, 400))
    while client.engine.scheduler.num_waiting or min(r.num_output for r in client.engine.scheduler.running) < 8:
        client.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        client.add(traffic.make_request("prompt", traffic.random_prompt(random.Random(99), 540), 4))
        while client.engine.has_work and "prompt" in client.engine.scheduler.requests:
            client.step()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    begins = [place for place, kernel in enumerate(kernels) if kernel[2].startswith("_upload")]
    steps = [kernels[begin:end] for begin, end in zip(begins, [*begins[1:], len(kernels)], strict=True)]
    return describe_step(next(step for step in steps if any("_varlen" in name for _, _, name in step)))


def describe_step(kernels: list[tuple[float, float, str]]) -> str:
    """By kind of kernel: how many, and how long; times are in microseconds."""
    totals: dict[str, list[float]] = {}
    for start, end, name in kernels:
        totals.setdefault(name[:60], []).append(end - start)
    busy = 0.0
    reached = kernels[0][0]
    for start, end, _ in kernels:  # kernels overlap: on two streams, or if one starts before the last has ended
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    whole = reached - kernels[0][0]
    lines = ["| kernel | number | in all | share |", "|---|---|---|---|"]
    for name, times in sorted(totals.items(), key=lambda item: -sum(item[1])):
        lines.append(f"| {name} | {len(times)} | {sum(times):,.0f} us | {sum(times) / whole:.1%} |")
    lines.append(
        f"| any, of {whole:,.0f} us from first to last | {len(kernels)} | {busy:,.0f} us | {busy / whole:.1%} |"
    )
    lines.append(f"| none | | {whole - busy:,.0f} us | {1 - busy / whole:.1%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=positive, default=30.0)
    parser.add_argument("--seconds", type=positive, default=20.0)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--itl-target-ms", type=milliseconds)
    parser.add_argument("--trace", action="store_true")
    parser.set_defaults(sampling={})
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use")
    limits = Limits()
    torch.cuda.empty_cache()
    gc.freeze()  # torch's objects: collecting them takes as long as several steps
    bench = gpu.make_server(options)
    engine = bench.client.engine
    for name in ("warm-up", "measured"):
        engine.runner = timed = TimedRunner(engine.runner)
        figures = traffic.drive(bench.client, traffic.poisson(options.rate, options.seconds, name), name)
        engine.runner = timed._runner
    torch.cuda.synchronize()
    print(table(timed.steps, limits))
    print(f"\nTTFT {figures.ttft}\nbetween tokens {figures.itl}")
    if options.trace:
        print(f"\n{trace_step(bench)}")


if __name__ == "__main__":
    main()
