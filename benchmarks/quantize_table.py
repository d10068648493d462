"""Makes a model in each format of `quire quantize`, loads it back, and prints the table of docs/quantization.md.

    python benchmarks/quantize_table.py SOURCE DIR [--to FORMAT ...] [--speed] [--tokens 64]

SOURCE is a dense model, as `quire quantize MODEL --to f16 --no-report` makes one. DIR gets a directory for each format,
with its report. What is there already is not made again, and a job that was interrupted goes on. --speed measures
decode at one request, in a process of its own for each model, and needs a quiet machine; so do the CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FORMATS = (
    "int8", "fp8", "nf4", "gguf:q8_0", "gguf:q4_k_m", "awq", "gptq", "int4", "gguf:q4_0", "gguf:q6_k", "gguf:q5_k_m",
    "gguf:q3_k_m", "gguf:q2_k", "gptq:8", "gptq:3",
)  # fmt: skip
MIB = 1 << 20
COLUMNS = ("--to", "MiB", "bits a quantized weight", "KL", "median", "p99", "same top-1, %", "perplexity")
MEASURED = ("tok/s", "peak MiB")

MEASURE = """
import json, resource, sys, time
from quire import LLM, SamplingParams
llm = LLM(sys.argv[1], max_len=512)
params = SamplingParams(temperature=0.0, max_tokens=int(sys.argv[2]), ignore_eos=True)
llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=4))
rates = []
for _ in range(3):
    begin = time.perf_counter()
    (out,) = llm.generate("Once upon a time", params)
    rates.append(len(out.outputs[0].token_ids) / (time.perf_counter() - begin))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"tok/s": max(rates), "peak MiB": peak}))
"""


def make(source: Path, to: str, directory: Path) -> None:
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "quire", "quantize", str(source), "--to", to, "-o", str(directory), "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"# {to}: {time.perf_counter() - begin:.0f} s, {used:.0f} CPU seconds", file=sys.stderr)


def model_of(directory: Path) -> Path:
    return next(directory.glob("*.gguf"), directory)


def quality(directory: Path) -> dict[str, str]:
    report: dict[str, Any] = json.loads((directory / "quality.json").read_text())
    found = report["comparison"]
    kl = found["kl"]
    return {
        "--to": f"`{report['to']}`",
        "MiB": f"{report['output_bytes'] / MIB:.1f}",
        "bits a quantized weight": f"{report['bits_per_weight']:.3f}",
        "KL": f"{kl['mean']:.4f} ± {kl['se']:.4f}",
        "median": f"{found['kl_median']:.4f}",
        "p99": f"{found['kl_p99']:.3f}",
        "same top-1, %": f"{100 * found['top1_agreement']['mean']:.2f}",
        "perplexity": f"{found['perplexity_b']:.2f}",
    }


def measure(model: Path, tokens: int) -> dict[str, str]:
    found = subprocess.run(
        [sys.executable, "-c", MEASURE, str(model), str(tokens)], check=True, capture_output=True, text=True
    )
    return {key: f"{value:.1f}" for key, value in json.loads(found.stdout.splitlines()[-1]).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--to", nargs="+", default=FORMATS)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    columns = (*COLUMNS, *(MEASURED if options.speed else ()))
    options.directory.mkdir(exist_ok=True)
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for to in options.to:
        directory = options.directory / to.replace(":", "-")
        if not directory.is_dir():
            make(options.source, to, directory)
        row = quality(directory) | (measure(model_of(directory), options.tokens) if options.speed else {})
        print("| " + " | ".join(row[column] for column in columns) + " |", flush=True)


if __name__ == "__main__":
    main()
