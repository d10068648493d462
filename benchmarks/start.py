"""The time to the first token of a new process: `quire generate -p hi`, timed from outside.

    python benchmarks/start.py [--repeats 5] [--model smollm2:135m]

The model is in the cache. Peak memory is the process's largest resident size.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path


def measure(model: str) -> tuple[float, float, float]:
    """Seconds to the first byte of the answer, seconds to the end, peak MB."""
    command = [str(Path(sys.executable).parent / "quire"), "generate", model, "-p", "hi", "--max-tokens", "8"]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout
        first = process.stdout.read(1)
        first_s = time.perf_counter() - begin
        process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if not first or process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {process.returncode}")
    return first_s, time.perf_counter() - begin, usage.ru_maxrss / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="smollm2:135m")
    options = parser.parse_args()
    runs = [measure(options.model) for _ in range(options.repeats)]
    first, total, peak = (statistics.median(column) for column in zip(*runs, strict=True))
    worst = max(run[0] for run in runs)
    print(json.dumps({"first_token_s": first, "first_token_worst_s": worst, "total_s": total, "peak_mb": peak}))


if __name__ == "__main__":
    main()
