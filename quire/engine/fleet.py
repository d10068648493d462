"""Fleet: a client with several engines (replicas), each in a process of its own. A request goes where it ends soonest.

It has the methods of the other clients (submit, abort, health). Each replica has a supervisor. `core/routing.py`
chooses. When a replica dies, its requests continue on the others with the tokens that have arrived, while its engine
is started again. The answers are the same: sampling depends on seed and position alone. A replica can be drained: its
requests move to the others with their cache (`transfer.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from quire.config import EngineConfig
from quire.core.plan import Update
from quire.core.request import Finish, Request
from quire.core.routing import ReplicaState, Router
from quire.engine.draining import NO_CACHE, DrainReport
from quire.engine.launch import Launch, LocalLaunch
from quire.engine.live_changes import CacheDescription, LiveChanges
from quire.engine.mailbox import Mailbox
from quire.engine.memory import CPU_SHARE, GIB, free_bytes
from quire.engine.messages import Ready, StepOutputs
from quire.engine.supervisor import EngineCallbacks, InFlightRequest, Supervised
from quire.engine.transfer import Departure, arrive, copy_cache, depart
from quire.engine.transfer_messages import EndImport
from quire.errors import EngineClosed, EngineError, InvalidParams, QuireError
from quire.kernels.cuda_driver import count_devices
from quire.kernels.isa import usable_cores
from quire.trace.format import RecordingStart

if TYPE_CHECKING:
    from quire.capacity.profile import CapacityProfile

Place = tuple[EngineConfig, Launch]  # of a replica: its configuration, and how its process is started
SILENT_S = 5.0  # a replica whose engine has said nothing for longer gets no request that another one can have

log = logging.getLogger("quire.fleet")


@dataclass(frozen=True, slots=True)
class FleetCallbacks:
    """As `EngineCallbacks`, with the number of the replica."""

    on_step: Callable[[StepOutputs, int], None] = lambda outputs, replica: None
    on_restart: Callable[[str, int], None] = lambda reason, replica: None
    on_changes: Callable[[LiveChanges, int], None] = lambda changes, replica: None

    def of_replica(self, replica: int) -> EngineCallbacks:
        """For the only engine of a server."""
        return EngineCallbacks(
            on_step=lambda outputs: self.on_step(outputs, replica),
            on_restart=lambda reason: self.on_restart(reason, replica),
            on_changes=lambda changes: self.on_changes(changes, replica),
        )


class Fleet:
    """Constructed inside a running event loop. `await start()` comes next."""

    def __init__(
        self,
        config: EngineConfig,
        path: Path,
        num_replicas: int,
        *,
        stall_s: float = 120.0,
        callbacks: FleetCallbacks | None = None,
        recording: RecordingStart | None = None,
        places: Sequence[Place] | None = None,
    ) -> None:
        """`places`: the configuration of each replica and how it is started; by default all are on this machine."""
        numbers = itertools.count()
        self._callbacks = callbacks or FleetCallbacks()
        self._block_size = config.block_size
        self.members = [
            Supervised(
                member_config,
                path,
                stall_s=stall_s,
                callbacks=self._callbacks_of(index),
                launch=launch,
                report_prefixes=True,
                recording=recording and structs.replace(recording, replica=index),
                numbers=numbers,
            )
            for index, (member_config, launch) in enumerate(places or divide(config, num_replicas))
        ]
        self._has_prefix_cache = config.prefix_cache
        self._router: Router | None = None
        self._owners: dict[str, Supervised | None] = {}  # of requests in flight, by id; None: it is in `_waiting`
        self._names: dict[str, str] = {}  # under which the router knows a request: the id of the first of its group
        self._waiting: list[list[InFlightRequest]] = []  # groups for the first replica that is ready
        self._last = [StepOutputs()] * num_replicas  # of each replica since its last start
        self._closing = False
        self._fingerprint = ""
        self._drain_lock = asyncio.Lock()
        self._move_numbers = itertools.count()

    # ── the client's methods ──────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> Ready:
        """Start all replicas and wait until they have loaded the model. The result describes them together."""
        ready = await asyncio.gather(*(member.start() for member in self.members))
        num_blocks = [each.num_blocks if self._has_prefix_cache else 0 for each in ready]
        states = [ReplicaState(each.max_requests, count) for each, count in zip(ready, num_blocks, strict=True)]
        for state, member in zip(states, self.members, strict=True):
            state.ready = member.health()  # one may have died while others loaded
        self._router = Router(states, self._block_size)
        self._fingerprint = ready[0].fingerprint
        return Ready(
            vocab_size=ready[0].vocab_size,
            max_len=min(each.max_len for each in ready),
            max_requests=sum(each.max_requests for each in ready),
            eos_token_ids=ready[0].eos_token_ids,
            num_blocks=sum(each.num_blocks for each in ready),
            device=ready[0].device,
            summary=f"{len(ready)} replicas, each: {ready[0].summary}",
            sampling=ready[0].sampling,
            fingerprint=self._fingerprint,
        )

    async def submit(self, requests: Sequence[Request]) -> AsyncIterator[list[Update]]:
        """Run requests together, on one replica. Yields their updates until all have finished."""
        for request in requests:
            if request.id in self._owners:
                raise InvalidParams(f"A request with the id {request.id!r} is running; choose another.")
        mailbox = Mailbox()
        group = [InFlightRequest(request, mailbox) for request in requests]
        self._names.update((request.id, requests[0].id) for request in requests)
        unfinished_ids = {request.id for request in requests}
        num_tokens = 0
        try:
            self._place(group)
            while unfinished_ids:
                for update in (updates := await mailbox.get()):
                    num_tokens += len(update.tokens)
                    if update.finish:
                        unfinished_ids.discard(update.id)
                self._begin(requests[0].id, num_tokens)
                yield updates
        finally:
            for request_id in unfinished_ids:
                self.abort(request_id)
            self._forget(requests, None if unfinished_ids else num_tokens // len(requests))

    def abort(self, request_id: str) -> None:
        if (owner := self._owners.get(request_id)) is not None:
            owner.abort(request_id)
        for group in self._waiting:
            for in_flight in [one for one in group if one.request.id == request_id]:
                group.remove(in_flight)
                in_flight.mailbox.put([Update(request_id, [], Finish.ABORT)])

    def watch(self, interval_s: float) -> None:
        for member in self.members:
            member.watch(interval_s)

    def unwatch(self) -> None:
        for member in self.members:
            member.unwatch()

    async def describe_cache(self, salt: bytes | None, max_nodes: int, replica: int = 0) -> CacheDescription:
        return await self.members[replica].describe_cache(salt, max_nodes)

    def is_ready(self, replica: int) -> bool:
        return self.members[replica].health()

    def health(self) -> bool:
        """Whether a replica is ready and takes requests."""
        return any(member.health() and not self._is_draining(index) for index, member in enumerate(self.members))

    @property
    def capacity_profile(self) -> CapacityProfile | None:
        """The newest of the replicas'."""
        profiles = [member.capacity_profile for member in self.members]
        return max(filter(None, profiles), key=lambda profile: profile.measured_at, default=None)

    @property
    def gone(self) -> bool:
        """Whether no replica will be started again."""
        return all(member.gone for member in self.members)

    def receipts(self, request_id: str, salt: bytes) -> list[str]:
        """Why a tenant's recent requests went where they went: those named `request_id` and a number."""
        known = self._router.receipts if self._router is not None else {}
        found = [receipt for name, receipt in known.items() if name.rpartition("-")[0] == request_id]
        return [str(receipt) for receipt in found if receipt.salt == salt]

    def describe(self) -> list[dict[str, int | float | bool]]:
        """What the router knows of each replica."""
        assert self._router is not None, "start() comes first"
        return [
            {
                "replica": index,
                "ready": state.ready,
                "draining": state.draining,
                "answers": state.num_answers,
                "waiting_prompt_tokens": state.missing_tokens,
                "cached_blocks": len(state.prefixes),
                "seconds_per_prompt_token": state.token_s.value,
                "seconds_per_step": state.decode_step_s(max(1, state.num_answers)),
            }
            for index, state in enumerate(self._router.replicas)
        ]

    async def close(self) -> None:
        """End all replicas. Requests still open end with EngineClosed."""
        self._closing = True
        self._fail_waiting(EngineClosed("The server was shut down before the request ended."))
        await asyncio.gather(*(member.close() for member in self.members))

    # ── draining ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def drain(self, index: int) -> DrainReport:
        """Give a replica no more requests, and move those that it has to the others. It stays so until `undrain`."""
        self._check_replica(index)
        if not any(self._takes_requests(other) for other in range(len(self.members)) if other != index):
            raise InvalidParams(
                f"Replica {index} is the only one that takes requests. Undrain another one, or wait until it is ready."
            )
        self._set_draining(index, True)
        report, begin_s = DrainReport(index), time.monotonic()
        async with self._drain_lock:
            for group in self.members[index].groups():
                await finish(self._move(index, group, report))
        report.seconds = time.monotonic() - begin_s
        log.info("%s", report)
        return report

    def undrain(self, index: int) -> None:
        """Give a replica requests again."""
        self._check_replica(index)
        self._set_draining(index, False)
        self._place_waiting()

    async def _move(self, index: int, group: list[InFlightRequest], report: DrainReport) -> None:
        """Move a group from a draining replica, with its cache if that can be done."""
        source = self.members[index]
        report.kept += sum(source.is_quarantined(each) for each in group)
        group = [each for each in group if source.has(each) and not source.is_quarantined(each)]
        if not group or not self._is_draining(index):
            return
        if not source.health():
            self._move_tokens(index, group, report, "the replica was not running")
            return
        begin_s = time.monotonic()
        try:
            departure = await depart(source, group)
        except EngineClosed:  # `_hand_over` gets its requests
            report.count_lost(group, "the replica died")
            return
        reason = await self._move_cache(departure, report) if departure.num_computed else NO_CACHE
        if reason is not None:
            self._move_tokens(index, departure.still_there, report, reason)
        departure.end()
        report.longest_pause_s = max(report.longest_pause_s, time.monotonic() - begin_s)

    async def _move_cache(self, departure: Departure, report: DrainReport) -> str | None:
        """Move a group with its cache to the best replica that takes it. Returns why none does, or None."""
        assert self._router is not None
        failed: dict[int, str] = {}
        while group := departure.still_there:
            self._router.end(self._names[group[0].request.id])
            target = self._choose(group, departure.num_computed // len(departure.group), failed)
            if target is None:
                return "; ".join(failed.values()) or "no other replica is ready"
            member, move = self.members[target], str(next(self._move_numbers))
            try:
                await copy_cache(departure, member, move, self._fingerprint)
                report.count_moved(departure)
                self._owners.update((each.request.id, member) for each in departure.still_there)
                arrive(departure, member, move)
            except EngineError as error:
                if not departure.source.health():
                    return "the replica died"
                failed[target] = f"replica {target}: {error}"
                member.tell(EndImport(move))
        return None

    def _move_tokens(self, index: int, group: list[InFlightRequest], report: DrainReport, reason: str) -> None:
        """Let other replicas go on with a group from its tokens."""
        assert self._router is not None
        if group := [each for each in group if self.members[index].has(each)]:
            report.count_lost(group, reason)
            self._router.end(self._names[group[0].request.id])
            self.members[index].release(group)
            self._place(group)

    def _check_replica(self, index: int) -> None:
        if not 0 <= index < len(self.members):
            raise InvalidParams(f"There is no replica {index}; this server has 0 to {len(self.members) - 1}.")

    def _set_draining(self, index: int, draining: bool) -> None:
        assert self._router is not None, "start() comes first"
        self._router.replicas[index].draining = draining

    def _is_draining(self, index: int) -> bool:
        return self._router is not None and self._router.replicas[index].draining

    def _takes_requests(self, index: int) -> bool:
        return self.members[index].health() and not self._is_draining(index)

    # ── routing ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _place(self, group: list[InFlightRequest]) -> None:
        """Give a group to a replica. While none is ready, the group waits."""
        index = self._choose(group)
        for in_flight in group:
            in_flight.staged = ""
        member = None if index is None else self.members[index]
        for in_flight in group:
            self._owners[in_flight.request.id] = member
        if member is not None:
            member.adopt(group)
        elif self._closing or all(member.gone for member in self.members):
            raise EngineClosed("The engines have been shut down.")
        else:
            self._waiting.append(group)

    def _choose(
        self, group: Sequence[InFlightRequest], num_computed: int = 0, exclude: Collection[int] = ()
    ) -> int | None:
        assert self._router is not None, "start() comes first"
        first = group[0]
        name = self._names[first.request.id]
        index = self._router.choose(
            name,
            [*first.request.prompt, *first.output],
            first.request.salt,
            first.request.max_tokens - len(first.output),
            len(group),
            num_computed=num_computed,
            exclude=exclude,
            avoid={index for index, member in enumerate(self.members) if member.silent_s > SILENT_S},
        )
        if index is not None:
            log.debug("request %s: %s", name, self._router.receipts[name])
        return index

    def _place_waiting(self) -> None:
        groups, self._waiting = self._waiting, []
        for group in filter(None, groups):
            self._place(group)

    def _fail_waiting(self, error: QuireError) -> None:
        groups, self._waiting = self._waiting, []
        for group in filter(None, groups):
            group[0].mailbox.fail(error)

    def _begin(self, request_id: str, num_tokens: int) -> None:
        if num_tokens and self._router is not None:
            self._router.begin(request_id)

    def _forget(self, requests: Sequence[Request], num_output: int | None) -> None:
        if self._router is not None:
            self._router.end(requests[0].id, num_output)
        for request in requests:
            self._owners.pop(request.id, None)
            self._names.pop(request.id, None)

    # ── what the supervisors call ─────────────────────────────────────────────────────────────────────────────────────

    def _callbacks_of(self, index: int) -> EngineCallbacks:
        return EngineCallbacks(
            partial(self._on_step, index),
            partial(self._on_ready, index),
            partial(self._on_restart, index),
            partial(self._on_end, index),
            partial(self._hand_over, index),
            lambda changes: self._callbacks.on_changes(changes, index),
        )

    def _on_step(self, index: int, outputs: StepOutputs) -> None:
        if self._router is not None:
            state = self._router.replicas[index]
            if outputs.prefixes_lost:
                state.forget()
            state.publish(outputs.published, outputs.evicted)
            measure_step(state, outputs, self._last[index])
        self._last[index] = outputs
        self._callbacks.on_step(outputs, index)

    def _on_ready(self, index: int, ready: Ready) -> None:
        if self._router is not None:
            self._router.replicas[index].ready = True
            self._place_waiting()

    def _on_restart(self, index: int, reason: str) -> None:
        self._last[index] = StepOutputs()
        if self._router is not None:
            self._router.replicas[index].forget()
            self._router.replicas[index].ready = False
        self._callbacks.on_restart(reason, index)

    def _hand_over(self, index: int, groups: list[list[InFlightRequest]]) -> None:
        """A replica has died. Its requests continue on the others that are ready, or on the first that is."""
        if self._router is None or self._closing:
            return
        self._router.replicas[index].ready = False
        for group in groups:
            self._router.end(self._names[group[0].request.id])
            self.members[index].release(group)
            self._place(group)

    def _on_end(self, index: int, error: QuireError) -> None:
        """A replica will not be started again. Its supervisor's task has not ended yet.

        If those that are left are all draining, they take requests again.
        """
        left = [other for other, member in enumerate(self.members) if other != index and not member.gone]
        if not left:
            self._fail_waiting(error)
        elif self._router is not None and all(map(self._is_draining, left)):
            log.warning("replicas %s take requests again: no other is left", left)
            for other in left:
                self._set_draining(other, False)
            self._place_waiting()


async def finish(move: Coroutine[None, None, None]) -> None:
    """Await a move, and if the caller is cancelled let it end first: its requests may be on neither engine."""
    task = asyncio.ensure_future(move)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise


def measure_step(state: ReplicaState, outputs: StepOutputs, before: StepOutputs) -> None:
    """Tell the router how long a step took. Drafts that it verified are tokens neither of prompts nor of rows."""
    num_drafted = sum(outputs.drafted.values()) - sum(before.drafted.values())
    num_tokens = outputs.computed_tokens - before.computed_tokens - num_drafted
    num_rows = max(1, outputs.num_running, before.num_running)  # those that ended with the step are in `before`
    if outputs.step_s is not None and num_tokens > 0:
        state.measure(num_tokens, num_rows, outputs.step_s)


def divide(config: EngineConfig, num_replicas: int) -> list[Place]:
    """Replicas on this machine.

    On a GPU each replica has a GPU of its own. On a CPU they share its threads and the memory for caches.
    """
    num_devices = 0 if config.device == "cpu" else count_devices()
    if num_devices:
        if num_devices < num_replicas:
            raise InvalidParams(
                f"replicas is {num_replicas}, but this machine has {num_devices} GPU(s), and each replica needs one. "
                "Lower it, or set device to 'cpu'."
            )
        names = device_names(num_devices)
        environments = [{**os.environ, "CUDA_VISIBLE_DEVICES": name} for name in names[:num_replicas]]
        return [(config, LocalLaunch(environment)) for environment in environments]
    return [(divide_cpu(config, num_replicas), LocalLaunch())] * num_replicas


def divide_cpu(config: EngineConfig, num_replicas: int) -> EngineConfig:
    """The configuration of replicas that share the threads and the memory for caches of this machine."""
    threads = max(1, (config.threads or usable_cores()) // num_replicas)
    kv_memory = config.kv_memory
    if kv_memory is None and config.num_blocks is None:
        kv_memory = CPU_SHARE * free_bytes("cpu") / GIB / num_replicas
    return replace(config, threads=threads, kv_memory=kv_memory)


def device_names(num_devices: int) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the devices that this process sees. It may itself see a part of the machine's."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return visible[:num_devices] if visible[0] else [str(index) for index in range(num_devices)]
