"""quire's speculation compared with that of llama.cpp, on the same prompts and the same file, one after another.

    python benchmarks/speculation_peers.py --peers DIR --prompts spec_bench.jsonl [--max-prompts 4] [--model MODEL]
                                           [--types none,ngram-simple,ngram-mod] [--draft FILE.gguf] [--temperature T]
                                           [--speculate METHODS] [--json FILE]

Each prompt is answered once with each way, batch 1, two threads. Speeds are those of decoding: llama.cpp's from its
own timings, quire's as in `quire bench speculation`, which runs before and after llama.cpp's, because the machine's
speed may change. `--draft` adds llama.cpp's draft model. DIR is that of cpu_peers.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from arguments import count
from serve_peers import free_port, running

from quire.bench.speculation import read_prompts
from quire.config import DEFAULT_MODEL, cache_dir
from quire.store import resolve

TYPES = "none,ngram-simple,ngram-map-k,ngram-map-k4v,ngram-mod,ngram-cache"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=cache_dir() / "peers")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--max-prompts", type=count, default=4, help="of each category")
    parser.add_argument("--output-tokens", type=count, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--types", type=lambda text: text.split(","), default=TYPES.split(","))
    parser.add_argument("--draft", type=Path, help="a draft model for llama.cpp")
    parser.add_argument("--speculate", default="auto", help="of quire")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure_quire(options: argparse.Namespace) -> tuple[float, float]:
    """Tokens a second without and with speculation."""
    command = [
        sys.executable, "-m", "quire.cli.main", "bench", "speculation", options.model, "--prompts",
        str(options.prompts), "--max-prompts", str(options.max_prompts), "--output-tokens", str(options.output_tokens),
        "--temperature", str(options.temperature), "--speculate", options.speculate, "--threads", "2", "--json",
    ]  # fmt: skip
    row = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["rows"][-1]
    return row["plain_tokens_per_s"], row["tokens_per_s"]


def measure_llama(options: argparse.Namespace, kind: str, prompts: list[str]) -> float:
    port = free_port()
    command = [
        str(options.peers / "llama/bin/llama-server"), "-m", str(resolve(options.model).path), "--port", str(port),
        "-t", "2", "-np", "1", "-c", "4096", "--alias", "m", "--no-cache-prompt", "--spec-type", kind,
    ]  # fmt: skip
    if kind == "draft-simple":
        command += ["-md", str(options.draft)]
    num_tokens = milliseconds = 0.0
    with running(command, port):
        for prompt in prompts:
            timings = ask(port, prompt, options)["timings"]
            num_tokens += timings["predicted_n"] - 1  # the first is the prompt's, as in quire's figures
            milliseconds += timings["predicted_ms"]
    return 1000 * num_tokens / milliseconds


def ask(port: int, prompt: str, options: argparse.Namespace) -> Any:
    body = {
        "model": "m", "messages": [{"role": "user", "content": prompt}], "temperature": options.temperature,
        "max_tokens": options.output_tokens, "seed": 0,
    }  # fmt: skip
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=600) as answer:
        return json.load(answer)


def main() -> None:
    options = parse()
    prompts = [text for texts in read_prompts(options.prompts).values() for text in texts[: options.max_prompts]]
    runs = [measure_quire(options)]
    types = options.types + (["draft-simple"] if options.draft else [])
    llama = {}
    for kind in types:
        llama[kind] = measure_llama(options, kind, prompts)
        print(f"llama.cpp {kind}: {llama[kind]:.1f} tok/s", file=sys.stderr)
    runs.append(measure_quire(options))
    plain, drafted = (sum(values) / len(runs) for values in zip(*runs, strict=True))
    print(f"{len(prompts)} prompts, decoding, tok/s; quire is the mean of two runs: {runs}")
    print("| engine | tok/s | quire is faster by |\n|---|---|---|")
    print(f"| quire, plain | {plain:.0f} | |\n| quire, {options.speculate} | {drafted:.0f} | |")
    for kind, speed in llama.items():
        print(f"| llama.cpp, {kind} | {speed:.0f} | {drafted / speed:.2f} |")
    if options.json:
        options.json.write_text(json.dumps({"quire": runs, "llama.cpp": llama}) + "\n")


if __name__ == "__main__":
    main()
