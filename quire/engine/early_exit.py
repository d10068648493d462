"""EarlyExit: takes an answer's next token from the exit, where its confidence reaches the request's `early_exit`.

This is approximate: the whole model might choose another token. The later layers of a token that exited are computed
with the next step of its request that does not exit. Whether a token exits depends on the request's tokens and
parameters only, so the answer does not depend on the batch, on preemption or on a restart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.core.plan import Plan
from quire.core.request import Request
from quire.engine.batch import Samples
from quire.engine.exit_logits import MAX_ROWS, ExitLogits
from quire.engine.sampler import Sampler
from quire.kernels import Kernels

FULL_EVERY = 8  # the whole model chooses every eighth token: so few wait for their later layers

Floats = NDArray[np.float32]


class EarlyExit:
    """`confidence` is how often the whole model agrees, by the probability of the exit's likeliest token."""

    def __init__(self, exit_logits: ExitLogits, confidence: Callable[[float], float], ops: Kernels) -> None:
        self.exit_logits = exit_logits
        self.confidence = confidence
        self._ops = ops

    def choose(self, plan: Plan, samples: Samples, states: Floats, sampler: Sampler) -> dict[int, int]:
        """The rows that exit, and their tokens. states [tokens, hidden_size] after the first layers."""
        if all(request.params.early_exit is None for request in plan.requests):
            return {}
        chosen: dict[int, int] = {}
        indices = [nth for nth, row in enumerate(samples.rows) if may_exit(plan, row)]
        for first in range(0, len(indices), MAX_ROWS):
            some = indices[first : first + MAX_ROWS]
            tokens = self._choose(samples, some, states[[samples.indices[nth] for nth in some]], sampler)
            for nth, token in zip(some, tokens, strict=True):
                if token is not None:
                    chosen[samples.rows[nth]] = token
        return chosen

    def _choose(self, samples: Samples, indices: list[int], states: Floats, sampler: Sampler) -> Sequence[int | None]:
        """The token of each sample, or None if the exit is not confident.

        The confidence is that of the token that is likeliest under the request's bans, bias and penalties, by its
        probability without them. So a ban does not make the rest look certain.
        """
        requests = [samples.requests[nth] for nth in indices]
        with np.errstate(all="ignore"):  # a head may have any values; what is no number does not exit
            raw = self.exit_logits(states, requests)
            logits = raw.copy()
            sampler.process(samples, indices, logits)
            logprobs = self._ops.logprobs(raw, logits.argmax(-1), 0)[0]
            tokens, max_logits = sampler.draw(samples, indices, logits)
        columns = zip(requests, tokens.tolist(), max_logits.tolist(), np.exp(logprobs).tolist(), strict=True)
        return [
            token if math.isfinite(max_logit) and self.is_confident(request, probability) else None
            for request, token, max_logit, probability in columns
        ]

    def is_confident(self, request: Request, probability: float) -> bool:
        threshold = request.params.early_exit
        return threshold is not None and self.confidence(probability) >= threshold  # not so for NaN


def may_exit(plan: Plan, row: int) -> bool:
    """Whether a row ends with a token of the answer after which the next one may be the exit's."""
    request, last = plan.requests[row], plan.starts[row] + plan.counts[row] - 1
    if request.params.early_exit is None or row in plan.drafts or plan.yields[row] != 1 or request.finished:
        return False
    num_output = last + 1 - request.num_prompt
    return num_output > 0 and num_output % FULL_EVERY != 0


def can_wait(plan: Plan, row: int) -> bool:
    """Whether the later layers of a row that exits may be computed by a later step: its other tokens are recent ones
    that exited too. After a preemption there may be more."""
    return plan.starts[row] >= plan.requests[row].num_prompt and plan.counts[row] <= FULL_EVERY
