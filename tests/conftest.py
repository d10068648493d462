"""What all tests share. Nothing here loads torch: the core's tests must be able to run without it."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny tensors are slower on two threads than on one, much slower when tests run side by side."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
