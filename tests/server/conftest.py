"""The server that most tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.running import Running


@pytest.fixture(scope="session")
def server(default_model: Path) -> Iterator[Running]:
    with Running("--max-len", "2048", "--kv-memory", "1") as running:
        yield running
