"""What the engine's totals become: an engine that was started again counts from 0, the server's figures go on."""

from __future__ import annotations

import pytest

from quire.engine.messages import StepOutputs
from quire.server.metrics import Metrics

pytestmark = pytest.mark.server


def figures(metrics: Metrics) -> tuple[float, float]:
    lines = dict(line.rsplit(" ", 1) for line in metrics.render().decode().splitlines() if not line.startswith("#"))
    return float(lines["quire_preemptions_total"]), float(lines["quire_swaps_total"])


def test_preemptions_and_swaps_are_counted_over_restarts() -> None:
    metrics = Metrics()
    metrics.on_step(StepOutputs(preemptions=3, swaps=2))
    metrics.on_step(StepOutputs(preemptions=5, swaps=2))
    assert figures(metrics) == (5, 2)
    metrics.on_restart()
    metrics.on_step(StepOutputs(preemptions=1, swaps=1))
    assert figures(metrics) == (6, 3)
