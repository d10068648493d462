"""What the tests of whole models on the C++ kernels share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from quire.engine import runner
from quire.engine.sampler import Position, sample
from tests.tools.scores import Scores


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> list[Scores]:
    """The last of the list takes what is sampled."""
    kept = [Scores()]

    def sample_and_keep(logits: Tensor, positions: Sequence[Position], ops: Any) -> Any:
        kept[-1].keep(logits, positions)
        return sample(logits, positions, ops)

    monkeypatch.setattr(runner, "sample", sample_and_keep)
    return kept
