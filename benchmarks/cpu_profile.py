"""The time of a step with quire's own CPU kernels, for each op and for Python.

    python benchmarks/cpu_profile.py [--model smollm2:135m] [--batch 1,8,32] [--context 128] [--steps 64]

Each batch decodes `--steps` tokens at a context of about `--context` tokens. Every op is timed. The title of a table
has the time of the whole step as the engine runs it. The line `around it` is the rest: scheduling, batching, sampling
and threads that wait for each other.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.client import InProcess
from quire.store import resolve


class TimedHead:
    """A head whose argmax is timed. It stands in for its own weight."""

    def __init__(self, head: Any) -> None:
        self._head = head
        self.weight = self
        self.seconds = 0.0

    def argmax(self, hidden: Any, rows: Any) -> Any:
        begin = time.perf_counter()
        best = self._head.weight.argmax(hidden, rows)
        self.seconds += time.perf_counter() - begin
        return best


class Timed:
    """A recorded model that times its ops and its head."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.head = TimedHead(model.head)
        self.times: dict[str, int] = defaultdict(int)

    def __call__(self, tokens: Any, positions: Any, paging: Any, kv: Any) -> Any:
        for index, (kind, nanoseconds) in enumerate(self.model.tape.run_timed(tokens, positions, paging)):
            self.times[f"{kind} {self.model.tape.ops[index].width}" if "matmul" in kind else kind] += nanoseconds
        return self.model.tape.result(self.model._hidden, len(tokens))

    @contextmanager
    def used_by(self, runner: Any) -> Iterator[None]:
        """The runner runs this model, and its sampler this head."""
        runner.model, runner.sampler.head = self, self.head
        try:
            yield
        finally:
            runner.model, runner.sampler.head = self.model, self.model.head


def add(client: InProcess, batch: int, prompt: int, answer: int) -> list[Request]:
    requests = []
    for index in range(batch):
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        tokens = [(7 * index + 13 * place) % 1000 + 100 for place in range(prompt)]
        requests.append(Request(f"{index}", tokens, params, seed=index, max_tokens=answer))
        client.add(requests[-1])
    return requests


def measure(client: InProcess, batch: int, prompt: int, steps: int, timed: Timed) -> None:
    """Measure steps in which all requests decode. The first ones have begun earlier, and their contexts are longer."""
    runner: Any = client.engine.runner
    requests = add(client, batch, prompt, steps + batch * prompt)
    while any(len(request.tokens) == prompt for request in requests):
        client.step()
    first, last = min(len(request.tokens) for request in requests), max(len(request.tokens) for request in requests)
    begin = time.perf_counter()
    with timed.used_by(runner):
        for _ in range(steps):
            client.step()
    whole_ms = 1e3 * (time.perf_counter() - begin) / steps
    for request in requests:
        client.abort(request.id)
    show(f"decode, batch {batch}, context {first} to {last + steps}", timed, steps, whole_ms, batch)


def show(title: str, timed: Timed, steps: int, whole_ms: float, tokens: int) -> None:
    print(f"{title}: {whole_ms:.2f} ms a step, {1e3 * tokens / whole_ms:.0f} tok/s")
    for kind, nanoseconds in sorted(timed.times.items(), key=lambda item: -item[1]):
        print(f"  {kind:<24} {nanoseconds / 1e6 / steps:8.3f} ms")
    head_ms = 1e3 * timed.head.seconds / steps
    print(f"  {'head':<24} {head_ms:8.3f} ms")
    known = sum(timed.times.values()) / 1e6 / steps + head_ms
    print(f"  {'around it':<24} {whole_ms - known:8.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2:135m")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--kv-dtype", default="auto")
    options = parser.parse_args()
    config = EngineConfig(
        model=options.model, kernels="native", prefix_cache=False, kv_dtype=options.kv_dtype, speculate="off"
    )
    client = InProcess(config, resolve(options.model).path)
    runner: Any = client.engine.runner
    for batch in map(int, options.batch.split(",")):
        measure(client, batch, options.context, options.steps, Timed(runner.model))
    for _ in range(2):
        timed = Timed(runner.model)
        add(client, 1, options.prefill, 1)
        begin = time.perf_counter()
        with timed.used_by(runner):
            while client.engine.has_work:
                client.step()
    show(f"prefill of {options.prefill}", timed, 1, 1e3 * (time.perf_counter() - begin), options.prefill)


if __name__ == "__main__":
    main()
