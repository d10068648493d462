"""Where the time to the first token of `quire generate` goes, phase by phase.

    python benchmarks/start_profile.py [--repeats 15] [--model smollm2:135m]

Each repeat runs the phases one after another in a new process, as `quire generate` does, and then the command itself
up to the first byte of its answer. Times are the shortest of all repeats, because other work on the machine only makes
them longer: from start to end of a phase, and of its threads on a core. Memory is how much the resident size grows.
What the phases leave over is the engine: its modules, the weights and the first step. The model is in the cache. Not
profiled: downloads, chat templates, the server.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

COMMAND = "from quire.cli.main import main; main()"
PHASES = {
    "command line": "from quire.cli.main import make_parser; make_parser(arguments).parse_args(arguments)",
    "store": "from quire.store import resolve; path = resolve(model).path",
    "text modules": "import quire.text.input_processor, quire.text.grammar.constraint",
    "native extension": "import quire.weights.gguf_strings; quire.weights.gguf_strings.extension()",
    "model's configuration": "from quire.weights.config import read_config; read_config(path)",
    "tokenizer": "from quire.text.tokenizers.tokenizer import load_tokenizer; tokenizer = load_tokenizer(path)",
    "first prompt": "token_ids = tokenizer.encode('hi')",
    "first text": "from quire.text.detokenizer import Detokenizer; Detokenizer(tokenizer).decode(token_ids)",
    "numpy": "from quire.cli.imports import import_numpy; import_numpy()",
    "other modules of LLM": "import quire.llm",
}
CHILD = """
import json, sys, time

def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

def run():
    phases, model, arguments = json.loads(sys.argv[1])
    names, rows = {"model": model, "arguments": arguments}, {}
    for name, code in phases.items():
        mib, wall, cpu = resident_mib(), time.perf_counter(), time.process_time()
        exec(code, names)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        rows[name] = wall * 1000, cpu * 1000, resident_mib() - mib
    print(json.dumps(rows))

run()
"""


def profile(model: str, arguments: list[str]) -> dict[str, list[float]]:
    """Milliseconds, milliseconds on a core and MiB of each phase, in a new process."""
    command = [sys.executable, "-c", CHILD, json.dumps([PHASES, model, arguments])]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    rows: dict[str, list[float]] = json.loads(output)
    return rows


def time_python() -> list[float]:
    """The same of an interpreter that does nothing, without its memory."""
    wall, cpu = time.perf_counter(), children_cpu_s()
    subprocess.run([sys.executable, "-c", ""], check=True)
    return [(time.perf_counter() - wall) * 1000, (children_cpu_s() - cpu) * 1000, 0.0]


def children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def time_first_byte(arguments: list[str]) -> float:
    """Milliseconds from the start of the command to the first byte of the answer."""
    begin = time.perf_counter()
    command = [sys.executable, "-c", COMMAND, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout
        first = process.stdout.read(1)
        elapsed = (time.perf_counter() - begin) * 1000
        process.stdout.read()
    if not first or process.returncode:
        raise SystemExit(f"quire {' '.join(arguments)} failed with status {process.returncode}")
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--model", default="smollm2:135m")
    parser.add_argument("--phases-only", action="store_true", help="do not run the command itself")
    options = parser.parse_args()
    arguments = ["generate", options.model, "-p", "hi", "--max-tokens", "1"]
    runs = [{"python": time_python()} | profile(options.model, arguments) for _ in range(options.repeats)]
    rows = {name: [min(column) for column in zip(*(run[name] for run in runs), strict=True)] for name in runs[0]}
    rows["all phases"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    for name, (wall, cpu, mib) in rows.items():
        print(f"{name:<24}{wall:>10.1f} ms{cpu:>10.1f} ms on a core{mib:>10.1f} MiB")
    if not options.phases_only:
        total = min(time_first_byte(arguments) for _ in runs)
        print(f"{'engine, the rest':<24}{total - rows['all phases'][0]:>10.1f} ms")
        print(f"{'first token':<24}{total:>10.1f} ms")


if __name__ == "__main__":
    main()
