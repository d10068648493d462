"""What the seconds of a step consist of, from the fitted cost alone: steps of each size, and what bounds them.

A step reads every weight once, whatever its number of tokens. So with few tokens it takes the time of that reading,
and with many that of the arithmetic; keys and values are read besides. The number of tokens stands for the arithmetic
intensity of a roofline, since each token multiplies every weight once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from quire.capacity.profile import CapacityProfile
from quire.capacity.step_cost import MIN_STEP_S, StepCost, StepShape, count_pairs, features
from quire.errors import InvalidParams

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)


@dataclass(frozen=True, slots=True)
class CostParts:
    """The seconds of a step by cause."""

    fixed_s: float  # reading the weights, and the host's work: the same whatever the step has
    tokens_s: float  # arithmetic, and the host's work for each row
    cache_s: float  # reading keys and values

    @property
    def seconds(self) -> float:
        return max(MIN_STEP_S, self.fixed_s + self.tokens_s + self.cache_s)


def split(cost: StepCost, shape: StepShape) -> CostParts:
    """A step's predicted seconds as the sum of its parts.

    The first token's arithmetic is part of what every step takes, so it counts as fixed.
    """
    products = [a * b for a, b in zip(cost.coefficients, features(shape), strict=True)]
    num_groups = len(cost.windows)
    nothing = (0.0,) * num_groups
    one_token = StepShape(1, min(1, shape.sampled), nothing, nothing)
    fixed_s = sum(a * b for a, b in zip(cost.coefficients, features(one_token), strict=True))
    cache_s = sum(products[-2 * num_groups :])
    return CostParts(fixed_s, max(0.0, sum(products) - cache_s - fixed_s), cache_s)


def decode_shape(cost: StepCost, batch: int, context_tokens: int) -> StepShape:
    """A step in which every request decodes one token behind `context_tokens`."""
    keys = tuple(float(batch * min(context_tokens, window or context_tokens)) for window in cost.windows)
    return StepShape(batch, batch, keys, (0.0,) * len(cost.windows))


def prompt_shape(cost: StepCost, num_tokens: int) -> StepShape:
    """A step that computes one prompt from its beginning."""
    pairs = tuple(count_pairs(0, num_tokens, window) for window in cost.windows)
    return StepShape(num_tokens, 1, (0.0,) * len(cost.windows), pairs)


def predict_steps(profile: CapacityProfile, context_tokens: int) -> dict[str, Any]:
    """Steps of decoding requests over batch sizes, and of one prompt over lengths."""
    sizes, cost = profile.sizes, profile.cost
    if not 1 <= context_tokens <= sizes.max_len:
        raise InvalidParams(
            f"context_tokens is {context_tokens:,}; give a whole number from 1 to {sizes.max_len:,}, the longest "
            "request of this engine.", "context_tokens",
        )  # fmt: skip
    blocks_each = -(-context_tokens // sizes.block_size) * len(sizes.windows)
    return {
        "context_tokens": context_tokens,
        "max_len": sizes.max_len,
        "max_requests": sizes.max_requests,
        "max_tokens_per_step": sizes.max_tokens_per_step,
        "fitting_requests": min(sizes.max_requests, sizes.num_blocks // blocks_each),
        "decode": [describe(cost, decode_shape(cost, size, context_tokens)) for size in up_to(sizes.max_requests)],
        "prompt": [describe(cost, prompt_shape(cost, size)) for size in up_to(sizes.max_tokens_per_step)],
    }


def up_to(most: int) -> list[int]:
    return [*(size for size in SIZES if size < most), most]


def describe(cost: StepCost, shape: StepShape) -> dict[str, Any]:
    parts = split(cost, shape)
    low, high = cost.range(shape)
    return {"tokens": shape.tokens, "seconds": parts.seconds, "low_s": low, "high_s": high, **asdict(parts)}
