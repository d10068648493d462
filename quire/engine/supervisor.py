"""Supervised: an engine in a process of its own that is started again when it dies, without losing a request.

It has the verbs of the other clients (submit, abort, health). Every request in flight is kept here with the tokens that
have arrived. When the engine's process ends or stops answering, a new one is started and is given each request together
with those tokens: sampling depends on seed and position alone, so the answer goes on as if nothing had happened.

A request that makes the engine die must not do so for ever. The engine says what it is about to do: add orders, or
compute requests for the first time. When it dies, the orders it was adding get a strike; if it was adding none, those
that it computed; if it computed none, all that it was given. So somebody always gets one. The next token that arrives
takes a request's strikes away. With two strikes a request is ended with an error if nobody else got them; otherwise it
is a suspect: suspects are given to the engine one at a time, and one under which it dies again is ended. A death by a
signal from outside, which the memory's guardian sends too, counts for a quarter of a strike.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from quire import errors
from quire.config import EngineConfig
from quire.core.plan import Detail, Update
from quire.core.request import Finish, Request
from quire.engine.mailbox import Mailbox
from quire.engine.messages import (
    Abort,
    Adding,
    Began,
    Frames,
    Order,
    Ping,
    Ready,
    Refused,
    Start,
    Stepped,
    Submit,
    ToEngine,
    ToServer,
    Unusable,
    decode_for_server,
    encode,
)
from quire.errors import EngineClosed, EngineError, QuireError

ENGINE = ("-m", "quire.engine.process")
READ_BYTES = 1 << 20
PING_S = 1.0
MAX_FAILED_STARTS = 5  # in a row, before giving up
MAX_PAUSE_S = 10.0
EXIT_S = 10.0  # that an engine which has closed its end may take to exit
STRIKES = 2.0
OUTSIDE_WEIGHT = 0.25
OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})

log = logging.getLogger("quire.supervisor")


@dataclass(slots=True, eq=False)
class InFlight:
    """A request on its way: what has arrived of its answer, and how often the engine died under it."""

    request: Request
    mailbox: Mailbox
    wire_id: str  # never used again: an id that a caller uses twice must not get the news of its first life
    output: list[int] = field(default_factory=list)
    num_scored: int = 0
    strikes: float = 0.0
    sent: bool = False  # the engine that runs now has its order
    begun: bool = False  # and computes it


@dataclass(frozen=True, slots=True)
class Watch:
    """Who wants to know what happens to the engine."""

    stepped: Callable[[Stepped], None] = lambda stepped: None
    restarted: Callable[[str], None] = lambda reason: None


class Supervised:
    """Make one inside a running event loop, then `await start()`."""

    def __init__(self, config: EngineConfig, path: Path, *, stall_s: float = 120.0, watch: Watch | None = None) -> None:
        self._config = config
        self._path = path
        self._stall_s = stall_s
        self._watch = watch or Watch()
        self._flights: dict[str, InFlight] = {}  # by their ids on the wire
        self._open: dict[str, InFlight] = {}  # the same, by the requests' own
        self._numbers = itertools.count()
        self._suspects: list[InFlight] = []  # not given to the engine yet
        self._trial: InFlight | None = None  # the one suspect that was
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None  # None while no engine is ready
        self._heard_s = 0.0
        self._was_stopped = False  # the process of now was killed by us: it did not answer, or did not exit
        self._adding: list[str] = []  # ids on the wire, of the orders that the engine is adding
        self._closing = False
        self._first: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._keeper: asyncio.Task[None] | None = None

    # ── what clients call ─────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> Ready:
        """Start the engine and wait until it has loaded the model."""
        self._keeper = asyncio.create_task(self._keep_running(), name="quire-supervisor")
        return await self._first

    async def submit(self, requests: Sequence[Request]) -> AsyncIterator[list[Update]]:
        """Run requests that belong together; yields their updates as steps bring them, until all have ended."""
        if self._keeper is None or self._keeper.done() or self._closing:
            raise EngineClosed("The engine has been shut down.")
        mailbox = Mailbox()
        for request in requests:
            if request.id in self._open:
                raise errors.InvalidParams(f"A request with the id {request.id!r} is running; choose another.")
        flights = [InFlight(request, mailbox, str(next(self._numbers))) for request in requests]
        for flight in flights:
            self._flights[flight.wire_id] = self._open[flight.request.id] = flight
        unfinished_ids = {request.id for request in requests}
        try:
            self._send_orders(flights)
            while unfinished_ids:
                updates = await mailbox.get()
                unfinished_ids -= {update.id for update in updates if update.finish}
                yield updates
        finally:
            for request_id in unfinished_ids:
                self.abort(request_id)

    def abort(self, request_id: str, message: str = "") -> None:
        """End a request at once; its reader, if it still listens, gets a last update."""
        if flight := self._open.get(request_id):
            self._end(flight, Finish.ABORT, message)
            self._send(Abort(flight.wire_id))

    def health(self) -> bool:
        """Whether an engine is ready to compute."""
        return self._writer is not None

    @property
    def gone(self) -> bool:
        """Whether no engine will come any more."""
        return self._keeper is None or self._keeper.done()

    @property
    def process_id(self) -> int | None:
        return self._process.pid if self._process else None

    async def close(self) -> None:
        """End the engine's process. Requests still open end with EngineClosed."""
        self._closing = True
        self._fail_all(EngineClosed("The server was shut down before the request ended."))
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._reap()

    # ── the life of processes ─────────────────────────────────────────────────────────────────────────────────────

    async def _keep_running(self) -> None:
        """One engine after another. Ends when the first cannot load, or when several in a row could not."""
        num_failed = 0.0
        while True:
            try:
                reader = await self._spawn()
            except (
                OSError,
                ValueError,
                TypeError,
                OverflowError,
            ) as error:  # no room for a process, or options that cannot be sent
                await self._reap()
                self._give_up(f"could not be started: {error}")
                return
            try:
                became_ready = await self._listen(reader)
            finally:
                self._writer = None
            reason = await self._reap(EXIT_S)
            if not self._first.done():
                self._give_up(f"ended while it loaded the model: {reason}")
                return
            if self._first.exception() is not None:
                return
            weight = OUTSIDE_WEIGHT if self._was_killed() else 1.0
            num_failed = 0.0 if became_ready else num_failed + weight
            if num_failed >= MAX_FAILED_STARTS:
                self._give_up("died and could not be started again; look into the log")
                return
            log.error("the engine ended (%s) with %d requests in flight; starting it again", reason, len(self._flights))
            self._watch.restarted(reason)
            self._blame(weight)
            await asyncio.sleep(min(MAX_PAUSE_S, 0.1 * (2**num_failed - 1)))

    def _give_up(self, what: str) -> None:
        """There will be no engine."""
        log.error("the engine %s", what)
        error = EngineError(f"The engine {what}.")
        self._fail_all(error)
        if not self._first.done():
            self._first.set_exception(error)

    async def _spawn(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, *ENGINE, str(theirs.fileno()), pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        reader, self._channel = await asyncio.open_connection(sock=ours)
        self._heard_s, self._was_stopped, self._adding = time.monotonic(), False, []
        self._channel.write(encode(Start(self._config, str(self._path))))
        return reader

    async def _listen(self, reader: asyncio.StreamReader) -> bool:
        """Take in all that the engine says until it closes its end; whether it became ready."""
        frames, watchdog = Frames(), asyncio.create_task(self._watch_for_stalls())
        try:
            while data := await reader.read(READ_BYTES):
                self._heard_s = time.monotonic()
                for payload in frames.feed(data):
                    self._take(decode_for_server(payload))
        except (ConnectionError, msgspec.DecodeError) as error:
            log.error("the connection to the engine broke: %s", error)
        finally:
            watchdog.cancel()
        return self._writer is not None

    async def _watch_for_stalls(self) -> None:
        while True:
            await asyncio.sleep(min(PING_S, self._stall_s / 4))
            if self._writer is None:
                continue  # loading takes as long as it takes
            if time.monotonic() - self._heard_s > self._stall_s:
                log.error("the engine has not answered for %.0f s", self._stall_s)
                self._kill()
                return
            self._send(Ping())

    async def _reap(self, patience_s: float = 0.0) -> str:
        """Make sure that the process has ended; how it did. One that is about to exit is not killed."""
        if self._process is None:
            return "it was not started"
        self._channel.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), patience_s)
        self._kill()
        code = await self._process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
                self._was_stopped = True

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, message: ToEngine) -> None:
        if self._writer is not None:
            self._writer.write(encode(message))

    def _send_orders(self, flights: Iterable[InFlight]) -> None:
        if self._writer is None:
            return
        group = list(flights)
        self._send(Submit([self._order(flight) for flight in group]))
        for flight in group:
            flight.sent = True

    def _order(self, flight: InFlight) -> Order:
        leader = self._open.get(flight.request.leader.id) if flight.request.leader else None
        leader_id = leader.wire_id if leader else None
        return Order.of(flight.request, flight.wire_id, leader_id, flight.output, flight.num_scored)

    def _take(self, message: ToServer) -> None:
        self._adding = message.ids if isinstance(message, Adding) else []
        match message:
            case Adding():
                pass
            case Stepped():
                for update in message.updates:
                    self._deliver(update)
                self._watch.stepped(message)
            case Began(ids):
                for wire_id in ids:
                    if flight := self._flights.get(wire_id):
                        flight.begun = True
            case Refused(ids, error, text):
                self._refuse(ids, make_error(error, text))
            case Ready():
                self._on_ready(message)
            case Unusable(error, text):
                log.error("the engine could not load the model: %s", text)
                if not self._first.done():
                    self._first.set_exception(make_error(error, text))

    def _on_ready(self, ready: Ready) -> None:
        """A new engine is there: give it everything that is in flight. Suspects come one by one, and last."""
        self._writer = self._channel
        if not self._first.done():
            self._first.set_result(ready)
        held = set(map(id, self._suspects))
        together: dict[int, list[InFlight]] = {}
        for flight in self._flights.values():
            if id(flight) not in held:
                together.setdefault(id(flight.mailbox), []).append(flight)
        for flights in together.values():
            self._send_orders(flights)
        self._try_next()

    def _deliver(self, update: Update) -> None:
        flight = self._flights.get(update.id)
        if flight is None:
            return  # aborted here, while this was on its way
        flight.output += update.tokens
        if update.detail is not None and update.detail.prompt_logprobs:
            flight.num_scored += len(update.detail.prompt_logprobs)
        if update.finish:
            self._forget(flight)
        elif update.tokens:
            flight.strikes = 0.0
            if flight is self._trial:
                self._try_next()
        update.id = flight.request.id
        flight.mailbox.put([update])

    def _refuse(self, ids: Sequence[str], error: QuireError) -> None:
        for wire_id in ids:
            if flight := self._flights.get(wire_id):
                self._forget(flight)
                flight.mailbox.fail(error)

    def _forget(self, flight: InFlight) -> None:
        """It has ended, one way or another; if it was a suspect, the next one has its turn."""
        del self._flights[flight.wire_id], self._open[flight.request.id]
        if flight in self._suspects:
            self._suspects.remove(flight)
        if flight is self._trial:
            self._try_next()

    def _end(self, flight: InFlight, finish: Finish, message: str) -> None:
        self._forget(flight)
        flight.mailbox.put([Update(flight.request.id, [], finish, Detail(message=message))])

    def _fail_all(self, error: QuireError) -> None:
        flights, self._flights, self._open = list(self._flights.values()), {}, {}
        self._suspects, self._trial = [], None
        for flight in flights:
            flight.mailbox.fail(error)

    # ── whose fault it was ────────────────────────────────────────────────────────────────────────────────────────

    def _was_killed(self) -> bool:
        """Whether somebody else ended the process; one that we had to kill ended itself."""
        code = self._process.returncode if self._process else None
        return not self._was_stopped and code is not None and -code in OUTSIDE

    def _blame(self, weight: float) -> None:
        """The engine has died. If the suspect on trial is among those it may have died of, it was that one."""
        trial, self._trial = self._trial, None
        accused = self._find_accused()
        if trial is not None and trial in accused:
            accused = [trial]
        elif trial is not None:
            self._suspects.insert(0, trial)
        for flight in self._flights.values():
            flight.sent = flight.begun = False
        for flight in accused:
            flight.strikes += weight
        are_one = len({flight.mailbox for flight in accused}) == 1  # the samples of one prompt
        for flight in accused:
            if flight.strikes >= STRIKES + 1 or (flight.strikes >= STRIKES and are_one):
                log.error("request %s is ended: the engine died under it", flight.request.id)
                self._end(flight, Finish.ERROR, "The engine died more than once while it worked on this request.")
            elif flight.strikes >= STRIKES and flight not in self._suspects:
                self._suspects.append(flight)

    def _find_accused(self) -> list[InFlight]:
        """Whose work the engine may have died of: the best that is known."""
        flights = self._flights
        adding = [flights[wire_id] for wire_id in self._adding if wire_id in flights]
        begun = [flight for flight in flights.values() if flight.begun]
        return adding or begun or [flight for flight in flights.values() if flight.sent]

    def _try_next(self) -> None:
        self._trial = self._suspects.pop(0) if self._suspects and self._writer is not None else None
        if self._trial is not None:
            self._send_orders([self._trial])


def make_error(name: str, message: str) -> QuireError:
    """An error of the other process, by the name of its class."""
    kind = getattr(errors, name, EngineError)
    return kind(message) if isinstance(kind, type) and issubclass(kind, QuireError) else EngineError(message)
