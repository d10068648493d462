"""quire on one GPU compared with recorded figures of vLLM: Llama-3-8B's shapes, bf16, random weights.

    python benchmarks/gpu.py [--only start,1,16,64,256,neighbours,prefill,mix,arrivals,...] [--json FILE] [--exact]
                             [--sampling JSON] [--trace FILE] [--seconds S] [--quantization int4|int8|fp8|nf4]
                             [--model NAME [--uniform]]

Sampling is greedy, or as `--sampling` sets it: '{"temperature": 0.8, "top_p": 0.95}' or '{"logprobs": 5}'. `--exact`
measures an engine whose bits do not depend on the batch. `--quantization` rounds the layers' random weights to codes;
int4 has groups of 128 with zeros, and the head stays bf16. Its table has vLLM's figures for GPTQ with Machete and for
fp8, and goals and limits of its own. It needs no network, no file and, in a checkout, no
installation.

start, batches, prefill, mix: all requests of a batch start together, without a prefix cache and without a target for
the time between tokens, as in `LLM.generate`. TTFT is the time of a batch with one new token. TPOT is
(time for n tokens - TTFT) / (n - 1). Best of `--repeats` runs after a warmup run.
neighbours: the speed of a batch of 64 in which one request has an additional option, compared with 64 plain requests.
arrivals: requests arrive one by one, as at a server, at an engine with default settings. Prompts have 32 to 1,024
tokens, answers 16 to 512. Cold is a new process without compiled kernels, measured from its first request on.
mixed: several long prompts, and long contexts. shared: 64 requests that begin with the same 6,000 tokens, twice.
azure: the first part of Azure's conversation trace (`--trace`), at three speeds.

--model measures a mixture of experts (`mixtures.py`): start, batches of 1, 16 and 64, and a prompt of 8,192 tokens.
With --uniform tokens choose experts at random. Then the limit is that of the experts that a step touches.

vLLM 0.24.0 was measured once on one H200 with dummy weights. The limit was measured there too: weights and cache are
read once a step at 4.2 TB/s, or 800 TFLOP/s.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

BEGIN = time.perf_counter()
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mixtures  # noqa: E402
import traffic  # noqa: E402
from arguments import count, milliseconds, positive  # noqa: E402

from quire.bench.serve.traces import read_trace, slice_trace  # noqa: E402
from quire.config import EngineConfig  # noqa: E402
from quire.engine.client import InProcess  # noqa: E402

ROWS = "start,1,16,64,256,neighbours,prefill,mix,arrivals,mixed,shared,azure"
MIXTURE_ROWS = "start,1,16,64,prefill"
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "hidden_act": "silu", "eos_token_id": 128001, "bos_token_id": 128000,
}  # fmt: skip


class Figure(NamedTuple):
    """One row of the table."""

    name: str
    unit: str
    quire: float
    vllm: float | None = None
    goal: float | None = None
    limit: float | None = None

    @property
    def more_is_better(self) -> bool:
        return self.unit in ("tok/s", "%")

    @property
    def ratio(self) -> float | None:
        if self.vllm is None:
            return None
        return self.quire / self.vllm if self.more_is_better else self.vllm / self.quire

    @property
    def reached(self) -> bool | None:
        if self.goal is None:
            return None
        return self.quire >= self.goal if self.more_is_better else self.quire <= self.goal


class Batch(NamedTuple):
    size: int
    prompt: int
    output: int
    ttft: tuple[float, float] | None  # vLLM's and the goal, ms
    tpot: tuple[float | None, float | None, float | None]  # vLLM's, the goal and the limit, ms


BATCHES = {
    "1": Batch(1, 512, 128, (14.9, 13.0), (4.919, 4.1, 3.57)),
    "16": Batch(16, 512, 128, None, (5.293, 4.6, 3.6)),
    "64": Batch(64, 512, 256, (745.0, 745.0), (6.750, 5.9, 4.9)),
    "256": Batch(256, 512, 128, (3032.0, 3032.0), (13.603, 11.9, 8.2)),
}
NOTHING = (None, None, None)
# With --quantization: vLLM's figure, the goal and the limit, in ms.
QUANTIZED: dict[str, dict[str, tuple[float | None, float | None, float | None]]] = {
    "int4": {
        "1": (3.824, 1.65, 1.15), "16": (4.167, 2.3, 1.45), "64": (6.596, 3.7, 2.46), "256": (14.172, 12.0, 9.4),
        "2048": (51.6, 48.0, 37.0), "8192": (217.5, 207.0, 165.0),
    },
    "fp8": {
        "1": (3.503, 2.4, 1.93), "16": (3.805, 3.0, 2.23), "64": (5.204, 4.2, 3.24), "256": (11.72, 9.0, 7.2),
        "2048": (32.1, 27.0, 24.0), "8192": (142.2, 128.0, 114.0),
    },
    "nf4": {"1": (None, 1.9, 1.15), "16": (None, 2.7, 1.45)},
    "int8": {"1": (None, None, 1.93), "16": (None, None, 2.23), "64": (None, None, 3.24)},
}  # fmt: skip
PREFILLS = {2048: (47.2, 44.0, 37.0), 8192: (211.4, 195.0, 165.0), 16000: (470.3, 430.0, 363.0)}


class Rate(NamedTuple):
    """Requests a second, with vLLM's figures in ms and the goals."""

    per_second: float
    vllm: tuple[float, float, float, float]  # TTFT p50 and p99, between tokens p50 and p99
    goals: tuple[float, float, float, float] | None = None


RATES = (
    Rate(10, (29, 81, 5.7, 30)), Rate(20, (34, 96, 6.4, 33)), Rate(30, (45, 95, 8.1, 35), (38, 80, 7, 28)),
)  # fmt: skip
LONGEST_GAP_MS = 100.0


class AllowAll:
    """A constraint that allows every token: the cost of constraints without a grammar for this vocabulary."""

    error = ""

    def allowed(self) -> bytes:
        return b"\xff" * (LLAMA_3_8B["vocab_size"] // 8)

    def advance(self, token: int) -> None:
        pass


NEIGHBOUR_TOKENS = 128
NEIGHBOURS: dict[str, dict[str, Any]] = {
    "a draw": {"temperature": 0.8, "top_p": 0.95}, "log probabilities": {"logprobs": 5},
    "penalties": {"frequency_penalty": 0.5, "repetition_penalty": 1.1}, "a constraint": {"constraint": AllowAll()},
    "prompt log probabilities": {"prompt_logprobs": 0}, "a bias": {"logit_bias": {7: 1.0}},
}  # fmt: skip
SPEEDS = (1.0, 2.0, 4.0)  # at which the trace is replayed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=None, help="rows, separated by commas; all if not given")
    parser.add_argument("--model", choices=list(mixtures.MODELS), help="a mixture of experts; not given: Llama-3-8B")
    parser.add_argument("--uniform", action="store_true", help="with --model: tokens choose experts at random")
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--quantization", choices=[*QUANTIZED], default="none")
    parser.add_argument("--sampling", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--trace", type=Path, help="Azure's conversation trace, for the row azure")
    parser.add_argument("--seconds", type=positive, default=20.0, help="duration of arrivals at each rate")
    parser.add_argument(
        "--itl-target-ms", type=milliseconds, help="for the rows of arrivals; the engine's default if not given"
    )
    parser.add_argument("--cold", type=positive, help=argparse.SUPPRESS)  # a child: arrivals at this rate, as JSON
    options = parser.parse_args()
    rows = ROWS if options.model is None else MIXTURE_ROWS
    wanted = (options.only or rows).split(",")
    if options.uniform and options.model is None:
        parser.error("--uniform needs --model")
    if not isinstance(options.sampling, dict):
        parser.error("--sampling takes a JSON object")
    if options.trace is not None and not options.trace.is_file():
        parser.error(f"--trace: there is no file {options.trace}")
    if unknown := [name for name in wanted if name not in rows.split(",")]:
        parser.error(f"--only has {unknown[0]!r}; the rows are {rows}")
    if "azure" in wanted and options.trace is None:
        if options.only is not None:
            parser.error("the row azure needs --trace with a file of that trace")
        print("The row azure is left out: it needs --trace.", file=sys.stderr)
        wanted.remove("azure")
    options.wanted = wanted
    return options


class Bench:
    """An engine, and requests for it."""

    def __init__(self, options: argparse.Namespace, **settings: Any) -> None:
        self._sampling = options.sampling
        with tempfile.TemporaryDirectory() as folder:
            shapes = LLAMA_3_8B if options.model is None else mixtures.MODELS[options.model].config
            (Path(folder) / "config.json").write_text(json.dumps(shapes))
            config = EngineConfig(
                model=f"{options.model or 'llama-3-8b'}, random weights", device="cuda", weights="random",
                exact=options.exact, quantize=options.quantization, **settings,
            )  # fmt: skip
            self.client = InProcess(config, Path(folder))
        print(self.client.info.summary, file=sys.stderr)
        self._number = 0

    def run(self, lengths: list[tuple[int, int]]) -> traffic.Figures:
        """Run requests of (prompt, output) tokens, which all start together."""
        self._number += 1
        arrivals = [traffic.Arrival(0.0, *each) for each in lengths]
        return traffic.drive(self.client, arrivals, f"b{self._number}", **self._sampling)

    def best(self, lengths: list[tuple[int, int]], repeats: int) -> float:
        """Seconds."""
        self.run(lengths)
        return min(self.run(lengths).seconds for _ in range(repeats))


def make_offline(options: argparse.Namespace, max_requests: int, step_tokens: int) -> Bench:
    return Bench(
        options, prefix_cache=False, max_len=17_000, kv_memory=60.0, itl_target_ms=0.0, max_requests=max_requests,
        max_tokens_per_step=step_tokens,
    )  # fmt: skip


def make_server(options: argparse.Namespace) -> Bench:
    return Bench(options, itl_target_ms=options.itl_target_ms)


def measure_batch(bench: Bench, batch: Batch, repeats: int) -> list[Figure]:
    first = bench.best([(batch.prompt, 1)] * batch.size, repeats)
    whole = bench.best([(batch.prompt, batch.output)] * batch.size, repeats)
    name = f"batch {batch.size}, prompt {batch.prompt}, {batch.output} new"
    figures = []
    if batch.ttft is not None:
        figures.append(Figure(f"{name}: TTFT", "ms", 1e3 * first, *batch.ttft, 9.0 if batch.size == 1 else None))
    tpot_ms = 1e3 * (whole - first) / (batch.output - 1)
    return [*figures, Figure(f"{name}: TPOT", "ms", tpot_ms, *batch.tpot)]


def measure_neighbours(bench: Bench, repeats: int) -> Iterator[Figure]:
    """The speed relative to plain requests, from the time between tokens without that of the prompts."""

    def tpot_s(**asked: Any) -> float:
        times_s = [min(run_beside(bench, output, asked) for _ in range(repeats)) for output in (1, NEIGHBOUR_TOKENS)]
        return (times_s[1] - times_s[0]) / (NEIGHBOUR_TOKENS - 1)

    run_beside(bench, NEIGHBOUR_TOKENS, {})
    plain_s = tpot_s()
    for name, asked in NEIGHBOURS.items():
        run_beside(bench, NEIGHBOUR_TOKENS, asked)
        yield Figure(f"batch 64, one with {name}: speed", "%", 100 * plain_s / tpot_s(**asked), None, 97.0)


def run_beside(bench: Bench, output: int, asked: dict[str, Any]) -> float:
    """63 plain requests and one with additional options: seconds until all have finished."""
    rng, requests = random.Random(1), list[tuple[float, Any]]()
    for number in range(64):
        prompt = traffic.random_prompt(rng, 512)
        more = asked if number == 20 else {}
        requests.append((0.0, traffic.make_request(f"beside {number}", prompt, output, **more)))
    return traffic.serve(bench.client, requests).seconds


def measure_offline(options: argparse.Namespace, wanted: list[str]) -> Iterator[Figure]:
    repeats = options.repeats
    bench = make_offline(options, 512, 8192)
    bench.run([(512, 1)])
    if "start" in wanted:
        yield Figure("start to first token", "s", time.perf_counter() - BEGIN, 85.0, 10.0)
    quantized = QUANTIZED.get(options.quantization)
    for name, batch in BATCHES.items():
        if name in wanted:
            if quantized is not None:
                batch = batch._replace(ttft=None, tpot=quantized.get(name, NOTHING))
            yield from measure_batch(bench, batch, repeats)
    if "neighbours" in wanted:
        yield from measure_neighbours(bench, repeats)
    if "mix" in wanted:
        rng = random.Random(7)
        lengths = [(rng.randint(32, 1024), rng.randint(16, 512)) for _ in range(512)]
        seconds = bench.best(lengths, max(1, repeats - 1))
        rate = sum(output for _, output in lengths) / seconds
        yield Figure("512 requests at once", "tok/s", rate, 8783.0, 10_000.0)
    if "prefill" in wanted:
        del bench
        let_go()
        bench = make_offline(options, 64, 16_384)
        for length, plain in PREFILLS.items():
            figures = plain if quantized is None else quantized.get(str(length), NOTHING)
            yield Figure(f"prefill {length:,}", "ms", 1e3 * bench.best([(length, 1)], repeats), *figures)
    del bench
    let_go()


def measure_mixture(options: argparse.Namespace, wanted: list[str]) -> Iterator[Figure]:
    shapes = mixtures.MODELS[options.model]
    routing = None
    if shapes.mxfp4:
        mixtures.use_mxfp4()
    if options.uniform:
        routing = mixtures.UniformRouting.of(shapes.config)
        routing.install()
    bench = Bench(
        options, prefix_cache=False, max_len=17_000, kv_memory=16.0, itl_target_ms=0.0, max_requests=64,
        max_tokens_per_step=8192,
    )  # fmt: skip
    bench.run([(512, 1)])
    if "start" in wanted:
        yield Figure("start to first token", "s", time.perf_counter() - BEGIN)
    for nth, size in enumerate((1, 16, 64)):
        if str(size) not in wanted:
            continue
        limit = None
        if routing is not None:
            touched, info = routing.count_touched(size), bench.client.info
            limit = mixtures.limit_ms(shapes, info.config, info.weight_bytes, touched, size, 512 + 64)
            yield Figure(f"batch {size}: experts touched in a layer", "", touched)
        vllm, goal = (None if rows is None else rows.batches[nth] for rows in (shapes.vllm, shapes.goal))
        tpot: Any = (vllm, goal, limit)
        yield from measure_batch(bench, Batch(size, 512, 128, None, tpot), options.repeats)
    if "prefill" in wanted:
        vllm_ms = None if shapes.vllm is None else shapes.vllm.prefill
        yield Figure(
            "prefill 8,192", "ms", 1e3 * bench.best([(8192, 1)], options.repeats), vllm_ms, shapes.goal.prefill
        )


def let_go() -> None:
    """Free the memory of an engine before the next one is created."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def describe_arrivals(rate: Rate, kind: str, ttft: dict[str, float], itl: dict[str, float]) -> Iterator[Figure]:
    values = (ttft["p50"], ttft["p99"], itl["p50"], itl["p99"])
    names = ("TTFT p50", "TTFT p99", "between tokens p50", "between tokens p99")
    goals = rate.goals or (None,) * len(names)
    for name, value, vllm, goal in zip(names, values, rate.vllm, goals, strict=True):
        yield Figure(f"{rate.per_second:g} a second, {kind}: {name}", "ms", value, vllm, goal)
    goal = LONGEST_GAP_MS if rate.goals else None
    yield Figure(f"{rate.per_second:g} a second, {kind}: longest gap between tokens", "ms", itl["max"], None, goal)


def measure_cold(options: argparse.Namespace, rate: Rate) -> Iterator[Figure]:
    """In a new process without compiled kernels."""
    command = [sys.executable, __file__, "--cold", str(rate.per_second), "--seconds", str(options.seconds)]
    command += ["--exact"] if options.exact else []
    command += ["--quantization", options.quantization] if options.quantization != "none" else []
    command += ["--sampling", json.dumps(options.sampling)]
    command += [] if options.itl_target_ms is None else ["--itl-target-ms", str(options.itl_target_ms)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": folder}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    seen = json.loads(done.stdout)
    yield from describe_arrivals(rate, "cold", seen["ttft"], seen["itl"])
    yield Figure(f"{rate.per_second:g} a second, cold: start", "s", seen["start_s"], None, 10.0 if rate.goals else None)


def run_cold(options: argparse.Namespace) -> None:
    bench = make_server(options)
    start_s = time.perf_counter() - BEGIN
    arrivals = traffic.poisson(options.cold, options.seconds, "cold")
    figures = traffic.drive(bench.client, arrivals, "cold", **options.sampling)
    print(json.dumps({"start_s": start_s, "ttft": figures.ttft, "itl": figures.itl}))


def measure_arrivals(options: argparse.Namespace) -> Iterator[Figure]:
    for rate in RATES:
        yield from measure_cold(options, rate)
    bench = make_server(options)
    traffic.drive(bench.client, traffic.poisson(30, options.seconds, "warm-up"), "warm-up", **options.sampling)
    for rate in RATES:
        arrivals = traffic.poisson(rate.per_second, options.seconds, f"warm {rate.per_second}")
        figures = traffic.drive(bench.client, arrivals, f"warm {rate.per_second}", **options.sampling)
        yield from describe_arrivals(rate, "warm", figures.ttft, figures.itl)
    del bench
    let_go()


def measure_mixed(options: argparse.Namespace) -> Iterator[Figure]:
    bench = make_server(options)
    bench.run([(8000, 8)] * 2)
    yield Figure("1 prompt of 8,000, 64 new", "s", bench.best([(8000, 64)], options.repeats), 0.546)
    seconds = bench.best([(8000, 64)] * 16, max(1, options.repeats - 1))
    yield Figure("16 prompts of 8,000, 64 new: all done", "s", seconds, 3.92, 3.6)
    for context in (32_000, 120_000):
        bench.run([(context, 8)])
        figures = bench.run([(context, 64)])
        yield Figure(f"1 prompt of {context:,}: TTFT", "ms", figures.ttft["p50"])
        yield Figure(f"1 prompt of {context:,}: between tokens p50", "ms", figures.itl["p50"])
    figures = bench.run([(120_000, 64), *[(500, 100)] * 31])
    yield Figure("1 prompt of 120,000 beside 31 of 500: between tokens p50", "ms", figures.itl["p50"])
    yield Figure("1 prompt of 120,000 beside 31 of 500: longest gap", "ms", figures.itl["max"])
    del bench
    let_go()


def measure_shared(options: argparse.Namespace) -> Iterator[Figure]:
    bench = make_server(options)
    rng = random.Random(1)
    bench.run([(6000, 64)] * 2)
    prefix = traffic.random_prompt(rng, 6000)
    for name, vllm in (("at once", 1.32), ("again, from the cache", 1.24)):
        requests = []
        for number in range(64):
            prompt = prefix + traffic.random_prompt(random.Random(number), 20)
            requests.append((0.0, traffic.make_request(f"{name} {number}", prompt, 64, **options.sampling)))
        before = bench.client.engine.scheduler.counters.computed_tokens
        seconds = traffic.serve(bench.client, requests).seconds
        computed = bench.client.engine.scheduler.counters.computed_tokens - before
        yield Figure(f"64 requests on a shared prefix of 6,000, {name}", "s", seconds, vllm, 1.1)
        yield Figure(f"64 requests on a shared prefix of 6,000, {name}: tokens computed", "", computed)
    del bench
    let_go()


def read_arrivals(trace: Path, speed: float, seconds: float) -> list[traffic.Arrival]:
    """The first seconds of a trace, at that speed."""
    entries = slice_trace(
        read_trace(trace), num_requests=None, max_prompt_tokens=None, max_output_tokens=None, speed=speed
    ).entries
    return [traffic.Arrival(e.at_s, e.prompt_tokens, e.output_tokens) for e in entries if e.at_s < seconds]


def measure_azure(options: argparse.Namespace) -> Iterator[Figure]:
    bench = make_server(options)
    for speed in SPEEDS:
        arrivals = read_arrivals(options.trace, speed, 2 * options.seconds)
        figures = traffic.drive(bench.client, arrivals, f"azure {speed}", **options.sampling)
        name = f"Azure's conversations, {speed:g} times as fast ({len(arrivals) / (2 * options.seconds):.1f} a second)"
        for what, spread in (("TTFT", figures.ttft), ("between tokens", figures.itl)):
            for percent in ("p50", "p99"):
                yield Figure(f"{name}: {what} {percent}", "ms", spread[percent])
    del bench
    let_go()


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    wanted = options.wanted
    if options.model is not None:
        yield from measure_mixture(options, wanted)
        return
    if {"start", *BATCHES, "neighbours", "mix", "prefill"} & {*wanted}:
        yield from measure_offline(options, wanted)
    if "arrivals" in wanted:
        yield from measure_arrivals(options)
    if "mixed" in wanted:
        yield from measure_mixed(options)
    if "shared" in wanted:
        yield from measure_shared(options)
    if "azure" in wanted:
        yield from measure_azure(options)


def table(figures: list[Figure]) -> str:
    lines = [
        "| work | limit | vLLM | goal | quire | times as fast as vLLM | goal reached |",
        "|---|---|---|---|---|---|---|",
    ]
    for figure in figures:
        limit, vllm, goal, quire = (
            "" if value is None else f"{value:,.{digits(value)}f} {figure.unit}".strip()
            for value in (figure.limit, figure.vllm, figure.goal, figure.quire)
        )
        ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
        reached = {None: "", True: "yes", False: "no"}[figure.reached]
        lines.append(f"| {figure.name} | {limit} | {vllm} | {goal} | {quire} | {ratio} | {reached} |")
    return "\n".join(lines)


def digits(value: float) -> int:
    return 3 if value < 14 else 1 if value < 1000 else 0


def main() -> None:
    options = parse()
    if options.cold is not None:
        run_cold(options)
        return
    figures: list[Figure] = []
    for figure in measure(options):
        figures.append(figure)
        print(f"{figure.name}: {figure.quire:,.3f} {figure.unit}", file=sys.stderr, flush=True)
    import torch

    document: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": [f._asdict() for f in figures]
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{document['gpu']}, torch {document['torch']}\n\n{table(figures)}")


if __name__ == "__main__":
    main()
