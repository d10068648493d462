"""quire compared with llama.cpp, vLLM CPU, OpenVINO GenAI and transformers: the same model and work, one after another.

    python benchmarks/cpu_peers.py --peers DIR [--model smollm2:135m] [--model other.gguf] [--only llama,vllm] [--quick]

DIR holds the peers: DIR/llama/bin, and the virtual environments DIR/vllm, DIR/openvino and DIR/transformers. The report
lists missing peers with what they need. quire runs before and after every peer, because the machine's speed may change.
A peer is compared with these two runs. The report is written to stdout, progress to stderr. peers/engines.py describes
how each engine is called.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from peers.child import Child, run_child
from peers.engines import BENCHMARKS, PEERS, Engine, Model, Quire, Setup
from peers.plot import draw
from peers.report import render
from peers.workload import Cell

from quire.config import DEFAULT_MODEL, cache_dir
from quire.errors import QuireError
from quire.store import resolve

SLOW_START_S = 20.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=cache_dir() / "peers", help="default: peers in quire's cache")
    parser.add_argument("--model", action="append", help="an alias or a .gguf file; may be given several times")
    parser.add_argument("--only", type=names, default=list(PEERS), help=f"of {','.join(PEERS)}; default all")
    parser.add_argument("--contexts", type=counts, default=[512, 4096], help="prompt lengths at batch 1; 512,4096")
    parser.add_argument("--batches", type=counts, default=[8, 16, 32], help="of prompts of --prompt-tokens; 8,16,32")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=1800.0, help="time limit of one process in s; 1800")
    parser.add_argument("--quick", action="store_true", help="a test run: one repeat, 1 x 64 and 4 x 32, 8 new tokens")
    parser.add_argument("--json", type=Path, help="write the figures here, after every engine")
    parser.add_argument("--plot", type=Path, help="draw them here, as SVG")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.contexts, options.batches = 1, [64], [4]
        options.prompt_tokens, options.output_tokens = 32, 8
    if not options.contexts and not options.batches:
        parser.error("give a context or a batch to measure")
    if min(options.prompt_tokens, options.threads, options.repeats) < 1 or options.output_tokens < 2:
        parser.error("give prompt tokens, threads and repeats from 1, and output tokens from 2")
    return options


def counts(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",") if part]
    if any(number < 1 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers from 1, with commas")
    return numbers


def names(text: str) -> list[str]:
    chosen = [part for part in text.split(",") if part]
    if unknown := set(chosen) - PEERS.keys():
        raise argparse.ArgumentTypeError(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    return chosen


def describe(name: str) -> tuple[Model, dict[str, Any]]:
    """A model and the machine, as `quire info` reports them."""
    path = resolve(name).path.resolve()
    if path.suffix != ".gguf":
        raise SystemExit(f"{name}: every engine reads only a model that is one .gguf file.")
    command = [sys.executable, "-m", "quire.cli.main", "info", str(path), "--json"]
    child = run_child(command, env=os.environ, timeout_s=60.0)
    if child.failure:
        raise SystemExit(f"{name}: quire info: {child.failure}")
    facts = json.loads(child.stdout)
    return Model(name, path, path.stat().st_size, facts["model"]["vocabulary"]), facts["machine"]


def environment(onednn_limit: str | None) -> dict[str, str]:
    """The environment of every child. oneDNN gets a limit if AMX is advertised but faults, and no limit is set.

    Each engine has its own option for threads. OMP_NUM_THREADS would also make vLLM's helper processes spin.
    """
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env.pop("OMP_NUM_THREADS", None)
    if onednn_limit:
        env.setdefault("ONEDNN_MAX_CPU_ISA", onednn_limit)
    return env


def feel_pulse(setup: Setup) -> dict[str, float] | None:
    command = [sys.executable, "-m", "peers.pulse", str(setup.threads)]
    child = run_child(command, env=setup.env, timeout_s=120.0, cwd=BENCHMARKS)
    return None if child.failure else json.loads(child.stdout)


def measure(engine: Engine, model: Model, cells: Sequence[Cell], setup: Setup) -> dict[str, Any]:
    """All figures of one engine on one model."""
    pulse = feel_pulse(setup)
    starts = start_often(engine, model, setup)
    measured = engine.measure(model, cells, setup)
    failed = next((child.failure for child in starts if child.failure), None)
    return {
        "engine": engine.name,
        "weights": engine.weights,
        "version": engine.version(starts[0]),
        "pulse": pulse,
        "start_s": None if failed else statistics.median(child.first_s or child.total_s for child in starts),
        "start_peak_mib": None if failed else statistics.median(child.peak_mib for child in starts),
        "start_failure": failed,
        "peak_mib": measured.peak_mib if all(row.reason is None for row in measured.rows) else None,
        "rows": [{"label": row.cell.label, **row.to_dict()} for row in measured.rows],
    }


def start_often(engine: Engine, model: Model, setup: Setup) -> list[Child]:
    """Start the engine once for each repeat, or only once if that takes long or fails.

    A first start fills the caches of files and compiled code. It counts only if it fails or takes long.
    """
    if (first := engine.start(model, setup)).failure or first.total_s >= SLOW_START_S:
        return [first]
    starts = [engine.start(model, setup)]
    while len(starts) < setup.repeats and not starts[-1].failure and starts[-1].total_s < SLOW_START_S:
        starts.append(engine.start(model, setup))
    return starts


def compare(model: Model, peers: Sequence[Engine], cells: Sequence[Cell], setup: Setup) -> Iterator[dict[str, Any]]:
    """The results of all engines in order. quire runs first, and again after every peer."""
    order: list[Engine] = [Quire()]
    for peer in peers:
        order += [peer, Quire()]
    for engine in order:
        print(f"{model.name}: {engine.name} ...", file=sys.stderr, flush=True)
        yield measure(engine, model, cells, setup)


def new_section(model: Model, cells: Sequence[Cell]) -> dict[str, Any]:
    return {
        "model": model.name if model.name != str(model.path) else model.path.stem,
        "file": model.path.name,
        "file_bytes": model.size_bytes,
        "labels": [cell.label for cell in cells],
        "results": [],
    }


def save(document: dict[str, Any], path: Path | None) -> None:
    if path:
        path.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    options = parse()
    try:
        found = [describe(name) for name in options.model or [DEFAULT_MODEL]]
    except QuireError as error:
        raise SystemExit(str(error)) from None
    machine = found[0][1]
    env = environment(machine["onednn_limit"])
    setup = Setup(options.peers.expanduser().resolve(), options.threads, options.repeats, options.timeout, env)
    chosen = [PEERS[name] for name in PEERS if name in options.only]
    peers = [peer for peer in chosen if peer.is_installed(setup)]
    cells = [Cell(1, length, options.output_tokens) for length in options.contexts]
    cells += [Cell(batch, options.prompt_tokens, options.output_tokens) for batch in options.batches]
    document: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "settings": {name: getattr(options, name) for name in ("threads", "repeats", "output_tokens", "quick")},
        "missing": {peer.name: peer.needs for peer in chosen if peer not in peers},
        "models": [new_section(model, cells) for model, _ in found],
        "pulse_after": None,
    }
    for (model, _), section in zip(found, document["models"], strict=True):
        for result in compare(model, peers, cells, setup):
            section["results"].append(result)
            save(document, options.json)
    document["pulse_after"] = feel_pulse(setup)
    save(document, options.json)
    if options.plot:
        options.plot.write_text(draw(document))
    print(render(document))


if __name__ == "__main__":
    main()
