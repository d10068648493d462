"""A few worlds of `crossings.py`, of every kind of model. The long run is `python -m tests.engine.crossings`."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.engine.crossings import MODEL_KINDS, World, run_world

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Proposers fail on purpose."""
    logging.getLogger("quire.speculative").setLevel(logging.CRITICAL)


@pytest.mark.parametrize("first", range(0, 40, 4))
def test_no_answer_differs(first: int, tmp_path: Path) -> None:
    worlds = [run_world(seed, tmp_path) for seed in range(first, first + 4)]
    assert sum(world.num_drafted for world in worlds) > 3


def test_every_kind_of_model_and_of_trouble_is_among_them(tmp_path: Path) -> None:
    kinds = {World(seed, tmp_path).kind for seed in range(40)}
    assert kinds == {"", *MODEL_KINDS}
