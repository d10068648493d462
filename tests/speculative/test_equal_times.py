"""EqualTimes: what counts drafts, `train-draft` among others, verifies all of them."""

from __future__ import annotations

import pytest

from quire.core.drafts import Drafts
from quire.core.request import Request
from quire.speculative.controller import Controller
from quire.speculative.step_times import EqualTimes

pytestmark = pytest.mark.core


class Right:
    """Four drafts in a row."""

    name = "right"

    def propose(self, contexts, max_drafts):  # type: ignore[no-untyped-def]
        return [Drafts([1, 2, 3, 4], None, [0.9] * 4) for _ in contexts]

    def finish(self, request_id: str) -> None: ...

    def reset(self) -> None: ...


def test_all_drafts_are_verified_from_the_first_step_on() -> None:
    controller = Controller([Right()], 64, 97, 12.0)
    controller.times, controller._clock = EqualTimes(12.0), lambda: 0.0
    request = Request("a", [1, 2, 3], max_tokens=50)
    request.num_planned = 2
    controller.propose([request], may_admit=False)
    assert request.drafts is not None
    assert request.drafts.tokens == [1, 2, 3, 4]
