"""The plan of an engine: memory, what fits, and figures over batch sizes with what bounds them, as one document.

It only calls the calculators beside it. `quire plan` gives it sizes and a cost, and prints the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.capacity.figures import (
    BatchFigures,
    Load,
    batch_figures,
    best_batch,
    speculation_speedup,
    token_prices,
)
from quire.capacity.memory import (
    Memory,
    kv_bytes_per_token,
    longest_request,
    request_bytes,
    requests_that_fit,
)
from quire.capacity.model_size import ModelSize
from quire.capacity.profile import EngineSizes
from quire.capacity.roofline import Rates, Roofline
from quire.capacity.step_cost import Cost, decode_shape, prompt_shape

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MAX_DRAFTS = 8


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """An engine to plan for. `error` widens ranges: the median error of steps that were not fitted."""

    size: ModelSize
    sizes: EngineSizes
    cost: Cost
    rates: Rates
    error: float = 0.0

    @property
    def alternatives(self) -> Sequence[Cost]:
        return self.cost.alternatives() or [self.cost]


def plan_speed(
    planned: PlannedEngine,
    load: Load,
    *,
    price_per_hour: float | None = None,
    acceptance: float | None = None,
) -> dict[str, Any]:
    """Figures over batch sizes, and what follows from them."""
    rows = [plan_batch(planned, load, batch) for batch in fitting_batches(planned, load)]
    document: dict[str, Any] = {
        "batches": rows,
        "prefill": plan_prefill(planned, load),
        "rates": asdict(planned.rates),
    }
    if not rows:
        return document
    best = best_batch([batch_figures(planned.cost, planned.sizes, load, row["batch"]) for row in rows])
    document["best_batch"] = best.batch
    if price_per_hour is not None:
        prices = token_prices(planned.cost, planned.sizes, load, best.batch, price_per_hour)
        document["price"] = {"per_hour": price_per_hour, "batch": best.batch, **asdict(prices)}
    if acceptance is not None:
        document["speculation"] = [plan_speculation(planned, load, row["batch"], acceptance) for row in rows]
    return document


def fitting_batches(planned: PlannedEngine, load: Load) -> list[int]:
    """Powers of 2 up to the requests that fit, and these."""
    if load.length > planned.sizes.max_len:
        return []
    most = requests_that_fit(planned.size, planned.sizes, load.length)
    return [batch for batch in BATCHES if batch < most] + ([most] if most else [])


def describe_memory(size: ModelSize, sizes: EngineSizes, memory: Memory, load: Load) -> dict[str, Any]:
    length = min(load.length, sizes.max_len)
    longest = min(sizes.max_len, longest_request(size, sizes.num_blocks, sizes.max_tokens_per_step))
    return {
        **{f"{name}_bytes": value for name, value in asdict(memory).items()},
        "idle_bytes": memory.idle,
        "most_bytes": memory.most,
        "kv_bytes_per_token": kv_bytes_per_token(size),
        "request_bytes": request_bytes(size, length, sizes.max_tokens_per_step),
        "num_blocks": sizes.num_blocks,
        "longest_request": longest,
        "requests_that_fit": requests_that_fit(size, sizes, length),
        "longest_requests_that_fit": requests_that_fit(size, sizes, max(1, longest)),
        "max_requests": sizes.max_requests,
    }


def plan_batch(planned: PlannedEngine, load: Load, batch: int) -> dict[str, Any]:
    """One batch size: its figures, the range of each, and what bounds decoding."""
    figures = batch_figures(planned.cost, planned.sizes, load, batch)
    others = [batch_figures(cost, planned.sizes, load, batch) for cost in planned.alternatives]
    parts = Roofline(planned.size, planned.rates).parts(decode_shape(batch, load.mean_context, planned.sizes.windows))
    return {
        "batch": batch,
        "step_ms": 1e3 * figures.step_s,
        "ttft_ms": 1e3 * figures.ttft_s,
        "tpot_ms": 1e3 * figures.tpot_s,
        "output_tokens_per_s": figures.output_tokens_per_s,
        "requests_per_s": figures.requests_per_s,
        "ranges": {
            "ttft_ms": spread(others, lambda row: 1e3 * row.ttft_s, planned.error),
            "tpot_ms": spread(others, lambda row: 1e3 * row.tpot_s, planned.error),
            "output_tokens_per_s": spread(others, lambda row: row.output_tokens_per_s, planned.error),
        },
        "bound_by": parts.bound,
        "parts_ms": {name: 1e3 * value for name, value in asdict(parts).items()},
    }


def spread(rows: Sequence[BatchFigures], figure: Callable[[BatchFigures], float], error: float) -> list[float]:
    """The 5th and the 95th percentile, widened by the error of a step."""
    values = sorted(map(figure, rows))
    low, high = (values[round(share * (len(values) - 1))] for share in (0.05, 0.95))
    return [low * (1 - error), high * (1 + error)]


def plan_prefill(planned: PlannedEngine, load: Load) -> dict[str, Any]:
    """A prompt alone, and what bounds its largest step."""
    figures = batch_figures(planned.cost, planned.sizes, load, 1)
    count = min(load.prompt_tokens, planned.sizes.max_tokens_per_step)
    parts = Roofline(planned.size, planned.rates).parts(prompt_shape(count, 0, planned.sizes.windows))
    return {
        "prompt_tokens": load.prompt_tokens,
        "seconds": figures.ttft_s,
        "tokens_per_s": load.prompt_tokens / figures.ttft_s,
        "bound_by": parts.bound,
        "parts_ms": {name: 1e3 * value for name, value in asdict(parts).items()},
    }


def plan_speculation(planned: PlannedEngine, load: Load, batch: int, acceptance: float) -> dict[str, Any]:
    """The number of drafts that gains most at a batch size; 0 if none gains."""
    windows = planned.sizes.windows
    room = planned.sizes.max_tokens_per_step // batch - 1
    found = [
        (speculation_speedup(planned.cost, windows, batch, load.mean_context, acceptance, drafts), drafts)
        for drafts in range(1, min(MAX_DRAFTS, room) + 1)
    ]
    speedup, drafts = max([(1.0, 0), *found])
    return {"batch": batch, "num_drafts": drafts, "speedup": speedup}
