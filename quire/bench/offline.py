"""`quire bench offline`: the speed of the engine alone, without a server.

Random token ids, greedy, no end of sequence, prefix cache off. For each batch size the same prompts run twice: once for
one token each, which is the prefill (and the time to first token of the whole batch), and once for all tokens. Decode
is timed while all requests decode: from the first token of the last request to the last token of the first.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.client import InProcess
from quire.engine.machine import machine
from quire.errors import InvalidParams


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One batch size. tpot_ms is the time between two tokens of one request; rates are over the whole batch."""

    batch: int
    prompt_tokens: int
    output_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    total_s: float


def run(
    config: EngineConfig,
    path: Path,
    *,
    batches: Sequence[int],
    prompt_tokens: int,
    output_tokens: int,
    repeats: int = 3,
    report: Callable[[int, int | None], None] | None = None,
) -> dict[str, Any]:
    """Measure every batch size; each figure is the median of `repeats` runs. `config` has no prefix cache."""
    if prompt_tokens < 1 or output_tokens < 2 or repeats < 1:
        raise InvalidParams("Give prompt tokens from 1, output tokens from 2, and repeats from 1.")
    assert not config.prefix_cache
    assert config.max_requests is not None
    assert config.max_requests >= max(batches)
    begin = time.perf_counter()
    client = InProcess(config, path)
    start_s = time.perf_counter() - begin
    measure(client, 1, 8, 2)  # the first step allocates memory that later steps reuse
    rows = []
    for number, batch in enumerate(batches):
        if report:
            report(number, len(batches))
        rows.append(median([measure(client, batch, prompt_tokens, output_tokens) for _ in range(repeats)]))
    return {
        "machine": machine(config),
        "model": config.model,
        "engine": client.info.summary,
        "rows": [asdict(row) for row in rows],
        "start_s": start_s,
    }


def measure(client: InProcess, batch: int, prompt_tokens: int, output_tokens: int) -> BatchResult:
    prefill = run_batch(client, batch, prompt_tokens, 1)
    whole = run_batch(client, batch, prompt_tokens, output_tokens)
    return BatchResult(
        batch,
        prompt_tokens,
        output_tokens,
        prefill_tokens_per_s=batch * prompt_tokens / prefill.total_s,
        decode_tokens_per_s=whole.num_decoded / whole.decode_s,
        ttft_ms=1e3 * prefill.total_s,
        tpot_ms=1e3 * whole.decode_s * batch / whole.num_decoded,
        total_s=whole.total_s,
    )


class BatchRun(NamedTuple):
    """Total seconds, the seconds in which the whole batch decoded, and the tokens of that time."""

    total_s: float
    decode_s: float
    num_decoded: int


def run_batch(client: InProcess, batch: int, prompt_tokens: int, output_tokens: int) -> BatchRun:
    """Run one batch to its end."""
    rng = random.Random(7)
    vocabulary = client.info.config.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    requests = [
        Request(
            str(number), [rng.randrange(vocabulary) for _ in range(prompt_tokens)], params, max_tokens=output_tokens
        )
        for number in range(batch)
    ]
    begin = time.perf_counter()
    for request in requests:
        client.add(request)
    started: set[str] = set()
    num_open, num_decoded, first_s, last_s = batch, 0, 0.0, 0.0
    while num_open:
        was_whole = num_open == batch or not num_decoded
        updates = client.step()
        now_s = time.perf_counter() - begin
        if len(started) < batch:
            started.update(update.id for update in updates)
            first_s = now_s
        elif was_whole:
            num_decoded += sum(len(update.tokens) for update in updates)
            last_s = now_s
        num_open -= sum(update.finish is not None for update in updates)
    return BatchRun(now_s, last_s - first_s, num_decoded)


def median(rows: list[BatchResult]) -> BatchResult:
    """The median of each figure."""
    columns = {name: statistics.median(getattr(row, name) for row in rows) for name in BatchResult.__slots__}
    return BatchResult(**columns)
