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


def test_predicted_steps_are_counted_over_restarts() -> None:
    metrics = Metrics()
    metrics.on_step(StepOutputs(predicted_s=1.0, measured_s=1.5, prediction_error=0.2))
    metrics.on_step(StepOutputs(predicted_s=3.0, measured_s=4.0, prediction_error=0.1))
    metrics.on_restart()
    metrics.on_step(StepOutputs(predicted_s=0.5, measured_s=0.25))
    text = metrics.render().decode()
    assert "quire_predicted_step_seconds_total 3.5" in text
    assert "quire_measured_step_seconds_total 4.25" in text
    assert "quire_step_prediction_error_ratio 0.0" in text
