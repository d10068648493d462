"""Engine: a scheduler and a runner. One call of `step` schedules, launches, commits and returns updates.

`build.py` makes an engine from a configuration. Clients (`client.py`) call it; nothing above them sees this module.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from quire.core.pace import blend
from quire.core.plan import Plan, Sampled, Update, explain_no_token
from quire.core.request import Finish, Request
from quire.core.scheduler import Scheduler
from quire.engine.costs import StepCosts
from quire.engine.faults import explain, find_loss, give_back_memory, is_out_of_memory
from quire.engine.memory import (
    CacheSize,
)
from quire.engine.runner import Runner, RunningStep
from quire.errors import DeviceLost
from quire.models.config import ModelConfig

log = logging.getLogger("quire.engine")

IDLE_S = 0.001  # between two looks at a batch that is still forming
LOOK_S = 0.0003  # between two looks at a step that is under way
MARGIN_S = 0.001  # by which a step is planned and launched before the last one is expected to end
EARLY_SHARE = 0.08  # of what a step is expected to take: so much sooner it may end
MIN_LATE_S = 0.004  # behind shorter steps nobody waits: planning would take too large a part of them


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the layers above need to know about a running engine."""

    model: str
    config: ModelConfig
    max_len: int
    max_requests: int
    weight_bytes: int
    cache: CacheSize
    device: str
    summary: str


@dataclass(slots=True)
class Launched:
    """A plan under way."""

    plan: Plan
    running: RunningStep
    begins_s: float  # as far as is known
    expected_s: float  # that it will take; minus infinity if nobody can tell

    @property
    def ends_s(self) -> float:
        """When it is expected to end at the earliest."""
        return self.begins_s + (1 - EARLY_SHARE) * self.expected_s


class Engine:
    """Requests in, updates out, one step at a time."""

    def __init__(self, scheduler: Scheduler, runner: Runner, info: EngineInfo) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.info = info
        self.step_s: float | None = None  # what the step took that the last call of `step` took in, if it did
        self._launched: deque[Launched] = deque()
        self._costs = StepCosts(scheduler.swap.costs, scheduler.pace, scheduler.max_tokens_per_step)
        self._launch_s = 0.0  # that planning and launching take
        self.before_run: Callable[[Plan], None] | None = None  # told of each plan before it is run

    def add(self, request: Request) -> None:
        self.scheduler.add(request, time.monotonic())

    def abort(self, request_id: str, finish: Finish = Finish.ABORT) -> Update | None:
        return self.scheduler.abort(request_id, finish)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._launched)

    def idle(self) -> bool:
        """Do a little of what makes later steps faster, while there is no work; whether there may be more of it."""
        return self.runner.idle(math.inf)

    def step(self) -> list[Update]:
        """Launch what the runner has room for and take in the oldest plan.

        A runner that works ahead computes the next one while the host takes in this one's tokens. Behind a long step
        the next one is planned as late as possible, so that requests which arrive meanwhile join it; until then there
        is no update.
        """
        try:
            return self._step()
        except DeviceLost:
            raise
        except Exception as error:
            return self._recover(error)
        except BaseException:
            self.scheduler.reset()
            self._drop_plans()
            raise

    def _step(self) -> list[Update]:
        self.step_s = None
        while self._may_launch and self._launch():
            pass
        left_s = self._time_left() if self._launched else IDLE_S
        if left_s > 0:
            self._pass_time(left_s)
            return []
        if self.scheduler.pace.target_s is None:  # nobody waits for single tokens, as long as the device has work
            self.runner.idle(self._launched[-1].ends_s - time.monotonic())
        oldest = self._launched.popleft()
        plan = oldest.plan
        ends_now = not oldest.running.is_done()
        try:
            sampled = oldest.running.wait()
        except Exception as error:
            return self._fail(plan, error)
        if self._launched and ends_now:
            self._launched[0].begins_s = time.monotonic()
        if sampled.seconds is not None:
            self._costs.learn(plan, sampled.seconds)
        self.step_s = sampled.seconds
        updates = self._end_failed(plan, sampled) + self.scheduler.commit(plan, sampled)
        self._sample_next()
        return updates

    def _sample_next(self) -> None:
        """The tokens of the plan behind the one just taken in can be chosen now, if they could not before."""
        if self._launched:
            following = self._launched[0]
            try:
                following.running.sample()
            except Exception as error:
                following.running = Failure(error)

    @property
    def _may_launch(self) -> bool:
        """Nothing is launched behind a plan that failed: its tokens will not come, and its blocks lack content."""
        if self._launched and self._launched[-1].running.must_land:
            return False
        return len(self._launched) < self.runner.depth and self._time_left() <= 0

    def _time_left(self) -> float:
        """Seconds until the next plan has to be made: none behind a short step, or if there is no target."""
        if len(self._launched) != 1 or self.scheduler.pace.target_s is None:
            return 0.0
        only = self._launched[0]
        if only.expected_s < MIN_LATE_S or only.running.is_done():
            return 0.0
        return only.ends_s - MARGIN_S - self._launch_s - time.monotonic()

    def _pass_time(self, left_s: float) -> None:
        """Until a plan may be made, a moment at a time."""
        if not self._launched:
            time.sleep(min(IDLE_S, left_s))
        elif not self.runner.idle(left_s):
            time.sleep(min(LOOK_S, left_s))

    def _launch(self) -> bool:
        now_s = time.monotonic()
        plan = self.scheduler.schedule(now_s)
        if plan is None:
            return False
        if self.before_run is not None:
            self.before_run(plan)
        try:
            running: RunningStep = self.runner.launch(plan)
        except Exception as error:
            running = Failure(error)
        launched_s, expected_s = time.monotonic(), None
        if self.runner.depth > 1 and not isinstance(running, Failure):
            self._launch_s = blend(self._launch_s or None, launched_s - now_s)
            expected_s = self._costs.predict(plan)
        is_behind = bool(self._launched) and not self._launched[-1].running.is_done()
        begins_s = max(launched_s, self._launched[-1].ends_s) if is_behind else launched_s
        self._launched.append(Launched(plan, running, begins_s, -math.inf if expected_s is None else expected_s))
        return True

    def _fail(self, plan: Plan, error: Exception) -> list[Update]:
        """End the requests of a plan that could not be run."""
        log.error("step %d failed with %d requests", plan.step, len(plan), exc_info=error)
        updates = self.scheduler.fail(plan, explain(error, plan))
        self._check_device(error)
        return updates

    def _recover(self, error: Exception) -> list[Update]:
        """Go on after an error in planning or in taking a plan in: one request ends, the others are computed again."""
        log.error("planning failed with %d requests", len(self.scheduler.requests), exc_info=error)
        updates = self.scheduler.recover(error, f"The engine failed on this request: {error}")
        self._drop_plans()
        self._check_device(error)
        return updates

    def _drop_plans(self) -> None:
        """Forget the plans under way, once they have ended."""
        launched, self._launched = self._launched, deque()
        for each in launched:
            with suppress(Exception):
                each.running.wait()
        self.runner.reset()

    def _check_device(self, error: Exception) -> None:
        """After an error on a GPU. One that is lost ends the engine, since no later plan could be run."""
        if self.info.device == "cuda":
            if is_out_of_memory(error):
                give_back_memory(error)
            elif loss := find_loss(torch.device("cuda")):
                raise loss from error

    def _end_failed(self, plan: Plan, sampled: Sampled) -> list[Update]:
        ends = []
        for request in (plan.requests[row] for row in sampled.failed):
            ends.append(self.scheduler.abort(request.id, Finish.ERROR, explain_no_token(request)))
        return [update for update in ends if update is not None]


class Failure:
    """In place of a running step, if it could not be launched: the error, when its turn has come."""

    must_land = True

    def __init__(self, error: Exception) -> None:
        self._error = error

    def is_done(self) -> bool:
        return True

    def sample(self) -> None:
        pass

    def wait(self) -> Sampled:
        raise self._error
