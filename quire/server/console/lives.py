"""Lives: what has happened to each of the last requests, put together from the changes of engines."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.engine.live_changes import EndedRequest, Event, LiveChanges, RequestRow
from quire.server.console.documents import Document, describe_miss, event_document, public_id

MAX_LIVES = 1024
MAX_EVENTS = 512  # of one request
GROUPS = {"prompt": "prompt", "decode": "decode", "draft": "decode"}  # what kinds of events become if they are joined


@dataclass(slots=True)
class Life:
    """One request. `row` is the last one that its engine has sent."""

    row: RequestRow
    replica: int
    is_followed: bool = True  # False: nobody has watched since, so its end may have been missed
    events: list[Event] = field(default_factory=list)
    finish: str | None = None
    ended_s: float | None = None
    num_dropped: int = 0

    def add(self, events: Sequence[Event]) -> None:
        """Steps that continue the last event become a part of it. If there are too many, the older half is thinned."""
        for event in events:
            last = self.events[-1] if self.events else None
            if last is not None and last.kind == event.kind and event.kind in ("decode", "draft"):
                extend(last, event)
            else:
                self.events.append(event)
            if len(self.events) > MAX_EVENTS:
                self.events[: MAX_EVENTS // 2] = join_pairs(self.events[: MAX_EVENTS // 2])
            if len(self.events) > MAX_EVENTS:
                del self.events[0]
                self.num_dropped += 1


class Lives:
    """The last requests by id, the oldest first."""

    def __init__(self) -> None:
        self._lives: OrderedDict[str, Life] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lives)

    def add(self, changes: LiveChanges, replica: int) -> None:
        if changes.facts is not None:
            self.unfollow(replica)
        for row in changes.requests:
            self._life(row, replica).add(changes.events.get(row.number, ()))
        for ended in changes.ended:
            if ended.finish is not None:
                self._end(ended, replica, changes)

    def unfollow(self, replica: int) -> None:
        """Nothing more is known of the requests of a replica, until they have a row again."""
        for life in self._lives.values():
            if life.replica == replica:
                life.is_followed = False

    def restart(self, replica: int, now_s: float) -> None:
        """The engine of a replica has ended; its requests are computed by another."""
        for life in self._lives.values():
            if life.replica == replica and life.finish is None:
                life.add([Event("restarted", now_s, now_s)])

    def find(self, name: str, tenant: str | None) -> list[Document]:
        """The requests with an id, or of an HTTP request. None: of all tenants."""
        found = [
            (request_id, life)
            for request_id, life in self._lives.items()
            if request_id == name or request_id.startswith((f"{name}-", f"{name}#"))
        ]
        return [
            life_document(request_id, life, masked=tenant is not None)
            for request_id, life in found
            if tenant is None or life.row.tenant == tenant
        ]

    def _life(self, row: RequestRow, replica: int) -> Life:
        request_id = public_id(row.id)
        life = self._lives.get(request_id)
        if life is None:
            life = self._lives[request_id] = Life(row, replica)
            if len(self._lives) > MAX_LIVES:
                self._drop_one()
        life.row, life.replica, life.is_followed = row, replica, True
        return life

    def _end(self, ended: EndedRequest, replica: int, changes: LiveChanges) -> None:
        life = self._life(ended.row, replica)
        life.add(changes.events.get(ended.row.number, ()))
        life.finish, life.ended_s = ended.finish, changes.sent_s
        if life.events:
            life.ended_s = min(changes.sent_s, max(event.end_s for event in life.events))

    def _drop_one(self) -> None:
        """The oldest that has ended, or the oldest."""
        ended = (request_id for request_id, life in self._lives.items() if life.finish is not None)
        del self._lives[next(ended, next(iter(self._lives)))]


def join_pairs(events: Sequence[Event]) -> list[Event]:
    """Neighbours that are both chunks of a prompt, or both steps of an answer, become one event."""
    joined: list[Event] = []
    pending: Event | None = None  # the last one, if it has not been joined yet
    for event in events:
        kind = GROUPS.get(event.kind)
        if pending is not None and kind is not None and kind == GROUPS.get(pending.kind):
            pending.kind = kind
            extend(pending, event)
            pending = None
        else:
            joined.append(event)
            pending = event
    return joined


def extend(event: Event, following: Event) -> None:
    event.end_s = following.end_s
    event.num_steps += following.num_steps
    event.amount += following.amount


def life_document(request_id: str, life: Life, *, masked: bool) -> Document:
    row = life.row
    is_known = life.finish is not None or row.num_computed > 0
    return {
        "id": request_id,
        "replica": life.replica,
        "number": row.number,
        "own": True,
        "state": "ended" if life.finish is not None else row.state if life.is_followed else "unknown",
        "finish": life.finish,
        "arrived_s": round(row.arrived_s, 3),
        "ended_s": None if life.ended_s is None else round(life.ended_s, 3),
        "prompt_tokens": row.num_prompt,
        "cached_tokens": row.num_cached,
        "output_tokens": row.num_output,
        "max_tokens": row.max_tokens,
        "miss": describe_miss(row.miss, row.num_cached, row.num_prompt, masked=masked) if is_known else None,
        "events": [event_document(event) for event in life.events],
        "num_dropped_events": life.num_dropped,
    }
