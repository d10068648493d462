"""quire on one GPU beside vLLM's recorded figures: Llama-3-8B's shapes, bf16, random weights made on the GPU.

    python benchmarks/gpu.py [--only start,1,16,64,256,prefill,mix] [--json FILE] [--exact] [--sampling JSON]

Greedy, no prefix cache; `--exact` measures what the same bits in any batch cost, `--sampling` what draws or anything
else that a request may ask for do, such as '{"temperature": 0.8, "top_p": 0.95}' or '{"logprobs": 5}'. TTFT is the time
of a batch with one new token; TPOT is (time for n tokens - TTFT) / (n - 1). vLLM 0.24.0 was measured once on one H200
with dummy weights, and so was the limit: weights and cache read once a step at 4.2 TB/s, or 800 TFLOP/s. Each figure is
the best of `--repeats` runs after one to warm up: captures and compilations are part of the first. Needs no network and
no file.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

BEGIN = time.perf_counter()

import torch  # noqa: E402

from quire.config import EngineConfig  # noqa: E402
from quire.core.params import SamplingParams  # noqa: E402
from quire.core.request import Request  # noqa: E402
from quire.engine.client import InProcess  # noqa: E402

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 32768, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "hidden_act": "silu", "eos_token_id": 128001, "bos_token_id": 128000,
}  # fmt: skip


class Figure(NamedTuple):
    """One row of the table; less is better unless it is a rate."""

    name: str
    unit: str
    quire: float
    vllm: float
    goal: float
    limit: float | None

    @property
    def ratio(self) -> float:
        return self.quire / self.vllm if self.unit == "tok/s" else self.vllm / self.quire

    @property
    def reached(self) -> bool:
        return self.quire >= self.goal if self.unit == "tok/s" else self.quire <= self.goal


class Batch(NamedTuple):
    size: int
    prompt: int
    output: int
    ttft: tuple[float, float] | None  # vLLM's and the goal, ms
    tpot: tuple[float, float, float]  # vLLM's, the goal and the limit, ms


BATCHES = {
    "1": Batch(1, 512, 128, (14.9, 13.0), (4.919, 4.1, 3.57)),
    "16": Batch(16, 512, 128, None, (5.293, 4.6, 3.6)),
    "64": Batch(64, 512, 256, (745.0, 745.0), (6.750, 5.9, 4.9)),
    "256": Batch(256, 512, 128, (3032.0, 3032.0), (13.603, 11.9, 8.2)),
}
PREFILLS = {2048: (47.2, 44.0, 37.0), 8192: (211.4, 195.0, 165.0), 16000: (470.3, 430.0, 363.0)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="start,1,16,64,256,prefill,mix")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--sampling", type=json.loads, default={}, metavar="JSON")
    return parser.parse_args()


class Bench:
    """An engine, and requests for it."""

    def __init__(self, max_requests: int, step_tokens: int, options: argparse.Namespace) -> None:
        self._sampling: dict[str, Any] = {"ignore_eos": True, "temperature": 0.0} | options.sampling
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(LLAMA_3_8B))
            config = EngineConfig(
                model="llama-3-8b, random weights", device="cuda", weights="random", prefix_cache=False, max_len=17_000,
                max_requests=max_requests, max_tokens_per_step=step_tokens, kv_memory=60.0, exact=options.exact,
            )  # fmt: skip
            self.client = InProcess(config, Path(folder))
        print(self.client.info.summary, file=sys.stderr)
        self._number = 0

    def run(self, lengths: list[tuple[int, int]]) -> tuple[float, int]:
        """Requests of (prompt, output) tokens, all at once: seconds, and tokens that came out."""
        rng = random.Random(1)
        requests = [self._request(rng, prompt, output) for prompt, output in lengths]
        begin, num_tokens = time.perf_counter(), 0
        for request in requests:
            self.client.add(request)
        while self.client.engine.has_work:
            for update in self.client.step():
                num_tokens += len(update.tokens)
                assert update.finish is None or update.finish.value == "length", update
        return time.perf_counter() - begin, num_tokens

    def _request(self, rng: random.Random, prompt: int, output: int) -> Request:
        self._number += 1
        params = SamplingParams(max_tokens=output, **self._sampling)
        tokens = [rng.randrange(1000, 120_000) for _ in range(prompt)]
        return Request(str(self._number), tokens, params, max_tokens=output, seed=self._number)

    def best(self, lengths: list[tuple[int, int]], repeats: int) -> tuple[float, int]:
        self.run(lengths)
        return min(self.run(lengths) for _ in range(repeats))


def measure_batch(bench: Bench, batch: Batch, repeats: int) -> list[Figure]:
    first, _ = bench.best([(batch.prompt, 1)] * batch.size, repeats)
    whole, _ = bench.best([(batch.prompt, batch.output)] * batch.size, repeats)
    name = f"batch {batch.size}, prompt {batch.prompt}, {batch.output} new"
    figures = []
    if batch.ttft is not None:
        figures.append(Figure(f"{name}: TTFT", "ms", 1e3 * first, *batch.ttft, 9.0 if batch.size == 1 else None))
    tpot_ms = 1e3 * (whole - first) / (batch.output - 1)
    return [*figures, Figure(f"{name}: TPOT", "ms", tpot_ms, *batch.tpot)]


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    wanted, repeats = options.only.split(","), options.repeats
    bench = Bench(512, 8192, options)
    bench.run([(512, 1)])
    if "start" in wanted:
        yield Figure("start to first token", "s", time.perf_counter() - BEGIN, 85.0, 15.0, None)
    for name, batch in BATCHES.items():
        if name in wanted:
            yield from measure_batch(bench, batch, repeats)
    if "mix" in wanted:
        rng = random.Random(7)
        lengths = [(rng.randint(32, 1024), rng.randint(16, 512)) for _ in range(512)]
        seconds, num_tokens = bench.best(lengths, max(1, repeats - 1))
        yield Figure("512 requests at once", "tok/s", num_tokens / seconds, 8783.0, 10_000.0, None)
    if "prefill" in wanted:
        del bench
        gc.collect()
        torch.cuda.empty_cache()
        bench = Bench(64, 16_384, options)
        for length, (vllm, goal, limit) in PREFILLS.items():
            seconds, _ = bench.best([(length, 1)], repeats)
            yield Figure(f"prefill {length:,}", "ms", 1e3 * seconds, vllm, goal, limit)


def table(figures: list[Figure]) -> str:
    lines = [
        "| work | limit | vLLM | goal | quire | times as fast as vLLM | goal reached |",
        "|---|---|---|---|---|---|---|",
    ]
    for figure in figures:
        limit = f"{figure.limit:g} {figure.unit}" if figure.limit is not None else ""
        cells = [f"{value:,.{digits(value)}f} {figure.unit}" for value in (figure.vllm, figure.goal, figure.quire)]
        reached = "yes" if figure.reached else "no"
        lines.append(f"| {figure.name} | {limit} | {' | '.join(cells)} | {figure.ratio:.2f} | {reached} |")
    return "\n".join(lines)


def digits(value: float) -> int:
    return 3 if value < 14 else 1 if value < 1000 else 0


def main() -> None:
    options = parse()
    figures: list[Figure] = []
    for figure in measure(options):
        figures.append(figure)
        print(f"{figure.name}: {figure.quire:,.3f} {figure.unit}", file=sys.stderr, flush=True)
    document: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": [f._asdict() for f in figures]
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{document['gpu']}, torch {document['torch']}\n\n{table(figures)}")


if __name__ == "__main__":
    main()
