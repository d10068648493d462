"""The application with its engines and without a socket, for hosts that bring one: batch jobs and Ray Serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from quire.config import EngineConfig
from quire.engine.fleet import FleetCallbacks
from quire.engine.live_changes import LiveChanges
from quire.engine.messages import StepOutputs
from quire.server.app import build_app
from quire.server.auth import load_api_keys
from quire.server.config import ServerConfig
from quire.server.engines import make_client
from quire.server.metrics import Metrics
from quire.server.middleware import RequestMiddleware
from quire.server.service import Service
from quire.text.tokenizers.tokenizer import load_tokenizer


@asynccontextmanager
async def open_application(
    engine: EngineConfig, config: ServerConfig, path: Path
) -> AsyncIterator[tuple[RequestMiddleware, Service]]:
    """Start the engines and load the model. The end of the `with` block ends them."""
    metrics = Metrics()
    metrics.num_replicas = config.replicas
    middleware = build_app(config, load_api_keys(config.api_key, config.api_key_file, config.operators), metrics)

    def on_step(outputs: StepOutputs, replica: int) -> None:
        if middleware.service is not None:
            middleware.service.on_step(outputs, replica)

    def on_restart(reason: str, replica: int) -> None:
        metrics.on_restart(replica)
        if middleware.service is not None:
            middleware.service.live.on_restart(reason, replica)

    def on_changes(changes: LiveChanges, replica: int) -> None:
        if middleware.service is not None:
            middleware.service.live.on_changes(changes, replica)

    callbacks = FleetCallbacks(on_step, on_restart, on_changes)
    client = await make_client(engine, path, config.replicas, config.stall_timeout, callbacks, ray=config.ray)
    try:
        tokenizer = asyncio.get_running_loop().run_in_executor(None, load_tokenizer, path)
        ready = await client.start()
        metrics.num_blocks = ready.num_blocks
        metrics.ready.set_function(lambda: float(client.health()))
        service = Service(client, ready, await tokenizer, config, engine, metrics)
        middleware.service = service
        try:
            yield middleware, service
        finally:
            await service.close()
    finally:
        await client.close()
