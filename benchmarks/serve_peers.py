"""quire's server compared with llama.cpp's and vLLM's: the same load by `quire bench serve`, one after another.

    python benchmarks/serve_peers.py --peers DIR [--streams 1,16,64] [--rates 2,4] [--only offline,llama,vllm]
                                     [--json FILE]

Closed loop (`--streams`): each stream sends its next request when it has its answer. Open loop (`--rates`): requests
arrive at random times, at that many a second. Prompts have 115 random words, answers 64 tokens. Sampling is greedy, and
no prefix is reused. The row `offline` is the engine under the same load, without HTTP and text. quire runs before and
after every peer, because the machine's speed may change. DIR is that of cpu_peers.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from arguments import count_list, positive_list

from quire.config import DEFAULT_MODEL, cache_dir
from quire.store import resolve

START_S = 400.0
RATE_SECONDS = 60
REQUESTS_PER_STREAM = {1: 8, 16: 4, 64: 3}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=cache_dir() / "peers")
    parser.add_argument("--streams", type=count_list, default="1,16,64")
    parser.add_argument("--rates", type=positive_list, default="", help="requests a second; each rate runs for 60 s")
    parser.add_argument("--only", default="offline,llama,vllm")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def commands(peers: Path, model: Path, port: int) -> dict[str, list[str]]:
    """The command of each server: contexts of 512 tokens for each of 64 streams, two threads, no prefix cache."""
    return {
        "quire": [sys.executable, "-m", "quire.cli.main", "serve", str(model), "--port", str(port), "--threads", "2",
                  "--no-prefix-cache", "--no-log-requests", "--served-model-name", "m"],
        "llama": [str(peers / "llama/bin/llama-server"), "-m", str(model), "--port", str(port), "-t", "2", "-np", "64",
                  "-c", str(64 * 512), "--alias", "m"],
        "vllm": [str(peers / "vllm/bin/python"), "-m", "vllm.entrypoints.openai.api_server",
                 "--model", str(safetensors(peers)), "--port", str(port),
                 "--served-model-name", "m", "--no-enable-prefix-caching", "--max-model-len", "512",
                 "--max-num-seqs", "64"],
    }  # fmt: skip


def safetensors(peers: Path) -> Path:
    """The safetensors that cpu_peers.py has made for vLLM."""
    found = sorted((peers / "safetensors").glob("*/config.json"))
    return found[0].parent if found else peers / "safetensors"


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[None]:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "4"}
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_until_ready(process, port)
        yield
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + START_S
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 1}).encode()
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"a server ended with status {process.returncode} before it was ready")
        asked = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                answer.read()
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit("a server was not ready in time")


class Load(NamedTuple):
    """A number of streams, or of requests a second."""

    name: str
    flags: tuple[str, ...]
    streams: int | None


def make_loads(streams: list[int], rates: list[float]) -> list[Load]:
    loads = []
    for count in streams:
        number = count * REQUESTS_PER_STREAM.get(count, 4)
        loads.append(Load(f"{count}", ("--concurrency", str(count), "--num-requests", str(number)), count))
    for rate in rates:
        number = max(8, int(rate * RATE_SECONDS))
        flags = ("--rate", str(rate), "--num-requests", str(number), "--seed", "5")
        loads.append(Load(f"{rate:g} a second", flags, None))
    return loads


def load(port: int, flags: Sequence[str]) -> dict[str, float]:
    """Measure one cell at the clients."""
    command = [
        sys.executable, "-m", "quire.cli.main", "bench", "serve", "--base-url", f"http://127.0.0.1:{port}",
        "--model", "m", *flags, "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    summary = json.loads(done.stdout)["summary"]
    return {
        "tokens_per_s": summary["output_tokens_per_s"],
        "ttft_p50_s": summary["ttft_ms"]["p50"] / 1e3,
        "ttft_p99_s": summary["ttft_ms"]["p99"] / 1e3,
        "itl_p50_ms": summary["itl_ms"]["p50"],
        "itl_p99_ms": summary["itl_ms"]["p99"],
        "failed": summary["num_failed"],
    }


def offline(model: Path, streams: int) -> dict[str, float]:
    """The engine alone in a child, with `streams` requests at a time. When one ends, the next one is added."""
    number = streams * REQUESTS_PER_STREAM.get(streams, 4)
    done = subprocess.run(
        [sys.executable, __file__, "--offline", str(model), str(streams), str(number)], capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return {"tokens_per_s": float(done.stdout)}


def run_offline(model: Path, streams: int, number: int) -> None:
    import random

    from quire.config import EngineConfig
    from quire.core.params import SamplingParams
    from quire.core.request import Request
    from quire.engine.client import InProcess

    client = InProcess(EngineConfig(model=str(model), prefix_cache=False, threads=2), model)
    rng = random.Random(1)
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    waiting = [
        Request(str(n), [rng.randrange(1000, 40_000) for _ in range(115)], params, max_tokens=64)
        for n in range(number + 1)
    ]
    client.add(waiting.pop())
    while client.engine.has_work:
        client.step()
    begin, num_open = time.perf_counter(), 0
    while waiting or num_open:
        while waiting and num_open < streams:
            client.add(waiting.pop())
            num_open += 1
        num_open -= sum(update.finish is not None for update in client.step())
    print(number * 64 / (time.perf_counter() - begin))


def main() -> None:
    if sys.argv[1:2] == ["--offline"]:
        run_offline(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
        return
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the servers are ended too
    model = resolve(DEFAULT_MODEL).path.resolve()
    loads = make_loads(options.streams, options.rates)
    order = ["quire"]
    for name in options.only.split(","):
        order += [name, "quire"]
    rows: list[tuple[str, str, dict[str, float]]] = []
    for name in order:
        print(f"{name} ...", file=sys.stderr, flush=True)
        if name == "offline":
            rows += [(name, each.name, offline(model, each.streams)) for each in loads if each.streams]
            continue
        port = free_port()
        with running(commands(options.peers, model, port)[name], port):
            rows += [(name, each.name, load(port, each.flags)) for each in loads]
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print("| server | streams | output tok/s | TTFT p50, s | TTFT p99, s | ITL p50, ms | ITL p99, ms | failed |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, what, row in rows:
        cells = [f"{row[key]:.{digits}f}" if key in row else "-" for key, digits in COLUMNS]
        print(f"| {name} | {what} | {' | '.join(cells)} |")


COLUMNS = (
    ("tokens_per_s", 0), ("ttft_p50_s", 2), ("ttft_p99_s", 2), ("itl_p50_ms", 0), ("itl_p99_ms", 0), ("failed", 0),
)  # fmt: skip

if __name__ == "__main__":
    main()
