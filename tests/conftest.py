"""What all tests share. Nothing here loads torch: the core's tests must be able to run without it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from quire import LLM


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> None:
    """Tiny tensors are slower on two threads than on one, much slower when tests run side by side."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(2 if request.node.get_closest_marker("model") else 1)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file, fetched once into quire's cache."""
    from quire.config import DEFAULT_MODEL
    from quire.store import resolve

    return resolve(DEFAULT_MODEL).path


@pytest.fixture(scope="session")
def llm(default_model: Path) -> Iterator[LLM]:
    """The default model, shared by all tests that need no special options."""
    from quire import LLM

    with LLM(max_len=2048, kv_memory=1.0) as llm:
        yield llm
