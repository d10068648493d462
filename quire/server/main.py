"""The server process: bind, load, serve, drain, exit. `quire serve` calls `run`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from quire import event_loop
from quire.config import EngineConfig
from quire.engine.fleet import FleetCallbacks
from quire.engine.live_changes import LiveChanges
from quire.engine.messages import StepOutputs
from quire.errors import EngineError, InvalidParams
from quire.file_limit import raise_file_limit
from quire.server.app import build_app
from quire.server.auth import load_api_keys
from quire.server.config import ServerConfig
from quire.server.connection import ConnectionLimits, RefusalLog, UvicornConfig, max_connections
from quire.server.engines import EngineClient, make_client
from quire.server.metrics import Metrics
from quire.server.middleware import RequestMiddleware
from quire.server.recording import ServerRecording
from quire.server.service import Service
from quire.text.tokenizers.tokenizer import load_tokenizer

POLL_S = 0.05
BACKLOG = 4096
IDLE_CONNECTION_S = 75

log = logging.getLogger("quire.server")


class UvicornServer(uvicorn.Server):
    """uvicorn without its signal handlers; `Server` has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """One server: uvicorn, the application, and the engine's process."""

    def __init__(self, engine: EngineConfig, config: ServerConfig, path: Path) -> None:
        self.engine = engine
        self.config = config
        self.path = path
        self.recording = (
            ServerRecording(Path(config.trace), anonymous=config.trace_anonymous) if config.trace is not None else None
        )
        self.metrics = Metrics()
        self.middleware: RequestMiddleware = build_app(
            config, load_api_keys(config.api_key, config.api_key_file), self.metrics
        )
        self.num_signals = 0
        self._stop = asyncio.Event()
        self._abort = asyncio.Event()

    async def run(self, announce: Callable[[str, str], None]) -> None:
        try:
            await self._run(announce)
        finally:
            if self.recording is not None:
                self.recording.close(has_served=self.middleware.service is not None)

    async def _run(self, announce: Callable[[str, str], None]) -> None:
        """Serve until a signal. `announce` gets the address and the summary of the engine when the server is ready."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        with bind(self.config.host, self.config.port) as listening:
            http = UvicornServer(self._uvicorn_config())
            serving = asyncio.create_task(http.serve([listening]))
            if self.recording is not None:
                await asyncio.to_thread(self.recording.begin, self.engine.model, self.path, self.config.replicas)
            client = make_client(
                self.engine, self.path, self.config.replicas, self.config.stall_timeout,
                FleetCallbacks(self._on_step, self._on_restart, self._on_changes),
                self.recording.start if self.recording is not None else None,
            )  # fmt: skip
            try:
                service = await self._load(client)
                if service is not None:
                    gc.collect()
                    gc.freeze()  # objects made so far live on; the collector need not visit them again
                    announce(address(listening, self.config), service.ready.summary)
                    await self._until_stopped(service, serving)
                    await self._drain(service)
            finally:
                await client.close()
                if self.middleware.service is not None:
                    await self.middleware.service.close()
                http.should_exit = True
                await serving

    async def _load(self, client: EngineClient) -> Service | None:
        """Load the model and accept requests. None if a signal comes before the model is loaded."""
        tokenizer = asyncio.get_running_loop().run_in_executor(None, load_tokenizer, self.path)
        loading = asyncio.ensure_future(client.start())
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            return None
        stopping.cancel()
        ready = loading.result()
        self.metrics.num_blocks, self.metrics.num_replicas = ready.num_blocks, self.config.replicas
        self.metrics.ready.set_function(lambda: float(client.health()))
        self.middleware.service = Service(client, ready, await tokenizer, self.config, self.engine, self.metrics)
        return self.middleware.service

    async def _until_stopped(self, service: Service, serving: asyncio.Task[None]) -> None:
        """Return after a signal. Raises EngineError if the engine cannot be restarted."""
        stopping = asyncio.ensure_future(self._stop.wait())
        while not stopping.done() and not serving.done():
            if service.client.gone:
                raise EngineError("The engine could not be started again; the log says why.")
            await asyncio.wait((serving, stopping), timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()

    async def _drain(self, service: Service) -> None:
        """Refuse new requests, and give running ones time to finish."""
        service.admission.draining = True
        log.info("draining: %d requests are running; no new ones are taken", service.admission.num_requests)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_timeout):
                while service.admission.num_requests and not self._abort.is_set():
                    await asyncio.sleep(POLL_S)
        if service.admission.num_requests:
            log.warning("ending %d requests that did not finish in time", service.admission.num_requests)

    def _on_signal(self) -> None:
        """The first signal drains, the second aborts."""
        self.num_signals += 1
        (self._stop if self.num_signals == 1 else self._abort).set()

    def _on_step(self, outputs: StepOutputs, replica: int) -> None:
        if self.middleware.service is not None:
            self.middleware.service.on_step(outputs, replica)
        if self.recording is not None:
            self.recording.on_step(outputs)

    def _on_restart(self, reason: str, replica: int) -> None:
        self.metrics.on_restart(replica)
        if self.middleware.service is not None:
            self.middleware.service.live.on_restart(reason, replica)
        if self.recording is not None:
            self.recording.on_restart(reason, replica)

    def _on_changes(self, changes: LiveChanges, replica: int) -> None:
        if self.middleware.service is not None:
            self.middleware.service.live.on_changes(changes, replica)

    def _uvicorn_config(self) -> UvicornConfig:
        max_open = max_connections(raise_file_limit())
        limits = ConnectionLimits(
            self.config.max_header_bytes, self.config.read_timeout, max_open, refusals=RefusalLog(max_open)
        )
        return UvicornConfig(
            self.middleware,
            limits,
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=IDLE_CONNECTION_S,
            timeout_graceful_shutdown=5,
            ssl_certfile=self.config.tls_cert,
            ssl_keyfile=self.config.tls_key,
        )


def bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise InvalidParams(f"{host}:{port} cannot be listened on: {error.strerror}. Choose another --port.") from None


def address(listening: socket.socket, config: ServerConfig) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{'https' if config.tls_cert else 'http'}://{host}:{listening.getsockname()[1]}"


def run(engine: EngineConfig, config: ServerConfig, path: Path, announce: Callable[[str, str], None]) -> None:
    """Serve a model until SIGTERM or Ctrl-C."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)

    async def serve() -> None:
        await Server(engine, config, path).run(announce)

    event_loop.run(serve())
