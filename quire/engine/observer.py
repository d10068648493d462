"""Observer: sees what an engine does, and changes nothing. The engine's process, benchmarks and traces have observers.

An engine without observers pays for an empty loop. `Observers` holds those of an engine. They are called in its
thread, so what they do is part of a step's time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.core.plan import Plan, Sampled, Update
from quire.core.request import Request

log = logging.getLogger("quire.engine")


class Observer:
    """Methods that do nothing, to be overridden. A plan's requests and block tables are valid only during the call."""

    def on_add(self, request: Request, now_s: float) -> None:
        """The request has been queued."""

    def on_abort(self, request_id: str) -> None:
        """The request has ended because its caller wanted it."""

    def on_plan(self, plan: Plan) -> None:
        """The plan has been made and is about to be launched."""

    def on_commit(self, plan: Plan, sampled: Sampled, updates: Sequence[Update], launched_s: float) -> None:
        """The plan, launched at a time of `time.monotonic`, has been committed. Failed requests have updates too."""

    def on_fail(self, plan: Plan, updates: Sequence[Update]) -> None:
        """The plan has failed, and its requests have ended."""

    def on_reset(self, updates: Sequence[Update]) -> None:
        """All plans in flight have been dropped, and every request that has no final update is computed anew."""


@dataclass(frozen=True, slots=True)
class PlanObserver(Observer):
    """Calls a function with each plan before it is launched."""

    function: Callable[[Plan], object]

    def on_plan(self, plan: Plan) -> None:
        self.function(plan)


class Observers(list[Observer]):
    """The observers of an engine. One that raises is detached: what only looks must not end a request or the engine."""

    def on_add(self, request: Request, now_s: float) -> None:
        self._tell("on_add", request, now_s)

    def on_abort(self, request_id: str) -> None:
        self._tell("on_abort", request_id)

    def on_plan(self, plan: Plan) -> None:
        self._tell("on_plan", plan)

    def on_commit(self, plan: Plan, sampled: Sampled, updates: Sequence[Update], launched_s: float) -> None:
        self._tell("on_commit", plan, sampled, updates, launched_s)

    def on_fail(self, plan: Plan, updates: Sequence[Update]) -> None:
        self._tell("on_fail", plan, updates)

    def on_reset(self, updates: Sequence[Update]) -> None:
        self._tell("on_reset", updates)

    def _tell(self, method: str, *values: object) -> None:
        for observer in tuple(self):
            try:
                getattr(observer, method)(*values)
            except Exception as error:
                self.remove(observer)
                log.error("%s has failed and is detached; serving goes on", type(observer).__name__, exc_info=error)
