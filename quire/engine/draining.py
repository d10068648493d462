"""DrainReport: what a drain has done with the requests of a replica. `fleet.py` makes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.engine.supervisor import InFlightRequest
from quire.engine.transfer import Departure

NO_CACHE = "it is a beam search, was preempted and not swapped out, or several ranks have its cache"


@dataclass(slots=True)
class DrainReport:
    """Counts requests; each answer of `n` is one."""

    replica: int
    moved: int = 0  # with their cache: nothing is computed again
    recomputed: int = 0  # from their tokens
    queued: int = 0  # of which nothing was computed
    kept: int = 0  # quarantined: they end where they are
    moved_tokens: int = 0  # whose keys and values have moved
    moved_bytes: int = 0
    longest_pause_s: float = 0.0  # of a request, until another replica has it
    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)  # why requests are computed again

    def count_moved(self, departure: Departure) -> None:
        """The requests of a departure arrive with what was computed of them."""
        computed = {cache.id: cache.num_computed for cache in departure.exported.requests}
        group = departure.still_there
        moved = [computed[each.wire_id] for each in group if computed[each.wire_id]]
        self.moved += len(moved)
        self.moved_tokens += sum(moved)
        self.moved_bytes += departure.num_bytes
        self.count_lost([each for each in group if not computed[each.wire_id]], NO_CACHE)

    def count_lost(self, group: Sequence[InFlightRequest], reason: str) -> None:
        """The requests go on without a cache."""
        num_begun = sum(each.scheduled or bool(each.output) for each in group)
        self.queued += len(group) - num_begun
        self.recomputed += num_begun
        self.reasons.update({reason: num_begun} if num_begun else {})
