"""Kills the engine repeatedly under load. Every answer must equal the answer without kills.

    python benchmarks/chaos.py [--kills 50] [--streams 32] [--output-tokens 200]

Starts `quire serve` and sends all requests once without kills. Then --streams streams repeat the same requests while
the engine's process gets SIGKILL at random times. Prints how many answers arrived, how many were lost, and how many
differed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2

MAX_LOST = 20  # then the run ends
WORDS = ("river", "stone", "cloud", "engine", "paper", "lamp", "north", "seven", "violet", "harbour")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=200)
    parser.add_argument("--pause", type=float, default=6.0, help="longest time between two kills, in seconds")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def start() -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "quire.cli.main", "serve", "--port", "0", "--max-len", "1024", "--no-log-requests"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr
    for line in server.stderr:
        if found := re.search(r"Serving at (http://\S+)", line):
            return server, found[1]
    raise SystemExit("the server did not start")


def engine_of(server: int) -> int | None:
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1]) if entry.name.isdecimal() else 0
            if parent == server and "quire.engine.process" in (entry / "cmdline").read_text():
                return int(entry.name)
        except OSError:
            continue
    return None


def question(number: int, output_tokens: int) -> dict[str, object]:
    words = random.Random(number).choices(
        ["river", "stone", "cloud", "engine", "paper", "lamp", "north", "seven", "violet", "harbour"], k=40
    )
    return {
        "prompt": " ".join(words), "max_tokens": output_tokens, "temperature": (number % 2) * 0.8, "seed": number,
        "ignore_eos": True, "stream": True, "return_token_ids": True, "n": 1 + (number % 5 == 0),
    }  # fmt: skip


async def ask(client: httpx2.AsyncClient, body: dict[str, object]) -> dict[int, tuple[list[int], str, str]]:
    """For each choice: tokens, text, finish reason."""
    found: dict[int, tuple[list[int], str, str]] = {}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            document = json.loads(line[6:])
            if "error" in document:
                raise RuntimeError(document["error"]["message"])
            for choice in document["choices"]:
                tokens, text, _ = found.get(choice["index"], ([], "", ""))
                found[choice["index"]] = (
                    tokens + choice["token_ids"], text + choice["text"], choice["finish_reason"] or ""
                )  # fmt: skip
    return found


async def main() -> None:
    options = parse()
    rng = random.Random(options.seed)
    server, url = start()
    try:
        async with httpx2.AsyncClient(base_url=url, timeout=None, limits=httpx2.Limits(max_connections=None)) as client:
            bodies = [question(number, options.output_tokens) for number in range(options.streams)]
            calm = await asyncio.gather(*(ask(client, body) for body in bodies))
            counts = {"answers": 0, "lost": 0, "different": 0}
            over = asyncio.Event()

            async def keep_asking(number: int) -> None:
                while not over.is_set() and counts["lost"] < MAX_LOST:
                    try:
                        found = await ask(client, bodies[number])
                    except Exception as error:
                        counts["lost"] += 1
                        print(f"lost: {error}", file=sys.stderr)
                        continue
                    counts["answers"] += 1
                    counts["different"] += found != calm[number]

            asking = [asyncio.create_task(keep_asking(number)) for number in range(options.streams)]
            kills, last, begin = 0, None, time.monotonic()
            while kills < options.kills and counts["lost"] < MAX_LOST:
                await asyncio.sleep(rng.uniform(0.0, options.pause))
                engine = engine_of(server.pid)
                if engine is not None and engine != last:
                    os.kill(engine, signal.SIGKILL)
                    kills, last = kills + 1, engine
            over.set()
            await asyncio.gather(*asking)
            print(json.dumps({"kills": kills, **counts, "seconds": round(time.monotonic() - begin, 1)}))
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    asyncio.run(main())
