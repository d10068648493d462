"""ServerState: what the lines of /console/live say of a server. docs/live.md has their fields."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

Document = dict[str, Any]

MAX_STEPS = 512
RATE_S = 3.0  # over which tokens per second are averaged


@dataclass(slots=True)
class EngineState:
    """One engine. `states` and `owners` have an entry for each block, and one for block 0, which is none."""

    facts: Document = field(default_factory=dict)
    states: bytearray = field(default_factory=bytearray)
    owners: list[int] = field(default_factory=list)
    rows: dict[int, Document] = field(default_factory=dict)
    steps: deque[Document] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    sequence: int = 0
    line: Document = field(default_factory=dict)  # the last one, for its numbers
    is_ready: bool = True
    reason: str = ""

    def apply(self, line: Document) -> None:
        if line["type"] == "snapshot":
            self.facts = line["engine"]
            num_blocks = self.facts["num_blocks"]
            self.states, self.owners = bytearray(num_blocks + 1), [0] * (num_blocks + 1)
            self.rows.clear()
            self.steps.clear()
        runs = iter(line["blocks"])
        for first, count, state, owner in zip(runs, runs, runs, runs, strict=True):
            self.states[first : first + count] = bytes([state]) * count
            self.owners[first : first + count] = [owner] * count
        for row in line["requests"]:
            self.rows[row["number"]] = row
        for ended in line["ended"]:
            self.rows.pop(ended["number"], None)
        self.steps.extend(line["steps"])
        self.sequence, self.line, self.is_ready = line["sequence"], line, True

    def running(self) -> list[Document]:
        return sorted((row for row in self.rows.values() if row["wait"] is None), key=lambda row: row["number"])

    def waiting(self) -> list[Document]:
        """Those in line, in order, then the others."""
        rows = [row for row in self.rows.values() if row["wait"] is not None]
        return sorted(rows, key=lambda row: (row["wait"]["position"] or len(rows) + 1, row["number"]))


@dataclass(slots=True)
class ServerState:
    """All engines of a server."""

    model: str = ""
    engines: list[EngineState] = field(default_factory=list)
    totals: Document = field(default_factory=dict)
    lost: str = ""  # why there is no connection
    _outputs: deque[tuple[float, float]] = field(default_factory=deque)  # times and totals of output tokens

    def apply(self, line: Document) -> None:
        kind = line.get("type")
        if kind == "hello":
            self.model, self.lost = line["model"], ""
            self.engines = [EngineState() for _ in range(line["replicas"])]
            self._outputs.clear()
        elif kind in ("snapshot", "delta"):
            self.engines[line["replica"]].apply(line)
            self.totals = line["totals"]
            self._note_output(line["time_s"], self.totals["output_tokens_total"])
        elif kind == "ping":
            self._note_output(line["time_s"], self.totals.get("output_tokens_total", 0.0))
        elif kind == "engine":
            engine = self.engines[line["replica"]]
            engine.is_ready, engine.reason = line["ready"], line["reason"]

    def tokens_per_s(self) -> float:
        if len(self._outputs) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self._outputs[0], self._outputs[-1]
        return max(0.0, last - first) / max(last_s - first_s, 1e-3)

    def _note_output(self, time_s: float, total: float) -> None:
        self._outputs.append((time_s, total))
        while len(self._outputs) > 2 and self._outputs[1][0] < time_s - RATE_S:
            self._outputs.popleft()
