"""Chains of drafts that a model makes token after token: a draft model (`draft_model.py`), or the target's first layers
and an exit (`self_draft.py`). A pass computes the last token of each chain, and a draft is drawn from its logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.core.drafts import Drafts
from quire.core.plan import Plan
from quire.core.request import Request
from quire.engine.sampling_state import settings_of, signed
from quire.kernels import Kernels
from quire.kernels.arrays import Array


@dataclass(slots=True)
class DraftChain:
    """A request's drafts while they are made, `depth` at most."""

    request: Request
    depth: int
    drafts: Drafts

    @property
    def last_token(self) -> int:
        return self.drafts.tokens[-1] if len(self.drafts) else self.request.tokens[-1]

    @property
    def is_done(self) -> bool:
        return len(self.drafts) >= self.depth


def begin_chains(
    name: str, requests: Sequence[Request], max_drafts: Sequence[int], reserve: Callable[[Request, int], int]
) -> list[DraftChain | None]:
    """An empty chain for each request that may have drafts, as far as there are blocks for them
    (`Scheduler.reserve`)."""
    chains: list[DraftChain | None] = []
    for request, most in zip(requests, max_drafts, strict=True):
        depth = min(most, reserve(request, most)) if most else 0
        chains.append(DraftChain(request, depth, Drafts([], None, [], name)) if depth else None)
    return chains


def plan_pass(chains: Sequence[DraftChain]) -> Plan:
    """A plan for the last token of each chain."""
    starts = [len(chain.request.tokens) - 1 + len(chain.drafts) for chain in chains]
    ones, requests = [1] * len(chains), [chain.request for chain in chains]
    last = {index: Drafts([chain.last_token]) for index, chain in enumerate(chains) if len(chain.drafts)}
    return Plan(0, requests, starts, ones, ones, last)


def draw_drafts(
    chains: Sequence[DraftChain], logits: Array, odds: Callable[[float], float], ops: Kernels
) -> None:  # fmt: skip
    """The next draft of each chain: sampled with the request's noise, as the target will sample. Nothing is cut off by
    top-k, top-p and min-p: what is unlikely here may be likely there. A chain ends where a logit is no number.

    logits [chains, vocab]; `odds` are those of a draft, by its probability."""
    arrays = ops.arrays
    with np.errstate(all="ignore"):  # a head may have any values; what is no number becomes no draft
        settings = [(settings_of(chain.request.params)[0], 0, 1.0, -math.inf) for chain in chains]
        tokens, max_logits = ops.sample(
            arrays.put(np.array(logits, np.float32), "float32"),  # a copy: it is overwritten
            arrays.put(settings, "float64"),
            arrays.put([signed(chain.request.seed) for chain in chains], "int64"),
            arrays.put([len(chain.request.tokens) + len(chain.drafts) for chain in chains], "int64"),
        )
        logprobs = ops.logprobs(logits, tokens, 0)[0]
    columns = zip(chains, tokens.tolist(), max_logits.tolist(), logprobs.tolist(), strict=True)
    for chain, token, max_logit, logprob in columns:
        if not math.isfinite(max_logit) or not math.isfinite(logprob):
            chain.depth = len(chain.drafts)
            continue
        chain.drafts.tokens.append(token)
        chain.drafts.odds.append(odds(math.exp(logprob)))
