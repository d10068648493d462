"""The policy that a configuration names. `build.py` calls this, and so does what simulates an engine."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.core.policy import Batching, Continuous, Dynamic, Policy, Static, WaitingRatio

BATCH_WAIT_S = 0.05  # default of dynamic batching
WAITING_SERVED_RATIO, MAX_WAITING_TOKENS = 0.3, 20  # defaults of batching by ratio


def make_policy(config: EngineConfig, max_requests: int) -> Policy:
    """A policy has a state: each scheduler needs its own."""
    return Policy(choose_batching(config, max_requests), config.order)


def choose_batching(config: EngineConfig, max_requests: int) -> Batching:
    size = config.batch_size or max_requests
    if config.batching == "static":
        return Static(size)
    if config.batching == "dynamic":
        return Dynamic(size, BATCH_WAIT_S if config.batch_wait is None else config.batch_wait)
    if config.batching == "ratio":
        ratio, tokens = config.waiting_served_ratio, config.max_waiting_tokens
        return WaitingRatio(
            WAITING_SERVED_RATIO if ratio is None else ratio, MAX_WAITING_TOKENS if tokens is None else tokens
        )  # fmt: skip
    return Continuous()
