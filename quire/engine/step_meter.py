"""StepMeter: predicts each step of a serving engine, compares, and keeps the cost of a step fresh.

It observes an engine (`observer.py`) in the engine's process. In a step it adds one entry to a table of bounded size.
Fits run rarely, in a thread of low priority. `process.py` sends the newest profile to the server.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.capacity.profile import CapacityProfile, EngineSizes
from quire.capacity.step_cost import (
    KNOTS,
    MeasuredStep,
    StepCost,
    StepShape,
    decode_shape,
    errors,
    fit,
    prompt_shape,
    shape_of,
)
from quire.config import EngineConfig
from quire.core.plan import Plan, Sampled, Update
from quire.engine.observer import Observer
from quire.engine.profiles import describe_machine, find_calibration, profile_path, read_sizes

if TYPE_CHECKING:
    from quire.engine.engine import Engine

KEPT_OF_A_SIZE = 64  # newest steps of each size that a fit uses: sizes are powers of 2 of the tokens
MIN_OF_A_SIZE = 8  # with fewer, earlier costs stand for steps of a size
MIN_STEPS = 256  # before the first fit
MIN_SIZES = 3  # without a calibration a fit needs steps of so many sizes
RECENT = 1000  # steps whose errors are remembered
MEDIAN_EVERY = 64  # steps, between two medians of their errors
REFIT_S = 60.0  # between two fits
NUM_RESAMPLED = 8
MAX_RATIO = 3.0  # a step that took so many times as long as others of its kind was interrupted
HELD_OUT = 5
CONTEXTS = (64, 1024)  # of steps that stand for those of a size that has not been served

log = logging.getLogger("quire.engine")


def make_meter(engine: Engine, config: EngineConfig) -> StepMeter:
    """For an engine that serves. A calibration is kept fresh in its file; without one, costs stay in the process."""
    calibration = find_calibration(config, engine)
    sizes = read_sizes(engine, engine.scheduler.pace.target_s)
    machine = describe_machine(config)
    if calibration is None:
        return StepMeter(config.model, machine, sizes, None)
    known = replace(calibration, sizes=sizes)
    return StepMeter(config.model, machine, sizes, known, profile_path(config), calibration.sizes, num_profiles=1)


class StepTable:
    """The newest steps of each size."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[MeasuredStep]] = {}

    def add(self, shape: StepShape, seconds: float) -> None:
        size = shape.tokens.bit_length()
        steps = self._steps.get(size)
        if steps is None:
            steps = self._steps[size] = deque(maxlen=KEPT_OF_A_SIZE)
        steps.append(MeasuredStep(shape, seconds))

    def steps(self) -> list[MeasuredStep]:
        return [step for steps in list(self._steps.values()) for step in list(steps)]

    @property
    def num_sizes(self) -> int:
        return sum(len(steps) >= MIN_OF_A_SIZE for steps in self._steps.values())

    def has_size(self, tokens: int) -> bool:
        return len(self._steps.get(tokens.bit_length(), ())) >= MIN_OF_A_SIZE


@dataclass(slots=True)
class StepMeter(Observer):
    """`profile` has the newest cost. Until there is one, steps are only collected."""

    model: str
    machine: str
    sizes: EngineSizes
    profile: CapacityProfile | None
    path: Path | None = None  # where a calibration is kept; None: it is not
    kept_sizes: EngineSizes | None = None  # of the calibration: options of this engine are not those of later plans
    predicted_s: float = 0.0  # total of the steps that were predicted,
    measured_s: float = 0.0  # and what these took
    recent_error: float | None = None  # the median relative error of the last ones
    num_profiles: int = 0  # that fits have made
    _table: StepTable = field(default_factory=StepTable)
    _errors: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))  # relative, of the last steps
    _num_compared: int = 0
    _num_new: int = 0
    _next_fit_s: float = 0.0
    _thread: threading.Thread | None = None

    def on_commit(self, plan: Plan, sampled: Sampled, updates: Sequence[Update], launched_s: float) -> None:
        now_s = time.monotonic()
        if not is_predictable(plan) or sampled.exited or sampled.failed:
            return
        seconds = now_s - launched_s if self.sizes.depth == 1 else sampled.seconds
        if seconds is None or seconds <= 0:
            return
        shape = shape_of(plan, self.sizes.windows)
        if self.profile is not None:
            self._compare(self.profile.cost.seconds(shape), seconds)
        self._table.add(shape, seconds)
        self._num_new += 1
        if self._num_new >= MIN_STEPS and now_s >= self._next_fit_s:
            self._start_fit(now_s)

    def predict(self, plan: Plan) -> float | None:
        """Seconds of a step. None while its cost is not known."""
        if self.profile is None or not is_predictable(plan):
            return None
        return self.profile.cost.seconds(shape_of(plan, self.sizes.windows))

    def _compare(self, predicted_s: float, seconds: float) -> None:
        self.predicted_s += predicted_s
        self.measured_s += seconds
        self._errors.append(abs(predicted_s / seconds - 1))
        self._num_compared += 1
        if self._num_compared % MEDIAN_EVERY == 1:
            self.recent_error = statistics.median(self._errors)

    def wait(self) -> None:
        """Until the fit that runs, if any, has ended."""
        if self._thread is not None:
            self._thread.join()

    def _start_fit(self, now_s: float) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        self._num_new, self._next_fit_s = 0, now_s + REFIT_S
        self._thread = threading.Thread(target=self._run_fit, name="step costs", daemon=True)
        self._thread.start()

    def _run_fit(self) -> None:
        """A fit that fails is the last one: the costs before it stay."""
        try:
            self._fit()
        except Exception as error:
            self._next_fit_s = math.inf
            log.error("costs of steps cannot be fitted; serving goes on with those before", exc_info=error)

    def _fit(self) -> None:
        lower_priority()
        made = refit(self._table, self.profile, self.sizes, self.model, self.machine)
        if made is None:
            self._next_fit_s = 0.0  # the next steps may be of the sizes that are missing
            return
        made = replace(made, served_steps=len(self._errors), served_error=self.recent_error)
        self.profile = made
        self.num_profiles += 1
        if self.path is not None:
            try:
                replace(made, sizes=self.kept_sizes or made.sizes).save(self.path)
            except OSError as error:
                log.warning("costs of steps cannot be written to %s: %s", self.path, error)
                self.path = None


def is_predictable(plan: Plan) -> bool:
    """Drafts, encoders and copies from the host are not among the features of a cost."""
    return not (plan.drafts or plan.drafted or plan.encodes or plan.swap_in)


def lower_priority() -> None:
    """Of this thread: a fit takes processor time only where nobody else needs it."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def refit(
    table: StepTable, before: CapacityProfile | None, sizes: EngineSizes, model: str, machine: str
) -> CapacityProfile | None:
    """A profile from served steps. Earlier costs, scaled to today's speed, stand for sizes that have not been served.

    None if there is no earlier cost and too few sizes have been served.
    """
    served = without_interrupted(table.steps(), before)
    if before is None and table.num_sizes < MIN_SIZES:
        return None
    found = errors(fit_served([step for n, step in enumerate(served) if n % HELD_OUT], table, before, sizes),
                   served[::HELD_OUT])  # fmt: skip
    cost = fit_served(served, table, before, sizes)
    median, p95 = (float(found[int(share * (len(found) - 1))]) for share in (0.5, 0.95))
    host = (0.0, 0.0) if before is None else (before.host_step_s, before.host_row_s)
    return CapacityProfile(model, machine, sizes, cost, median, p95, *host, time.time())


def fit_served(
    served: Sequence[MeasuredStep], table: StepTable, before: CapacityProfile | None, sizes: EngineSizes
) -> StepCost:
    steps = list(served)
    if before is not None:
        ratio = statistics.median(step.seconds / before.cost.seconds(step.shape) for step in served)
        missing = [shape for shape in typical_shapes(sizes) if not table.has_size(shape.tokens)]
        steps += [MeasuredStep(shape, ratio * before.cost.seconds(shape)) for shape in missing]
    return fit(steps, sizes.windows, num_resampled=NUM_RESAMPLED)


def typical_shapes(sizes: EngineSizes) -> list[StepShape]:
    """Decoding and prompts of each size that a step may have."""
    counts = [count for count in (1, *KNOTS) if count <= sizes.max_tokens_per_step]
    contexts = [min(context, sizes.max_len) for context in CONTEXTS]
    decodes = [
        decode_shape(n, context, sizes.windows) for n in counts if n <= sizes.max_requests for context in contexts
    ]
    return decodes + [prompt_shape(count, 0, sizes.windows) for count in counts if 1 < count <= sizes.max_len]


def without_interrupted(steps: Sequence[MeasuredStep], before: CapacityProfile | None) -> list[MeasuredStep]:
    """Leave out steps that took far longer than others of their kind: than the earlier cost says, or than the median of
    those with as many tokens."""
    expected: dict[int, list[float]] = {}
    for step in steps:
        base = before.cost.seconds(step.shape) if before is not None else 1.0
        expected.setdefault(step.shape.tokens.bit_length(), []).append(step.seconds / base)
    medians = {size: statistics.median(values) for size, values in expected.items()}
    kept = []
    for step in steps:
        base = before.cost.seconds(step.shape) if before is not None else 1.0
        if step.seconds / base <= MAX_RATIO * medians[step.shape.tokens.bit_length()]:
            kept.append(step)
    return kept
