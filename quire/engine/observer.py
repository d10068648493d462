"""Observer: sees what an engine does, and changes nothing. The engine's process, benchmarks and traces have observers.

An engine without observers pays for an empty loop. Observers are called in the engine's thread, so what they do is part
of a step's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.core.plan import Plan, Sampled, Update
from quire.core.request import Request


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
