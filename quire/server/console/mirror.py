"""Mirror: one engine as the server knows it from the engine's changes, and the lines of JSON that are sent of it."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.core.wait_estimate import AnswerLengths, Demand, OutputRate, Supply, estimate_waits
from quire.engine.live_changes import EngineFacts, LiveChanges, RequestRow, make_runs
from quire.server.console.documents import Document, facts_document, mask, request_document, step_document
from quire.server.streaming import encode_json

MAX_DELTAS = 16  # a reader that is further behind gets a snapshot
MAX_STEPS = 256


@dataclass(slots=True)
class Delta:
    """One message of an engine as a document, and its lines by tenant."""

    sequence: int
    document: Document
    lines: dict[str | None, bytes] = field(default_factory=dict)

    def line(self, tenant: str | None) -> bytes:
        if tenant not in self.lines:
            masked = [mask(request, tenant) for request in self.document["requests"]]
            self.lines[tenant] = encode_json({**self.document, "requests": masked}) + b"\n"
        return self.lines[tenant]


class Mirror:
    """One engine. It is empty until the first snapshot, and again after `clear`."""

    def __init__(self, replica: int) -> None:
        self._replica = replica
        self.sequence = 0
        self.deltas: deque[Delta] = deque(maxlen=MAX_DELTAS)
        self._lengths = AnswerLengths()
        self._rate = OutputRate()
        self._sent_s = 0.0
        self.clear()

    def clear(self) -> None:
        """The engine has ended, or nobody watches it any more."""
        self.facts: EngineFacts | None = None
        self.deltas.clear()
        self._states, self._owners = bytearray(), array("I")
        self._rows: dict[int, RequestRow] = {}
        self._documents: dict[int, Document] = {}
        self._steps: deque[Document] = deque(maxlen=MAX_STEPS)
        self._head: Document = {}
        self._numbers: Document = {}
        self._totals: Document = {}

    @property
    def is_empty(self) -> bool:
        return self.facts is None

    def apply(self, changes: LiveChanges, totals: Document) -> None:
        """`totals` are the metrics at the moment of the changes."""
        if changes.facts is not None:
            self.clear()
            self.facts = changes.facts
            self._states = bytearray(changes.facts.num_blocks + 1)
            self._owners = array("I", bytes(4 * (changes.facts.num_blocks + 1)))
        elif self.facts is None:
            return  # left over from before it was cleared
        self.sequence += 1
        self._apply_blocks(changes.blocks)
        self._apply_rows(changes)
        steps = [step_document(step) for step in changes.steps]
        self._steps += steps
        self._numbers = {
            "num_running": changes.num_running,
            "num_waiting": changes.num_waiting,
            "num_free_blocks": changes.num_free_blocks,
            "num_cached_blocks": self._states.count(1),
        }
        head = {"replica": self._replica, "sequence": self.sequence, "time_s": round(changes.sent_s, 3)}
        ended = [{"number": each.row.number, "finish": each.finish} for each in changes.ended]
        document = {
            "type": "delta",
            **head,
            "blocks": changes.blocks,
            "requests": self._update_documents(changes),
            "ended": ended,
            **self._numbers,
            "steps": steps,
            "totals": totals,
        }
        self._head, self._totals = head, totals
        if changes.facts is None:
            self.deltas.append(Delta(self.sequence, document))

    def snapshot(self, tenant: str | None) -> bytes:
        """The line that holds everything."""
        assert self.facts is not None
        document = {
            "type": "snapshot",
            **self._head,
            "engine": facts_document(self.facts),
            "blocks": self.block_runs(),
            "requests": [mask(request, tenant) for request in self._documents.values()],
            "ended": [],
            **self._numbers,
            "steps": list(self._steps),
            "totals": self._totals,
        }
        return encode_json(document) + b"\n"

    def block_runs(self) -> list[int]:
        return make_runs(range(1, len(self._states)), self._states[1:], self._owners[1:])

    def _apply_blocks(self, runs: list[int]) -> None:
        for first, count, state, owner in zip(*[iter(runs)] * 4, strict=True):
            self._states[first : first + count] = bytes([state]) * count
            self._owners[first : first + count] = array("I", [owner]) * count

    def _apply_rows(self, changes: LiveChanges) -> None:
        self._measure_output(changes)
        for row in changes.requests:
            self._rows[row.number] = row
        for ended in changes.ended:
            self._rows.pop(ended.row.number, None)
            self._documents.pop(ended.row.number, None)
            if ended.finish in ("stop", "length"):
                self._lengths.add(ended.row.num_output)

    def _measure_output(self, changes: LiveChanges) -> None:
        """Over the answers that had tokens at the last message, and have a row in this one."""
        seconds, self._sent_s = changes.sent_s - self._sent_s, changes.sent_s
        known = [(row, self._rows.get(row.number)) for row in changes.requests if row.wait is None]
        grown = [
            row.num_output - before.num_output for row, before in known if before is not None and before.num_output
        ]
        if grown:
            self._rate.add(seconds * len(grown), sum(grown))

    def _update_documents(self, changes: LiveChanges) -> list[Document]:
        """The documents that have changed: of the rows that were sent, and of waiting requests."""
        fresh = {row.number for row in changes.requests}
        estimates = self._estimate(changes)
        changed = []
        for number, row in self._rows.items():
            if number in fresh or row.wait is not None:
                document = request_document(row, changes.room, estimates.get(number))
                if document != self._documents.get(number):
                    self._documents[number] = document
                    changed.append(document)
        return changed

    def _estimate(self, changes: LiveChanges) -> dict[int, float]:
        """Seconds until each waiting request is admitted. Empty while no step has been measured."""
        if changes.decode_s is None or changes.prompt_token_s is None:
            return {}
        line = sorted((row for row in self._rows.values() if is_in_line(row)), key=position)
        if not line:
            return {}
        room = changes.room
        supply = Supply(
            room.num_rows,
            room.num_free_blocks - room.num_reserved_blocks,
            self._rate.token_s or changes.decode_s,
            changes.prompt_token_s,
            waits_for_all=self._waits_for_all(room.num_admissible),
            hold_s=room.hold.seconds or 0.0,
        )
        running = self._demands(row for row in self._rows.values() if row.wait is None)
        waits = estimate_waits(running, self._demands(line), supply)
        return dict(zip((row.number for row in line), waits, strict=True))

    def _waits_for_all(self, num_admissible: int) -> bool:
        assert self.facts is not None
        return self.facts.batching in ("static", "dynamic") and num_admissible <= 0

    def _demands(self, rows: Iterable[RequestRow]) -> list[Demand]:
        return [
            Demand(
                max(0, row.num_prompt + row.num_output - max(row.num_computed, row.num_cached) - 1),
                self._lengths.expected_left(row.num_output, row.max_tokens),
                row.num_beams if row.wait is None else row.wait.num_rows,
                row.num_blocks if row.wait is None else row.wait.num_blocks or 0,
            )
            for row in rows
        ]


def is_in_line(row: RequestRow) -> bool:
    return row.wait is not None and row.wait.position is not None


def position(row: RequestRow) -> int:
    assert row.wait is not None
    assert row.wait.position is not None
    return row.wait.position
