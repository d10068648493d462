"""Engine: a scheduler and a runner. One call of `step` schedules, launches, commits and returns updates.

`build.py` makes an engine from a configuration. Clients (`client.py`) call it; nothing above them sees this module.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.core.pace import moving_average
from quire.core.params import check_early_exit
from quire.core.plan import Plan, Sampled, Update, explain_no_token
from quire.core.request import Finish, Request
from quire.core.scheduler import Scheduler
from quire.core.step_costs import StepCosts
from quire.engine.faults import describe_failure, find_device_loss, is_out_of_memory, release_memory
from quire.engine.memory import CacheSize
from quire.engine.observer import Observers
from quire.engine.runner import Runner, RunningStep
from quire.errors import DeviceLost, QuireError
from quire.models.config import ModelConfig
from quire.speculative.controller import Controller

if TYPE_CHECKING:
    from quire.engine.ranks import RankGroup

log = logging.getLogger("quire.engine")

IDLE_S = 0.001  # poll interval while the batching policy admits no request yet
POLL_S = 0.0003  # poll interval while a step is in flight
MARGIN_S = 0.001  # between the end of a launch and the expected end of the step before
EARLY_SHARE = 0.08  # a step may end earlier than expected by this share
MIN_LATE_S = 0.004  # after shorter steps the next is planned at once: planning is too large a share of them


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about a running engine, for its clients."""

    model: str
    config: ModelConfig
    max_len: int
    max_requests: int
    weight_bytes: int
    cache: CacheSize
    device: str
    summary: str
    kernels: str = ""  # as the summary names them
    exact: bool = False  # an answer's bits do not depend on what else is in the batch
    fingerprint: str = ""  # of the model and the layout of its cache: blocks move only between engines that share it


@dataclass(slots=True)
class Launched:
    """A plan in flight."""

    plan: Plan
    running: RunningStep
    begins_s: float  # estimated until the step before has ended
    expected_s: float  # duration; minus infinity if unknown
    launched_s: float

    @property
    def ends_s(self) -> float:
        """The earliest expected end."""
        return self.begins_s + (1 - EARLY_SHARE) * self.expected_s


class Engine:
    """Requests in, updates out, one step at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        info: EngineInfo,
        controller: Controller | None = None,
        *,
        has_exit: bool = False,
    ) -> None:
        """With `has_exit` requests may exit early."""
        self.scheduler = scheduler
        self.has_exit = has_exit
        self.controller = controller  # of speculation, if it is on
        self.runner = runner
        self.info = info
        self.step_s: float | None = None  # duration of the step that the last call of `step` committed, if any
        self._launched: deque[Launched] = deque()
        self.costs = StepCosts(scheduler.swap.costs, scheduler.pace, scheduler.max_tokens_per_step)
        self._launch_s = 0.0  # duration of planning and launching
        self._drains = False  # nothing is launched behind the plan in flight: drafts will follow its tokens
        self._holds = False  # nothing is launched until the plans in flight are committed
        self.observers = Observers()
        self.ranks: RankGroup | None = None  # with tensor parallelism
        self._closer: Callable[[], object] = lambda: None

    def add_ranks(self, ranks: RankGroup) -> None:
        """They end when the engine is closed, or when nothing refers to it any more."""
        self.ranks, self._closer = ranks, weakref.finalize(self, ranks.close)

    def close(self) -> None:
        self._closer()

    def add(self, request: Request) -> None:
        check_early_exit(request.params.early_exit, self.has_exit)
        now_s = time.monotonic()
        with self._reset_if_interrupted():
            self.scheduler.add(request, now_s)
        self.observers.on_add(request, now_s)

    def abort(self, request_id: str) -> Update | None:
        with self._reset_if_interrupted():
            update = self.scheduler.abort(request_id, Finish.ABORT)
        self._forget(request_id)
        self.observers.on_abort(request_id)
        return update

    def detach(self, request_ids: Sequence[str]) -> tuple[list[Update], list[Request]]:
        """Remove requests that continue on another engine, after the plans in flight: those that have not ended.

        They keep their blocks (`Scheduler.detach`). The updates are those of the plans in flight.
        """
        updates: list[Update] = []
        self._holds = True
        try:
            while self._launched:
                updates += self.step()
        finally:
            self._holds = False
        with self._reset_if_interrupted():  # forks first: their leader would queue them
            detached = [self.scheduler.detach(request_id) for request_id in reversed(request_ids)]
        found = [request for request in reversed(detached) if request is not None]
        for request in found:
            self._forget(request.id)
            self.observers.on_abort(request.id)
        return updates, found

    def _forget(self, request_id: str) -> None:
        """A request has ended."""
        self.runner.finish(request_id)
        if self.controller is not None:
            self.controller.finish(request_id)

    @contextmanager
    def _reset_if_interrupted(self) -> Iterator[None]:
        """After an exception that is not a refusal, drop the plans in flight. The other requests are recomputed."""
        try:
            yield
        except QuireError:
            raise
        except BaseException:
            self._drop_plans()
            self.scheduler.reset()
            self._tell_reset([])
            raise

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._launched)

    def idle(self) -> bool:
        """Prepare later steps while there is no work. Returns whether there may be more to prepare."""
        return self.runner.idle(math.inf)

    def step(self) -> list[Update]:
        """Launch as many plans as the runner's depth allows, and commit the oldest.

        With a depth of 2 the device computes the next plan while the host commits this one. During a long step the next
        one is planned as late as possible, so that requests which arrive meanwhile join it. Until then no updates are
        returned.
        """
        updates: list[Update] = []
        try:
            self._step(updates)
        except DeviceLost:
            raise
        except Exception as error:
            updates += self._recover(error)
        except BaseException:
            self.scheduler.reset()
            self._drop_plans()
            self._tell_reset([])
            raise
        for update in updates:
            if update.finish:
                self._forget(update.id)
        return updates

    def _step(self, updates: list[Update]) -> None:
        self.step_s = None
        while self._may_launch and self._launch():
            pass
        left_s = self._time_left() if self._launched else IDLE_S
        if left_s > 0:
            self._wait(left_s)
            return
        if self.scheduler.pace.target_s is None:  # without a latency target captures may delay updates
            self._prepare_runner(self._launched[-1].ends_s - time.monotonic())
        oldest = self._launched.popleft()
        plan = oldest.plan
        ends_now = not oldest.running.is_done()
        try:
            sampled = oldest.running.wait()
        except Exception as error:
            updates += self._fail(plan, error)
            return
        if self._launched and ends_now:
            self._launched[0].begins_s = time.monotonic()
        if sampled.seconds is not None and not sampled.exited:  # such a step is no measure of others
            self.costs.learn(plan, sampled.seconds)
        self.step_s = sampled.seconds
        updates += self._end_failed(plan, sampled) + self.scheduler.commit(plan, sampled)
        self.observers.on_commit(plan, sampled, updates, oldest.launched_s)
        if self.controller is not None:
            self.controller.observe(plan, sampled)
        self._sample_next()
        if self.controller is not None and self.runner.depth > 1:
            self._prepare_drafts(self.controller)
            self.controller.learn()

    def _prepare_drafts(self, controller: Controller) -> None:
        """Decide whether drafts are worth an idle device. If it is idle, launch before the updates are delivered.

        Drafts can follow only tokens that are on the host. So a step with drafts is launched when no other is in
        flight, and the device is idle until then.
        """
        if not self._launched:
            self._launch()
        elif len(self._launched) == 1 and not self._launched[0].running.must_commit_first:
            hidden_s = max(0.0, self._launched[0].ends_s - self._launch_s - time.monotonic())
            self._drains = controller.promises_gain(self.scheduler.running, self.scheduler.may_admit, hidden_s)

    def _sample_next(self) -> None:
        """Sample the next plan in flight, if its sampling needs the tokens that were just committed."""
        if self._launched:
            following = self._launched[0]
            try:
                following.running.sample()
            except Exception as error:
                following.running = Failure(error)

    @property
    def _may_launch(self) -> bool:
        """Nothing is launched after a plan that failed: it has no tokens, and its blocks were not written."""
        if self._launched and (self._drains or self._launched[-1].running.must_commit_first):
            return False
        return len(self._launched) < self.runner.depth and self._time_left() <= 0

    def _time_left(self) -> float:
        """Seconds until the next plan must be made. 0 after a short step, or without a latency target."""
        if len(self._launched) != 1 or self.scheduler.pace.target_s is None:
            return 0.0
        only = self._launched[0]
        if only.expected_s < MIN_LATE_S or only.running.is_done():
            return 0.0
        return only.ends_s - MARGIN_S - self._launch_s - time.monotonic()

    def _wait(self, left_s: float) -> None:
        """Sleep for a poll interval, or prepare later steps."""
        if not self._launched:
            time.sleep(min(IDLE_S, left_s))
        elif not self._prepare_runner(left_s):
            time.sleep(min(POLL_S, left_s))

    def _prepare_runner(self, seconds: float) -> bool:
        """Let the runner prepare later steps while some are in flight. That may take longer than `seconds`, which says
        nothing about those steps."""
        has_worked = self.runner.idle(seconds)
        if has_worked and self.controller is not None:
            self.controller.ignore_durations(len(self._launched))
        return has_worked

    def _launch(self) -> bool:
        if self._holds:
            return False
        now_s = time.monotonic()
        if not self._launched:
            self._drains = False
            if self.controller is not None:
                self.controller.propose(self.scheduler.running, self.scheduler.may_admit)
        plan = self.scheduler.schedule(now_s)
        if plan is None:
            return False
        if self.controller is not None:
            self.controller.plan_drafting(plan, self.scheduler.reserve_all)
        self.observers.on_plan(plan)
        try:
            running: RunningStep = self.runner.launch(plan, is_behind=bool(self._launched))
        except Exception as error:
            running = Failure(error)
        launched_s, expected_s = time.monotonic(), None
        if self.runner.depth > 1 and not isinstance(running, Failure):
            self._launch_s = moving_average(self._launch_s or None, launched_s - now_s)
            expected_s = self.costs.predict(plan)
        is_behind = bool(self._launched) and not self._launched[-1].running.is_done()
        begins_s = max(launched_s, self._launched[-1].ends_s) if is_behind else launched_s
        self._launched.append(Launched(plan, running, begins_s, -math.inf if expected_s is None else expected_s, now_s))
        return True

    def _fail(self, plan: Plan, error: Exception) -> list[Update]:
        """End the requests of a plan that failed."""
        log.error("step %d failed with %d requests", plan.step, len(plan), exc_info=error)
        updates = self.scheduler.fail(plan, describe_failure(error, plan))
        self.observers.on_fail(plan, updates)
        self._check_device(error)
        if self._launched:
            self._sample_next()
        else:
            self.runner.reset()
        return updates

    def _recover(self, error: Exception) -> list[Update]:
        """Continue after an error in schedule or commit: one request ends, the others are recomputed."""
        log.error("planning failed with %d requests", len(self.scheduler.requests), exc_info=error)
        updates = self.scheduler.recover(error, f"The engine failed on this request: {error}")
        self._drop_plans()
        self._tell_reset(updates)
        self._check_device(error)
        return updates

    def _tell_reset(self, updates: list[Update]) -> None:
        self.observers.on_reset(updates)

    def _drop_plans(self) -> None:
        """Wait for the plans in flight and drop their results."""
        launched, self._launched = self._launched, deque()
        for each in launched:
            with suppress(Exception):
                each.running.wait()
        self.runner.reset()
        if self.controller is not None:
            self.controller.reset()

    def _check_device(self, error: Exception) -> None:
        """After an error on a GPU: free its memory, or raise DeviceLost, which ends the engine. So does a lost rank."""
        if isinstance(error, DeviceLost):
            raise error
        if self.info.device == "cuda":
            if is_out_of_memory(error):
                release_memory(error)
            elif loss := find_device_loss():
                raise loss from error

    def _end_failed(self, plan: Plan, sampled: Sampled) -> list[Update]:
        ends = []
        for request in (plan.requests[row] for row in sampled.failed):
            ends.append(self.scheduler.abort(request.id, Finish.ERROR, explain_no_token(request)))
        return [update for update in ends if update is not None]


class Failure:
    """A RunningStep that could not be launched. `wait` raises its error."""

    must_commit_first = True

    def __init__(self, error: Exception) -> None:
        self._error = error

    def is_done(self) -> bool:
        return True

    def sample(self) -> None:
        pass

    def wait(self) -> Sampled:
        raise self._error
