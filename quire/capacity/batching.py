"""The same arrivals under static, dynamic and continuous batching, simulated. The console's Batching screen draws them.

Every policy is the scheduler's own, on the same measured engine. Lengths of answers differ from each other: equal
lengths hide what a static batch loses, since all its requests end together.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from quire.capacity.profile import CapacityProfile
from quire.capacity.simulator import Arrival, SimulatedRequest, Simulation
from quire.core.policy import Batching, Continuous, Dynamic, Policy, Static
from quire.errors import InvalidParams

MAX_REQUESTS, MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 64, 4096, 512
PROMPT_STRIDE = 1 << 24  # tokens of one prompt lie apart from those of another by this


@dataclass(frozen=True, slots=True)
class RandomLoad:
    """Requests that arrive at random. `spread` is the standard deviation of the logarithm of an answer's length."""

    rate: float
    num_requests: int
    prompt_tokens: int
    output_tokens: int  # in the mean
    spread: float = 0.6
    seed: int = 0

    def __post_init__(self) -> None:
        for name, most in (
            ("num_requests", MAX_REQUESTS), ("prompt_tokens", MAX_PROMPT_TOKENS), ("output_tokens", MAX_OUTPUT_TOKENS),
        ):  # fmt: skip
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise InvalidParams(f"{name} is {value}; give a whole number from 1 to {most:,}.", name)
        if not 0.01 <= self.rate <= 1000:
            raise InvalidParams(f"rate is {self.rate:g}; give a number from 0.01 to 1,000 requests a second.", "rate")
        if not 0 <= self.spread <= 2:
            raise InvalidParams(f"spread is {self.spread:g}; give a number from 0 to 2.", "spread")

    def requests(self) -> list[LoadRequest]:
        """The requests in the order of their times, the first at 0. The same load has the same requests."""
        rng, at_s, made = random.Random(self.seed), 0.0, []
        for _ in range(self.num_requests):
            length = rng.lognormvariate(math.log(self.output_tokens) - self.spread**2 / 2, self.spread)
            made.append(LoadRequest(at_s, self.prompt_tokens, max(1, min(MAX_OUTPUT_TOKENS, round(length)))))
            at_s += rng.expovariate(self.rate)
        return made


@dataclass(frozen=True, slots=True)
class LoadRequest:
    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class BatchingResult:
    """What became of the requests under one policy. Times are seconds from the first arrival."""

    requests: list[SimulatedRequest]
    num_steps: int
    mean_rows: float  # sampled rows in a step

    @property
    def end_s(self) -> float:
        return max(request.times[-1] for request in self.requests)


def compare_batching(
    profile: CapacityProfile, requests: Sequence[LoadRequest], batch_size: int, batch_wait_s: float
) -> dict[str, BatchingResult]:
    """Simulate the requests under each policy. Static and dynamic batches have at most `batch_size` requests."""
    check_fits(profile, requests)
    if not 1 <= batch_size <= profile.sizes.max_requests:
        raise InvalidParams(
            f"batch_size is {batch_size}; give a whole number from 1 to {profile.sizes.max_requests:,}, the requests "
            "that this engine runs at once.", "batch_size",
        )  # fmt: skip
    if not 0 <= batch_wait_s <= 60:
        raise InvalidParams(f"batch_wait_s is {batch_wait_s:g}; give seconds from 0 to 60.", "batch_wait_s")
    policies: dict[str, Batching] = {
        "static": Static(batch_size),
        "dynamic": Dynamic(batch_size, batch_wait_s),
        "continuous": Continuous(),
    }
    return {name: run(profile, requests, batching) for name, batching in policies.items()}


def run(profile: CapacityProfile, requests: Sequence[LoadRequest], batching: Batching) -> BatchingResult:
    simulation = Simulation(profile, Policy(batching))
    finished = simulation.run(to_arrival(number, request) for number, request in enumerate(requests))
    if refused := next((request.refused for request in finished if request.refused), None):
        raise InvalidParams(f"This engine refuses a request of the load: {refused}")
    num_tokens = sum(len(request.times) for request in finished)
    return BatchingResult(finished, simulation.num_steps, num_tokens / max(1, simulation.num_steps))


def to_arrival(number: int, request: LoadRequest) -> Arrival:
    """An arrival whose prompt shares no token with another one's."""
    first = number * PROMPT_STRIDE
    return Arrival(request.at_s, range(first, first + request.prompt_tokens), request.output_tokens)


def check_fits(profile: CapacityProfile, requests: Sequence[LoadRequest]) -> None:
    longest = max(request.prompt_tokens + request.output_tokens for request in requests)
    sizes = profile.sizes
    num_blocks = sizes.request_blocks(longest)
    if longest > sizes.max_len or num_blocks > sizes.num_blocks:
        raise InvalidParams(
            f"The longest request has {longest:,} tokens and needs {num_blocks:,} blocks; this engine takes at most "
            f"{sizes.max_len:,} tokens and has {sizes.num_blocks:,} blocks. Shorten the prompts or the answers."
        )
