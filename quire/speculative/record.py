"""Record: what the controller knows about a running request."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.speculative.asking import Asked
from quire.speculative.ledger import Ledger

MAX_LOSS, GRACE = 0.012, 2.0  # of a request's ledger
PATIENCE, MAX_PAUSE = 12, 3  # a request whose drafts are not verified is skipped for a step more every so many calls
FORGETTING = 0.98  # of a request's shifts while nothing is verified, for which nothing would ever be again


@dataclass(slots=True)
class Record:
    ledger: Ledger = field(default_factory=lambda: Ledger(MAX_LOSS, GRACE))
    shifts: dict[str, float] = field(default_factory=dict)  # by proposer, see Calibration
    asked: dict[str, Asked] = field(default_factory=dict)  # by model
    num_idle: int = 0  # calls of the proposers since drafts were last verified
    pause: int = 0  # steps until they are called again

    def pauses(self, must_ask: bool) -> bool:
        """Whether to skip the request in this step: asking takes time too, and its last drafts were not worth it."""
        if self.pause and not must_ask:
            self.pause -= 1
            return True
        self.num_idle += 1
        for source in self.shifts:
            self.shifts[source] *= FORGETTING
        self.pause = min(MAX_PAUSE, self.num_idle // PATIENCE)
        return False
