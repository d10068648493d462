"""What a recording costs: the same load with and without a recorder, and the recorder's own share of a step.

    python benchmarks/recording.py [MODEL] [--batch 16] [--prompt-tokens 64] [--output-tokens 64] [--rounds 10]

The engine runs in this process; lines are written by the server's writer, into a file that is then removed. Rounds with
and without alternate, because the machine's speed may change: the median of their ratios is what a quiet machine shows.
The share is the time within the recorder and in compressing its lines, over the time of the steps. It does not depend
on what else the machine does.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.config import DEFAULT_MODEL, EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.client import InProcess
from quire.engine.observer import Observer
from quire.engine.recorder import Recorder
from quire.store import resolve
from quire.trace.format import RecordingStart
from quire.trace.writer import GZIP, LEVEL, TraceWriter


class TimedRecorder(Recorder):
    """Adds up the seconds within its methods."""

    seconds = 0.0

    def timed(self, method: Callable[..., Any], *given: Any) -> Any:
        begin_s = time.perf_counter()
        try:
            return method(*given)
        finally:
            self.seconds += time.perf_counter() - begin_s

    def on_add(self, *given: Any) -> None:
        self.timed(super().on_add, *given)

    def on_commit(self, *given: Any) -> None:
        self.timed(super().on_commit, *given)

    def take(self) -> bytes:
        return self.timed(super().take)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    return parser.parse_args()


def run(client: InProcess, options: argparse.Namespace, recorder: TimedRecorder | None, writer: TraceWriter) -> float:
    """Seconds of one round. New prompts each time: none is in the cache."""
    observers: list[Observer] = [recorder] if recorder is not None else []
    client.engine.observers[:] = observers
    params = SamplingParams(temperature=0.0, max_tokens=options.output_tokens, ignore_eos=True)
    begin_s = time.perf_counter()
    for number in range(options.batch):
        prompt = [random.randrange(1_000, 20_000) for _ in range(options.prompt_tokens)]
        client.add(Request(str(number), prompt, params, max_tokens=options.output_tokens))
    while client.engine.has_work:
        client.step()
        if recorder is not None:
            writer.write(recorder.take())
    return time.perf_counter() - begin_s


def compress_seconds(data: bytes, num_pieces: int) -> float:
    """What the writer's thread does, here in one thread."""
    compressor = zlib.compressobj(LEVEL, zlib.DEFLATED, GZIP)
    size = max(1, len(data) // max(1, num_pieces))
    begin_s = time.thread_time()
    for begin in range(0, len(data), size):
        compressor.compress(data[begin : begin + size])
        compressor.flush(zlib.Z_SYNC_FLUSH)
    return time.thread_time() - begin_s


def main() -> None:
    options = parse()
    config = EngineConfig(model=options.model, max_requests=options.batch, speculate="off")
    client = InProcess(config, resolve(options.model).path)
    with tempfile.TemporaryDirectory() as folder:
        writer = TraceWriter(Path(folder) / "trace")
        recorder = TimedRecorder(RecordingStart(begin_s=time.monotonic(), key=b"k"), client.engine, config)
        lines: list[bytes] = []
        take = recorder.take
        recorder.take = lambda: lines.append(take()) or lines[-1]  # type: ignore[method-assign, func-returns-value]
        run(client, options, None, writer)
        recorder.seconds = 0.0
        plain, recorded = [], []
        for _ in range(options.rounds):
            plain.append(run(client, options, None, writer))
            recorded.append(run(client, options, recorder, writer))
        writer.close()
        size = writer.path.stat().st_size
    ratios = [one / other for one, other in zip(recorded, plain, strict=True)]
    data, total_s = b"".join(lines), sum(recorded)
    compressing_s = compress_seconds(data, round(total_s / 0.5))
    print(f"{client.info.summary}")
    tokens = f"{options.prompt_tokens} tokens in, {options.output_tokens} out"
    print(f"{options.batch} streams, {tokens}, {options.rounds} rounds each")
    print(f"median of the ratios of rounds with and without: {statistics.median(ratios):.4f}")
    print(f"within the recorder: {100 * recorder.seconds / total_s:.3f}% of the time of a round")
    print(f"compressing: {100 * compressing_s / total_s:.3f}%, in the server's process")
    print(f"{len(data):,} bytes of lines, {size:,} in the file: {size / total_s / 1e3:.1f} kB/s")


if __name__ == "__main__":
    main()
