"""Supervised: a client whose engine runs in a process of its own and is restarted when it dies. No request is lost.

It has the methods of the other clients (submit, abort, health). It keeps every request in flight with the tokens that
have arrived. When the engine's process exits or stops answering, a new process gets each request together with those
tokens. Sampling depends on seed and position alone, so the answer continues unchanged.

A request that crashes the engine is found by its crash count. The engine announces what it does next: it adds requests
(`AddingRequests`), or computes requests for the first time (`FirstScheduled`). After a crash the suspects are the
requests that it was adding; if there are none, those that it had begun to compute; if there are none, all that it was
sent. The crash count of each suspect goes up by one, and the next token resets it. At MAX_CRASHES a request ends with
an error if all suspects were submitted together. Otherwise it is quarantined: quarantined requests are sent to the
engine one at a time, and one during which the engine crashes again is ended. A kill from outside, by the out-of-memory
killer for example, counts for EXTERNAL_KILL_WEIGHT.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire import errors
from quire.config import EngineConfig
from quire.core.plan import Detail, Update
from quire.core.request import Finish, Request
from quire.engine.launch import EngineProcess, Launch, LocalLaunch, describe_exit
from quire.engine.live_changes import CacheDescription, LiveChanges
from quire.engine.mailbox import Mailbox
from quire.engine.messages import (
    Abort,
    AddingRequests,
    Calibrated,
    DescribeCache,
    EngineRequest,
    FirstScheduled,
    FrameDecoder,
    LoadFailed,
    Ping,
    Ready,
    Refused,
    Start,
    StepOutputs,
    Submit,
    ToEngine,
    ToServer,
    Unwatch,
    Watch,
    decode_for_server,
    encode,
)
from quire.engine.transfer_messages import EndExport, EndImport, TransferQuestion, TransferReply
from quire.errors import EngineClosed, EngineError, NotReady, QuireError, make_error
from quire.trace.format import RecordingStart

if TYPE_CHECKING:
    from quire.capacity.profile import CapacityProfile

READ_BYTES = 1 << 20
PING_S = 1.0
MAX_FAILED_STARTS = 5  # in a row
MAX_BACKOFF_S = 10.0
EXIT_S = 10.0  # grace period between the end of the connection and a kill
MAX_CRASHES = 2.0
EXTERNAL_KILL_WEIGHT = 0.25
EXTERNAL_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})

log = logging.getLogger("quire.supervisor")


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A request, the tokens that have arrived, and how often the engine crashed while it worked on it."""

    request: Request
    mailbox: Mailbox
    # A number and the id. A caller may reuse an id while updates of the first request are still on their way. The
    # number is unique among the replicas, and stays with the request wherever it goes.
    wire_id: str = ""
    submitted_s: float = field(default_factory=time.monotonic)
    output: list[int] = field(default_factory=list)
    num_scored: int = 0
    crash_count: float = 0.0
    sent: bool = False  # to the current engine
    scheduled: bool = False  # by the current engine
    staged: str = ""  # what the engine calls its cache, if that was moved there before it


@dataclass(frozen=True, slots=True)
class EngineCallbacks:
    """What a supervisor calls.

    `hand_over` gets the requests of an engine that has died. Those that it gives to another supervisor it removes
    from this one (`release`); the others continue on the next engine of this supervisor.
    """

    on_step: Callable[[StepOutputs], None] = lambda outputs: None  # after each step of the engine
    on_ready: Callable[[Ready], None] = lambda ready: None  # an engine, the first or a later one, has loaded the model
    on_restart: Callable[[str], None] = lambda reason: None  # before each restart, with the reason
    on_end: Callable[[QuireError], None] = lambda error: None  # there will be no other engine
    hand_over: Callable[[list[list[InFlightRequest]]], None] = lambda groups: None
    on_changes: Callable[[LiveChanges], None] = lambda changes: None  # while it is watched


class Supervised:
    """Constructed inside a running event loop. `await start()` comes next."""

    def __init__(
        self,
        config: EngineConfig,
        path: Path,
        *,
        stall_s: float = 120.0,
        callbacks: EngineCallbacks | None = None,
        launch: Launch | None = None,
        report_prefixes: bool = False,
        recording: RecordingStart | None = None,
        numbers: Iterator[int] | None = None,
    ) -> None:
        """`numbers`: where wire ids are from, if other supervisors take them from there too."""
        self._start_message = Start(config, str(path), report_prefixes, recording)
        self._launch = launch or LocalLaunch()
        self._stall_s = stall_s
        self._callbacks = callbacks or EngineCallbacks()
        self._in_flight: dict[str, InFlightRequest] = {}  # by wire id
        self._by_request_id: dict[str, InFlightRequest] = {}  # the same, by request id
        self._numbers = itertools.count() if numbers is None else numbers
        self._calls: dict[int, asyncio.Future[TransferReply]] = {}  # questions to the engine that have no reply yet
        self._call_numbers = itertools.count()
        self._quarantined: list[InFlightRequest] = []  # not sent to the engine yet
        self._probed: InFlightRequest | None = None  # the quarantined request that the engine has
        self._process: EngineProcess | None = None
        self._writer: asyncio.StreamWriter | None = None  # None while no engine is ready
        self._profile: str | None = None  # the newest, as the engine has sent it
        self._last_message_s = 0.0
        self._killed_by_us = False  # the current process did not answer or did not exit
        self._adding: list[str] = []  # wire ids of the requests that the engine is adding
        self._watch_message: Watch | None = None
        self._descriptions: dict[int, asyncio.Future[CacheDescription]] = {}  # that the engine has been asked for
        self._closing = False
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    # ── the client's methods ──────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> Ready:
        """Start the engine and wait until it has loaded the model."""
        self._task = asyncio.create_task(self._keep_running(), name="quire-supervisor")
        return await self._ready

    async def submit(self, requests: Sequence[Request]) -> AsyncIterator[list[Update]]:
        """Run requests together: all are added, or all refused. Yields their updates until all have finished."""
        for request in requests:
            if request.id in self._by_request_id:
                raise errors.InvalidParams(f"A request with the id {request.id!r} is running; choose another.")
        mailbox = Mailbox()
        unfinished_ids = {request.id for request in requests}
        try:
            self.adopt([InFlightRequest(request, mailbox) for request in requests])
            while unfinished_ids:
                updates = await mailbox.get()
                unfinished_ids -= {update.id for update in updates if update.finish}
                yield updates
        finally:
            for request_id in unfinished_ids:
                self.abort(request_id)

    def adopt(self, group: Sequence[InFlightRequest]) -> None:
        """Take requests that were submitted together, from a caller or from another supervisor."""
        if self.gone or self._closing:
            raise EngineClosed("The engine has been shut down.")
        for in_flight in group:
            in_flight.wire_id = in_flight.wire_id or f"{next(self._numbers)}:{in_flight.request.id}"
            in_flight.sent = in_flight.scheduled = False
            self._in_flight[in_flight.wire_id] = self._by_request_id[in_flight.request.id] = in_flight
        self._send_requests(group)

    def release(self, group: Sequence[InFlightRequest]) -> None:
        """Give up requests, which another supervisor takes."""
        for in_flight in group:
            del self._in_flight[in_flight.wire_id], self._by_request_id[in_flight.request.id]

    def has(self, in_flight: InFlightRequest) -> bool:
        """Whether a request is still here: it has not finished, and no other supervisor has it."""
        return self._in_flight.get(in_flight.wire_id) is in_flight

    async def call(self, kind: Callable[..., TransferQuestion], *arguments: object) -> TransferReply:
        """Ask the engine something about a move (`transfer_messages.py`). Raises EngineClosed if the engine dies."""
        if self._writer is None:
            raise EngineClosed("The engine is not ready.")
        number = next(self._call_numbers)
        self._calls[number] = asyncio.get_running_loop().create_future()
        self._send(kind(number, *arguments))
        return await self._calls[number]

    def tell(self, message: EndExport | EndImport) -> None:
        """Tell the engine that a move has ended."""
        self._send(message)

    def abort(self, request_id: str) -> None:
        """Finish a request at once. Its mailbox gets a last update."""
        if in_flight := self._by_request_id.get(request_id):
            self._end(in_flight, Finish.ABORT, "")
            self._send(Abort(in_flight.wire_id))

    def watch(self, interval_s: float) -> None:
        """Have the engine, and those after it, report what changes in them."""
        self._watch_message = Watch(interval_s)
        self._send(self._watch_message)

    def unwatch(self) -> None:
        self._watch_message = None
        self._send(Unwatch())

    async def describe_cache(self, salt: bytes | None, max_nodes: int, replica: int = 0) -> CacheDescription:
        """The engine's prefix tree. Raises NotReady while there is no engine."""
        assert replica == 0, "a Fleet has several"
        if self._writer is None:
            raise NotReady("The engine is being started; try again in a moment.")
        number = next(self._numbers)
        described: asyncio.Future[CacheDescription] = asyncio.get_running_loop().create_future()
        self._descriptions[number] = described
        self._send(DescribeCache(number, salt, max_nodes))
        try:
            return await described
        finally:
            del self._descriptions[number]

    def is_ready(self, replica: int) -> bool:
        assert replica == 0, "a Fleet has several"
        return self.health()

    def health(self) -> bool:
        """Whether an engine is ready."""
        return self._writer is not None

    @property
    def capacity_profile(self) -> CapacityProfile | None:
        """The newest costs of steps: those of `quire bench phases --save`, or of served steps once there are enough."""
        if self._profile is None:
            return None
        from quire.capacity.profile import CapacityProfile  # loads numpy

        return CapacityProfile.of(json.loads(self._profile))

    @property
    def silent_s(self) -> float:
        """Seconds since the engine's last message. One that can answer does so every second, but for long steps."""
        return time.monotonic() - self._last_message_s

    @property
    def gone(self) -> bool:
        """Whether the supervisor has stopped: there will be no other engine."""
        return self._task is None or self._task.done()

    @property
    def process_id(self) -> int | None:
        return self._process.pid if self._process else None

    async def close(self) -> None:
        """End the engine's process. Requests still open end with EngineClosed."""
        self._closing = True
        self._fail_all(EngineClosed("The server was shut down before the request ended."))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._reap()
        await self._launch.close()

    # ── processes ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _keep_running(self) -> None:
        """Start one engine after another. Returns if the first cannot load, or after MAX_FAILED_STARTS in a row."""
        num_failed = 0.0
        while True:
            try:
                reader = await self._spawn()
            except (
                OSError,
                ValueError,
                TypeError,
                OverflowError,
            ) as error:  # no process, or options that do not encode
                await self._reap()
                self._give_up(f"could not be started: {error}")
                return
            try:
                became_ready = await self._listen(reader)
            finally:
                self._writer = None
                self._fail_descriptions()
                self._fail_calls()
            reason = await self._reap(EXIT_S)
            if not self._ready.done():
                self._give_up(f"ended while it loaded the model: {reason}")
                return
            if self._ready.exception() is not None:
                return
            weight = EXTERNAL_KILL_WEIGHT if self._was_killed_externally() else 1.0
            num_failed = 0.0 if became_ready else num_failed + weight
            if num_failed >= MAX_FAILED_STARTS:
                self._give_up("died and could not be started again; look into the log")
                return
            log.error(
                "the engine ended (%s) with %d requests in flight; starting it again", reason, len(self._in_flight)
            )
            self._callbacks.on_restart(reason)
            self._count_crash(weight)
            self._callbacks.hand_over(self.groups())
            await asyncio.sleep(min(MAX_BACKOFF_S, 0.1 * (2**num_failed - 1)))

    def _give_up(self, what: str) -> None:
        """There will be no engine: fail all requests that no other one takes."""
        log.error("the engine %s", what)
        error = EngineError(f"The engine {what}.")
        self._callbacks.hand_over(self.groups())
        self._fail_all(error)
        self._callbacks.on_end(error)
        if not self._ready.done():
            self._ready.set_exception(error)

    async def _spawn(self) -> asyncio.StreamReader:
        launched = await self._launch.launch()
        self._process, self._channel = launched.process, launched.writer
        self._last_message_s, self._killed_by_us, self._adding = time.monotonic(), False, []
        self._channel.write(encode(self._start_message))
        return launched.reader

    async def _listen(self, reader: asyncio.StreamReader) -> bool:
        """Handle the engine's messages until it closes the connection. Returns whether it became ready."""
        frames, watchdog = FrameDecoder(), asyncio.create_task(self._watch_for_stalls())
        try:
            while data := await reader.read(READ_BYTES):
                self._last_message_s = time.monotonic()
                for payload in frames.feed(data):
                    self._handle(decode_for_server(payload))
        except (ConnectionError, msgspec.DecodeError) as error:
            log.error("the connection to the engine broke: %s", error)
        finally:
            watchdog.cancel()
        return self._writer is not None

    async def _watch_for_stalls(self) -> None:
        while True:
            await asyncio.sleep(min(PING_S, self._stall_s / 4))
            if self._writer is None:
                continue  # loading has no time limit
            if time.monotonic() - self._last_message_s > self._stall_s:
                log.error("the engine has not answered for %.0f s", self._stall_s)
                self._kill()
                return
            self._send(Ping())

    async def _reap(self, patience_s: float = 0.0) -> str:
        """Wait for the process to exit, and kill it after `patience_s`. Returns how it ended."""
        if self._process is None:
            return "it was not started"
        self._channel.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), patience_s)
        self._kill()
        return describe_exit(await self._process.wait())

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
                self._killed_by_us = True

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, message: ToEngine) -> None:
        if self._writer is not None:
            self._writer.write(encode(message))

    def _fail_calls(self) -> None:
        calls, self._calls = self._calls, {}
        for reply in calls.values():
            if not reply.done():
                reply.set_exception(EngineClosed("The engine died while requests moved."))

    def _send_requests(self, requests: Iterable[InFlightRequest]) -> None:
        if self._writer is None:
            return
        group = list(requests)
        self._send(Submit([self._to_message(in_flight) for in_flight in group]))
        for in_flight in group:
            in_flight.sent = True

    def _to_message(self, in_flight: InFlightRequest) -> EngineRequest:
        leader = self._by_request_id.get(in_flight.request.leader.id) if in_flight.request.leader else None
        leader_id = leader.wire_id if leader else None
        return EngineRequest.of(
            in_flight.request, in_flight.wire_id, leader_id, in_flight.output, in_flight.num_scored,
            in_flight.submitted_s, in_flight.staged,
        )  # fmt: skip

    def _handle(self, message: ToServer) -> None:
        self._adding = message.ids if isinstance(message, AddingRequests) else []
        match message:
            case AddingRequests():
                pass
            case StepOutputs():
                for update in message.updates:
                    self._deliver(update)
                self._callbacks.on_step(message)
            case FirstScheduled(ids):
                for wire_id in ids:
                    if in_flight := self._in_flight.get(wire_id):
                        in_flight.scheduled = True
            case Refused(ids, error, text):
                self._refuse(ids, make_error(error, text))
            case Calibrated(profile):
                self._profile = profile
            case LiveChanges():
                self._callbacks.on_changes(message)
            case CacheDescription(number):
                if (described := self._descriptions.get(number)) is not None and not described.done():
                    described.set_result(message)
            case Ready():
                self._on_ready(message)
            case LoadFailed(error, text):
                log.error("the engine could not load the model: %s", text)
                if not self._ready.done():
                    self._ready.set_exception(make_error(error, text))
            case _:
                self._on_reply(message)

    def _on_reply(self, reply: TransferReply) -> None:
        waiting = self._calls.pop(reply.call, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def _on_ready(self, ready: Ready) -> None:
        """Send all requests in flight to a new engine. Quarantined requests come last, one by one."""
        self._writer = self._channel
        if not self._ready.done():
            self._ready.set_result(ready)
        if self._watch_message is not None:
            self._send(self._watch_message)
        for group in self.groups():
            self._send_requests(group)
        self._send_next_quarantined()
        self._callbacks.on_ready(ready)

    def is_quarantined(self, in_flight: InFlightRequest) -> bool:
        return in_flight in self._quarantined or in_flight is self._probed

    def groups(self) -> list[list[InFlightRequest]]:
        """The requests that are not quarantined, those that were submitted together in one list."""
        held = set(map(id, self._quarantined))
        by_mailbox: dict[int, list[InFlightRequest]] = {}
        for in_flight in self._in_flight.values():
            if id(in_flight) not in held:
                by_mailbox.setdefault(id(in_flight.mailbox), []).append(in_flight)
        return list(by_mailbox.values())

    def _deliver(self, update: Update) -> None:
        in_flight = self._in_flight.get(update.id)
        if in_flight is None:
            return  # it was aborted while the update was on its way
        in_flight.output += update.tokens
        if update.detail is not None and update.detail.prompt_logprobs:
            in_flight.num_scored += len(update.detail.prompt_logprobs)
        if update.finish:
            self._forget(in_flight)
        elif update.tokens:
            in_flight.crash_count = 0.0
            if in_flight is self._probed:
                self._send_next_quarantined()
        update.id = in_flight.request.id
        in_flight.mailbox.put([update])

    def _refuse(self, ids: Sequence[str], error: QuireError) -> None:
        for wire_id in ids:
            if in_flight := self._in_flight.get(wire_id):
                self._forget(in_flight)
                in_flight.mailbox.fail(error)

    def _forget(self, in_flight: InFlightRequest) -> None:
        """Remove a request that has finished. If it was the probed one, the next quarantined request is sent."""
        del self._in_flight[in_flight.wire_id], self._by_request_id[in_flight.request.id]
        if in_flight in self._quarantined:
            self._quarantined.remove(in_flight)
        if in_flight is self._probed:
            self._send_next_quarantined()

    def _end(self, in_flight: InFlightRequest, finish: Finish, message: str) -> None:
        self._forget(in_flight)
        in_flight.mailbox.put([Update(in_flight.request.id, [], finish, Detail(message=message))])

    def _fail_all(self, error: QuireError) -> None:
        all_in_flight, self._in_flight, self._by_request_id = list(self._in_flight.values()), {}, {}
        self._quarantined, self._probed = [], None
        for in_flight in all_in_flight:
            in_flight.mailbox.fail(error)

    def _fail_descriptions(self) -> None:
        for described in self._descriptions.values():
            if not described.done():
                described.set_exception(NotReady("The engine has ended and is started again; try again in a moment."))

    # ── crashes ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _was_killed_externally(self) -> bool:
        """Whether the process was killed by a signal that did not come from here."""
        code = self._process.returncode if self._process else None
        return not self._killed_by_us and code is not None and -code in EXTERNAL_SIGNALS

    def _count_crash(self, weight: float) -> None:
        """The engine has crashed. If the probed request is a suspect, it is the only one."""
        probed, self._probed = self._probed, None
        suspects = self._find_suspects()
        if probed is not None and probed in suspects:
            suspects = [probed]
        elif probed is not None:
            self._quarantined.insert(0, probed)
        for in_flight in self._in_flight.values():
            in_flight.sent = in_flight.scheduled = False
        for in_flight in suspects:
            in_flight.crash_count += weight
        submitted_together = len({in_flight.mailbox for in_flight in suspects}) == 1
        for in_flight in suspects:
            crash_count = in_flight.crash_count
            if crash_count >= MAX_CRASHES + 1 or (crash_count >= MAX_CRASHES and submitted_together):
                log.error("request %s is ended: the engine died under it", in_flight.request.id)
                self._end(in_flight, Finish.ERROR, "The engine died more than once while it worked on this request.")
            elif crash_count >= MAX_CRASHES and in_flight not in self._quarantined:
                self._quarantined.append(in_flight)

    def _find_suspects(self) -> list[InFlightRequest]:
        """The requests that may have crashed the engine."""
        adding = [self._in_flight[wire_id] for wire_id in self._adding if wire_id in self._in_flight]
        scheduled = [in_flight for in_flight in self._in_flight.values() if in_flight.scheduled]
        return adding or scheduled or [in_flight for in_flight in self._in_flight.values() if in_flight.sent]

    def _send_next_quarantined(self) -> None:
        self._probed = self._quarantined.pop(0) if self._quarantined and self._writer is not None else None
        if self._probed is not None:
            self._send_requests([self._probed])
