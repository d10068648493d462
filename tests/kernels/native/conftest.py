"""What the tests of whole models on the C++ kernels share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from quire.core.plan import Plan
from quire.engine import runner
from quire.engine.logits import Position
from quire.engine.sampler import sample
from tests.tools.scores import Scores


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> list[Scores]:
    """The last of the list takes what tokens are sampled from, or are the best of."""
    kept = [Scores()]
    run_sample = runner.ModelRunner._sample

    def sample_and_keep(logits: Tensor, positions: Sequence[Position], ops: Any) -> Any:
        kept[-1].keep(logits, positions)
        return sample(logits, positions, ops)

    def keep_best(self: Any, plan: Plan, hidden: Tensor, ends: list[int]) -> Any:
        for row, (request, count) in enumerate(zip(plan.requests, plan.yields, strict=True)):
            if request.takes_best and count:
                drafts = [request.tokens + request.drafts[:number] for number in range(count)]
                logits = self.model.logits(hidden[ends[row] - count : ends[row]])
                kept[-1].keep(logits, [Position(request, tokens, len(tokens)) for tokens in drafts])
                places = list(range(ends[row] - count, ends[row]))
                assert self.model.best(hidden, places)[0] == logits.argmax(-1).tolist()
        return run_sample(self, plan, hidden, ends)

    monkeypatch.setattr(runner, "sample", sample_and_keep)
    monkeypatch.setattr(runner.ModelRunner, "_sample", keep_best)
    return kept
