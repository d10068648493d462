"""BackOff: how long something that does not pay is left alone. Models that are asked for drafts, and a device that
drafts behind steps, are tried again after 16, 32, 64, ... steps.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_WAIT, MAX_WAIT = 16, 1024  # steps


@dataclass(slots=True)
class BackOff:
    wait: int = FIRST_WAIT  # steps after the next trial
    left: int = 0  # steps until the next trial

    def is_due(self) -> bool:
        """Called in each step in which it does not pay. Whether it is tried in this one all the same."""
        self.left -= 1
        if self.left > 0:
            return False
        self.left, self.wait = self.wait, min(MAX_WAIT, 2 * self.wait)
        return True

    def reset(self) -> None:
        """It has been of use: the next trial is soon, and the waits begin anew."""
        self.wait, self.left = FIRST_WAIT, min(self.left, FIRST_WAIT)
