"""What the tests of whole models on the C++ kernels share."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from quire.engine.batch import Samples
from quire.engine.sampler import Sampler, SamplerOutput
from tests.tools.scores import Scores


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> list[Scores]:
    """The last of the list takes what tokens are sampled from, or are the best of."""
    kept, sample = [Scores()], Sampler.sample

    def keep_and_sample(self: Any, samples: Samples, hidden: Tensor) -> SamplerOutput:
        if len(samples):
            logits = self.head(hidden[: len(samples)])
            kept[-1].keep(logits, samples)
            best = [nth for nth, request in enumerate(samples.requests) if request.argmax_only]
            assert not best or self.head.weight.argmax(hidden, best)[0] == logits[best].argmax(-1).tolist()
        return sample(self, samples, hidden)

    monkeypatch.setattr(Sampler, "sample", keep_and_sample)
    return kept
