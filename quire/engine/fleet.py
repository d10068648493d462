"""Fleet: a client with several engines (replicas), each in a process of its own. A request goes where it ends soonest.

It has the methods of the other clients (submit, abort, health). Each replica has a supervisor. `core/routing.py`
chooses. When a replica dies, its requests continue on the others with the tokens that have arrived, while its engine
is started again. The answers are the same: sampling depends on seed and position alone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from quire.config import EngineConfig
from quire.core.plan import Update
from quire.core.request import Finish, Request
from quire.core.routing import ReplicaState, Router
from quire.engine.live_changes import CacheDescription, LiveChanges
from quire.engine.mailbox import Mailbox
from quire.engine.memory import CPU_SHARE, GIB, free_bytes
from quire.engine.messages import Ready, StepOutputs
from quire.engine.supervisor import EngineCallbacks, InFlightRequest, Supervised
from quire.errors import EngineClosed, InvalidParams, QuireError
from quire.kernels.cuda_driver import count_devices
from quire.kernels.isa import usable_cores
from quire.trace.format import RecordingStart

if TYPE_CHECKING:
    from quire.capacity.profile import CapacityProfile

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
    ) -> None:
        numbers = itertools.count()
        self._callbacks = callbacks or FleetCallbacks()
        self._block_size = config.block_size
        self.members = [
            Supervised(
                member_config,
                path,
                stall_s=stall_s,
                callbacks=self._callbacks_of(index),
                environment=environment,
                report_prefixes=True,
                recording=recording and structs.replace(recording, replica=index),
                numbers=numbers,
            )
            for index, (member_config, environment) in enumerate(divide(config, num_replicas))
        ]
        self._has_prefix_cache = config.prefix_cache
        self._router: Router | None = None
        self._owners: dict[str, Supervised | None] = {}  # of requests in flight, by id; None: it is in `_waiting`
        self._names: dict[str, str] = {}  # under which the router knows a request: the id of the first of its group
        self._waiting: list[list[InFlightRequest]] = []  # groups for the first replica that is ready
        self._last = [StepOutputs()] * num_replicas  # of each replica since its last start
        self._closing = False

    # ── the client's methods ──────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> Ready:
        """Start all replicas and wait until they have loaded the model. The result describes them together."""
        ready = await asyncio.gather(*(member.start() for member in self.members))
        num_blocks = [each.num_blocks if self._has_prefix_cache else 0 for each in ready]
        states = [ReplicaState(each.max_requests, count) for each, count in zip(ready, num_blocks, strict=True)]
        for state, member in zip(states, self.members, strict=True):
            state.ready = member.health()  # one may have died while others loaded
        self._router = Router(states, self._block_size)
        return Ready(
            vocab_size=ready[0].vocab_size,
            max_len=min(each.max_len for each in ready),
            max_requests=sum(each.max_requests for each in ready),
            eos_token_ids=ready[0].eos_token_ids,
            num_blocks=sum(each.num_blocks for each in ready),
            device=ready[0].device,
            summary=f"{len(ready)} replicas, each: {ready[0].summary}",
            sampling=ready[0].sampling,
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
        """Whether a replica is ready."""
        return any(member.health() for member in self.members)

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

    # ── routing ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _place(self, group: list[InFlightRequest]) -> None:
        """Give a group to a replica. While none is ready, the group waits."""
        index = self._choose(group)
        member = None if index is None else self.members[index]
        for in_flight in group:
            self._owners[in_flight.request.id] = member
        if member is not None:
            member.adopt(group)
        elif self._closing or all(member.gone for member in self.members):
            raise EngineClosed("The engines have been shut down.")
        else:
            self._waiting.append(group)

    def _choose(self, group: Sequence[InFlightRequest]) -> int | None:
        assert self._router is not None, "start() comes first"
        first = group[0]
        name = self._names[first.request.id]
        index = self._router.choose(
            name,
            [*first.request.prompt, *first.output],
            first.request.salt,
            first.request.max_tokens - len(first.output),
            len(group),
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
            self._on_end,
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

    def _on_end(self, error: QuireError) -> None:
        """A replica will not be started again. Its supervisor's task has not ended yet."""
        if sum(not member.gone for member in self.members) <= 1:
            self._fail_waiting(error)


def measure_step(state: ReplicaState, outputs: StepOutputs, before: StepOutputs) -> None:
    """Tell the router how long a step took. Drafts that it verified are tokens neither of prompts nor of rows."""
    num_drafted = sum(outputs.drafted.values()) - sum(before.drafted.values())
    num_tokens = outputs.computed_tokens - before.computed_tokens - num_drafted
    num_rows = max(1, outputs.num_running, before.num_running)  # those that ended with the step are in `before`
    if outputs.step_s is not None and num_tokens > 0:
        state.measure(num_tokens, num_rows, outputs.step_s)


def divide(config: EngineConfig, num_replicas: int) -> list[tuple[EngineConfig, Mapping[str, str] | None]]:
    """The configuration of each replica, and the environment of its process.

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
        return [(config, {**os.environ, "CUDA_VISIBLE_DEVICES": name}) for name in names[:num_replicas]]
    threads = max(1, (config.threads or usable_cores()) // num_replicas)
    kv_memory = config.kv_memory
    if kv_memory is None and config.num_blocks is None:
        kv_memory = CPU_SHARE * free_bytes("cpu") / GIB / num_replicas
    return [(replace(config, threads=threads, kv_memory=kv_memory), None)] * num_replicas


def device_names(num_devices: int) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the devices that this process sees. It may itself see a part of the machine's."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return visible[:num_devices] if visible[0] else [str(index) for index in range(num_devices)]
