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


def test_tokens_that_exited_are_counted_over_restarts() -> None:
    metrics = Metrics()
    metrics.on_step(StepOutputs(exited_tokens=4))
    metrics.on_step(StepOutputs(exited_tokens=7))
    metrics.on_restart()
    metrics.on_step(StepOutputs(exited_tokens=2))
    assert "quire_early_exit_tokens_total 9.0" in metrics.render().decode()


def test_drafts_are_counted_by_proposer_over_restarts() -> None:
    metrics = Metrics()
    metrics.on_step(StepOutputs(drafted={"suffix": 5}, accepted={"suffix": 2}, speculation_s=0.5))
    metrics.on_step(StepOutputs(drafted={"suffix": 9, "draft": 3}, accepted={"suffix": 4}))
    metrics.on_restart()
    metrics.on_step(StepOutputs(drafted={"suffix": 2}, accepted={"suffix": 1}))
    text = metrics.render().decode()
    assert 'quire_draft_tokens_total{source="suffix"} 11.0' in text
    assert 'quire_draft_tokens_total{source="draft"} 3.0' in text
    assert 'quire_accepted_draft_tokens_total{source="suffix"} 5.0' in text
