"""What the seconds of a step consist of, from its cost alone: steps of each size, and what bounds them.

A step reads every weight once, whatever its number of tokens. So with few tokens it takes the time of that reading,
and with many that of the arithmetic; keys and values are read besides. The number of tokens stands for the arithmetic
intensity of a roofline, since each token multiplies every weight once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from quire.capacity.profile import CapacityProfile
from quire.capacity.step_cost import Cost, StepShape, decode_shape, prompt_shape
from quire.errors import InvalidParams

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)


@dataclass(frozen=True, slots=True)
class CostParts:
    """The seconds of a step by cause. The first token's arithmetic is part of what every step takes."""

    fixed_s: float  # reading the weights, and the host's work: the same whatever the step has
    tokens_s: float  # arithmetic of further tokens, and the host's work for each row
    cache_s: float  # reading keys and values

    @property
    def seconds(self) -> float:
        return self.fixed_s + self.tokens_s + self.cache_s


def split(cost: Cost, shape: StepShape) -> CostParts:
    """A step's predicted seconds as the sum of its parts."""
    nothing = (0.0,) * len(cost.windows)
    fixed_s = cost.seconds(StepShape(1, min(1, shape.sampled), nothing, nothing))
    without_cache_s = cost.seconds(shape._replace(keys=nothing, pairs=nothing))
    return CostParts(fixed_s, without_cache_s - fixed_s, cost.seconds(shape) - without_cache_s)


def predict_steps(profile: CapacityProfile, context_tokens: int) -> dict[str, Any]:
    """Steps of decoding requests over batch sizes, and of one prompt over lengths."""
    sizes, cost = profile.sizes, profile.cost
    if not 1 <= context_tokens <= sizes.max_len:
        raise InvalidParams(
            f"context_tokens is {context_tokens:,}; give a whole number from 1 to {sizes.max_len:,}, the longest "
            "request of this engine.",
            "context_tokens",
        )
    batches = [decode_shape(size, context_tokens, sizes.windows) for size in up_to(sizes.max_requests)]
    prompts = [prompt_shape(size, 0, sizes.windows) for size in up_to(sizes.max_tokens_per_step)]
    return {
        "context_tokens": context_tokens,
        "max_len": sizes.max_len,
        "max_requests": sizes.max_requests,
        "max_tokens_per_step": sizes.max_tokens_per_step,
        "fitting_requests": min(sizes.max_requests, sizes.num_blocks // sizes.request_blocks(context_tokens)),
        "decode": [describe(cost, shape) for shape in batches],
        "prompt": [describe(cost, shape) for shape in prompts],
    }


def up_to(most: int) -> list[int]:
    return [*(size for size in SIZES if size < most), most]


def describe(cost: Cost, shape: StepShape) -> dict[str, Any]:
    parts = split(cost, shape)
    low, high = cost.range(shape)
    return {"tokens": shape.tokens, "seconds": parts.seconds, "low_s": low, "high_s": high, **asdict(parts)}
