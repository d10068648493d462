"""Figures of an engine under a steady load, as plain formulas over the cost of a step.

    decode_s(b)      a step in which b requests get a token each, at the mean context prompt + output / 2
    prefill_s(b)     the steps that compute one prompt beside b - 1 decoding requests
    cycle_s(b)       output x decode_s(b) + b x (prefill_s(b) - its steps x decode_s(b - 1)): b requests from end to end
    throughput       b x output / cycle_s;  TPOT = cycle_s / output;  TTFT = prefill_s(b)

`plan.py` prints them. The simulator has queues, bursts and the latency target, which these formulas leave out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.capacity.profile import EngineSizes
from quire.capacity.step_cost import Cost, StepShape, decode_shape, prompt_shape

ENOUGH = 0.95  # the best batch is the smallest whose throughput is at least this share of the highest


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one kind."""

    prompt_tokens: int
    output_tokens: int

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def mean_context(self) -> int:
        return self.prompt_tokens + self.output_tokens // 2


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """What each of `batch` requests and all of them together get."""

    batch: int
    step_s: float  # of decoding
    ttft_s: float
    tpot_s: float
    output_tokens_per_s: float
    requests_per_s: float


def prompt_steps(load: Load, batch: int, max_tokens_per_step: int, windows: Sequence[int | None]) -> list[StepShape]:
    """The steps that compute a prompt in chunks of max_tokens_per_step - (batch - 1) tokens, beside decoding rows."""
    beside = decode_shape(batch - 1, load.mean_context, windows)
    chunk = max(1, max_tokens_per_step - (batch - 1))
    steps = []
    for start in range(0, load.prompt_tokens, chunk):
        count = min(chunk, load.prompt_tokens - start)
        own = prompt_shape(count, start, windows, is_last=start + count == load.prompt_tokens)
        steps.append(add_shapes(own, beside))
    return steps


def add_shapes(a: StepShape, b: StepShape) -> StepShape:
    """The step that has the rows of both."""
    keys, pairs = (
        tuple(x + y for x, y in zip(*columns, strict=True)) for columns in ((a.keys, b.keys), (a.pairs, b.pairs))
    )
    return StepShape(a.tokens + b.tokens, a.sampled + b.sampled, keys, pairs)


def batch_figures(cost: Cost, sizes: EngineSizes, load: Load, batch: int) -> BatchFigures:
    """The formulas above, for one batch size."""
    windows = sizes.windows
    step_s = cost.seconds(decode_shape(batch, load.mean_context, windows))
    steps = prompt_steps(load, batch, sizes.max_tokens_per_step, windows)
    ttft_s = sum(cost.seconds(step) for step in steps)
    beside_s = cost.seconds(decode_shape(batch - 1, load.mean_context, windows)) if batch > 1 else 0.0
    added_s = max(0.0, ttft_s - len(steps) * beside_s)  # the other requests get a token in each of these steps
    cycle_s = (load.output_tokens - 1) * step_s + batch * added_s
    return BatchFigures(
        batch,
        step_s,
        ttft_s,
        cycle_s / max(1, load.output_tokens - 1),
        batch * load.output_tokens / cycle_s if cycle_s else 0.0,
        batch / cycle_s if cycle_s else 0.0,
    )


def best_batch(rows: Sequence[BatchFigures]) -> BatchFigures:
    """The smallest batch whose throughput is at least 95% of the highest."""
    highest = max(row.output_tokens_per_s for row in rows)
    return next(row for row in rows if row.output_tokens_per_s >= ENOUGH * highest)


def tokens_per_verified_step(acceptance: float, num_drafts: int) -> float:
    """1 + a + a^2 + ... + a^k: each of k drafts is right with chance a if the one before is. One token is sampled."""
    return sum(acceptance**count for count in range(num_drafts + 1))


def speculation_speedup(
    cost: Cost,
    windows: Sequence[int | None],
    batch: int,
    context: int,
    acceptance: float,
    num_drafts: int,
    draft_s: float = 0.0,
) -> float:
    """tokens_per_verified_step x decode_s / (seconds of a step that verifies k drafts a row + seconds of drafting).

    The row's keys are read once for its token, and each draft is one more query on them.
    """
    plain_s = cost.seconds(decode_shape(batch, context, windows))
    count = batch * (1 + num_drafts)
    keys = decode_shape(batch, context, windows).keys
    verify = StepShape(count, count, keys, tuple(num_drafts * each for each in keys))
    return tokens_per_verified_step(acceptance, num_drafts) * plain_s / (cost.seconds(verify) + draft_s)


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """Of a million tokens, in the currency of the price of an hour."""

    output: float
    input: float
    cached: float


def token_prices(cost: Cost, sizes: EngineSizes, load: Load, batch: int, price_per_hour: float) -> TokenPrices:
    """Price of the engine's seconds. An output token takes decode_s(b) / b. A prompt token takes its share of the steps
    that compute the prompt, less the seconds of the rows beside it. A cached token takes only the attention to it."""
    windows = sizes.windows
    row = batch_figures(cost, sizes, load, batch)
    beside_s = cost.seconds(decode_shape(batch - 1, load.mean_context, windows)) if batch > 1 else 0.0
    steps = prompt_steps(load, batch, sizes.max_tokens_per_step, windows)
    input_s = max(0.0, row.ttft_s - len(steps) * beside_s) / load.prompt_tokens
    count = min(load.prompt_tokens, sizes.max_tokens_per_step)
    behind = cost.seconds(prompt_shape(count, load.prompt_tokens, windows))
    cached_s = max(0.0, behind - cost.seconds(prompt_shape(count, 0, windows))) / load.prompt_tokens
    per_second = price_per_hour / 3600
    return TokenPrices(1e6 * per_second * row.step_s / batch, 1e6 * per_second * input_s, 1e6 * per_second * cached_s)
