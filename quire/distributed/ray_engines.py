"""Engines that Ray places: each is a process on a machine of the cluster, started by an actor.

An actor starts the same engine's process that runs on one machine, and that connects to this process by TCP. Requests,
tokens and caches go over this connection, as over a local socket; Ray chooses the machine, keeps its GPUs and CPUs
reserved, and reports when an actor dies. So everything that `Fleet` does holds here too. `ray` is the extra
`quire[ray]`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.engine.fleet import Place, divide_cpu
from quire.engine.launch import ENGINE, LaunchedEngine
from quire.errors import EngineError, InvalidParams
from quire.store import resolve

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
TOKEN_BYTES = 32
CONNECT_S = 20.0  # a connection sends its token within this time
PLACE_S = 60.0  # the cluster has this time to reserve what the replicas need
RETRY_S = 1.0
ACTOR_DIED = -signal.SIGKILL  # the exit status where an actor or its machine has died: no request is blamed

log = logging.getLogger("quire.ray")


class EngineActor:
    """Runs on the machine that Ray has chosen. One of its processes lives at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, address: tuple[str, int], token: bytes, model: str, path: str) -> int:
        """Start an engine's process that is connected to `address`, and wait for its end. Returns its exit status."""
        found = path if Path(path).exists() else str(resolve(model).path)  # this machine may have it elsewhere
        with socket.create_connection(address, CONNECT_S) as connection:
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            number = connection.fileno()
            self._process = subprocess.Popen(
                [sys.executable, *ENGINE, str(number), found], pass_fds=[number], stdin=subprocess.DEVNULL
            )
            connection.sendall(token)  # from here on `pid` and `kill` find the process
        return self._process.wait()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()

    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process has ended: its exit status, or what Ray says of its actor."""

    status: int
    why: str = "its process ended"


@dataclass(frozen=True, slots=True)
class RayProcess:
    """An EngineProcess on a machine of the cluster. Its `pid` is one of that machine."""

    actor: Any
    ended: asyncio.Future[Ended]
    pid: int

    @property
    def returncode(self) -> int | None:
        return self.ended.result().status if self.ended.done() else None

    async def wait(self) -> int:
        return (await asyncio.shield(self.ended)).status

    def kill(self) -> None:
        self.actor.kill.remote()


class Listener:
    """Where one engine's process connects to. It sends a token, and no other connection is kept."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.connected: asyncio.Future[Streams] = asyncio.get_running_loop().create_future()
        self._server: asyncio.Server | None = None

    async def open(self) -> tuple[str, int]:
        """The address."""
        self._server = await asyncio.start_server(self._accept, self._host, 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = b""
        with suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
            async with asyncio.timeout(CONNECT_S):
                sent = await reader.readexactly(TOKEN_BYTES)
        if hmac.compare_digest(self.token, sent) and not self.connected.done():
            self.connected.set_result((reader, writer))
        else:
            writer.close()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


class RayLaunch:
    """Starts the engine of one replica, in a bundle of the placement group, wherever that is."""

    def __init__(self, ray: Any, host: str, actor_class: Any, model: str, path: Path) -> None:
        """`host`: this machine's address in the cluster. `actor_class` has its options."""
        self._ray = ray
        self._host = host
        self._actor_class = actor_class
        self._model = model
        self._path = path
        self._actor: Any = None
        self._has_run = False

    async def launch(self) -> LaunchedEngine:
        """Waits until Ray has the resources. Raises OSError if the first actor dies before its process is connected.

        A later one is tried again: its machine may have gone just now.
        """
        while True:
            await self.close()  # the bundle has room for one
            try:
                launched = await self._launch()
                self._has_run = True
                return launched
            except ConnectionError as error:
                if not self._has_run:
                    raise
                log.warning("%s; trying again", error)
                await asyncio.sleep(RETRY_S)

    async def _launch(self) -> LaunchedEngine:
        actor, listener = self._actor_class.remote(), Listener(self._host)
        self._actor = actor
        try:
            address = await listener.open()
            status = actor.run.remote(address, listener.token, self._model, str(self._path))
            ended = asyncio.ensure_future(self._wait(status))
            await asyncio.wait((listener.connected, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            listener.close()
        if not listener.connected.done():
            raise ConnectionError(f"the engine's actor ended before its process was connected: {ended.result().why}")
        reader, writer = listener.connected.result()
        ended.add_done_callback(lambda _: writer.close())  # without its actor the process is not ours any more
        return LaunchedEngine(RayProcess(actor, ended, await actor.pid.remote()), reader, writer)

    async def _wait(self, status: Any) -> Ended:
        try:
            return Ended(int(await status))
        except self._ray.exceptions.RayError as error:
            return Ended(ACTOR_DIED, str(error).strip().rpartition("\n")[2])

    async def close(self) -> None:
        """End the actor, and free its resources."""
        if self._actor is not None:
            self._ray.kill(self._actor)
            self._actor = None


async def place_replicas(config: EngineConfig, path: Path, num_replicas: int) -> list[Place]:
    """Reserve a GPU, or CPUs, for each replica on the cluster of $RAY_ADDRESS, or on one that is started here."""
    ray = import_ray()
    connect(ray)
    member_config, bundle = find_bundle(config, num_replicas, ray.cluster_resources())
    group = ray.util.placement_group([bundle] * num_replicas, strategy="SPREAD")
    await check_placed(group, bundle, num_replicas)
    host = ray.util.get_node_ip_address()
    return [
        (member_config, make_launch(ray, group, index, bundle, host, config, path)) for index in range(num_replicas)
    ]


def import_ray() -> Any:
    try:
        import_module("ray.util.scheduling_strategies")
    except ImportError:
        raise InvalidParams("Ray is not installed; run pip install 'quire[ray]'.") from None
    return import_module("ray")


def connect(ray: Any) -> None:
    """Connect to the cluster, or start one, and leave the handlers of signals as they are.

    In the main thread: the processes of a cluster that is started here end with the thread that started them.
    """
    if ray.is_initialized():
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise EngineError(f"Ray cannot be used: {error} Check $RAY_ADDRESS, or run `ray status`.") from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def find_bundle(
    config: EngineConfig, num_replicas: int, cluster: Mapping[str, float]
) -> tuple[EngineConfig, dict[str, float]]:
    """The configuration of a replica, and what it needs of a machine."""
    num_gpus, num_cpus = int(cluster.get("GPU", 0)), int(cluster.get("CPU", 0))
    if config.device != "cpu" and num_gpus:
        if num_gpus < num_replicas:
            raise InvalidParams(
                f"replicas is {num_replicas}, but the cluster has {num_gpus} GPU(s), and each replica needs one. Lower "
                "it, add machines, or set device to 'cpu'."
            )
        return config, {"GPU": 1, "CPU": 1}
    threads = config.threads or max(1, num_cpus // num_replicas)
    if num_cpus < threads * num_replicas:
        raise InvalidParams(
            f"{num_replicas} replicas of {threads} thread(s) need {threads * num_replicas} CPUs, but the cluster has "
            f"{num_cpus}. Lower replicas or threads, or add machines."
        )
    return divide_cpu(replace(config, threads=threads * num_replicas), num_replicas), {"CPU": threads}


async def check_placed(group: Any, bundle: Mapping[str, float], num_replicas: int) -> None:
    """Wait until the cluster has reserved the bundles. Raises EngineError if it has not: others may use it."""
    try:
        await asyncio.wait_for(group.ready(), PLACE_S)
    except TimeoutError:
        raise EngineError(
            f"The cluster has not reserved {num_replicas} times {dict(bundle)} within {PLACE_S:.0f} s: others use it, "
            "or no single machine is large enough. Lower replicas or threads, or add machines."
        ) from None


def make_launch(
    ray: Any, group: Any, index: int, bundle: Mapping[str, float], host: str, config: EngineConfig, path: Path
) -> RayLaunch:
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, index)
    actor_class = ray.remote(EngineActor).options(
        num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), scheduling_strategy=strategy, max_concurrency=4
    )
    return RayLaunch(ray, host, actor_class, config.model, path)
