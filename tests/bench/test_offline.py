"""What `quire bench offline` says about the machine."""

from __future__ import annotations

import pytest

from quire.config import EngineConfig
from quire.engine.machine import machine
from quire.kernels.isa import usable_cores

pytestmark = pytest.mark.cpu


def test_threads_are_those_of_the_engine() -> None:
    assert machine(EngineConfig())["threads"] == usable_cores()
    assert machine(EngineConfig(threads=usable_cores() + 3))["threads"] == usable_cores() + 3
