"""Which EAGLE heads can draft on a GPU. What they draft is checked in `tests/kernels/interpreted_drafter.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.engine.draft_heads import check_gpu_head, count_drafter_bytes
from quire.errors import UnsupportedModel
from quire.models.eagle import EagleConfig
from quire.weights.eagle import LoadedEagle
from tests.tools.tiny import LLAMA

pytestmark = pytest.mark.cpu

HEAD = EagleConfig(
    kind="eagle3", layer="midlayer", hidden_size=LLAMA.hidden_size, intermediate_size=48, num_heads=LLAMA.num_heads,
    num_kv_heads=LLAMA.num_kv_heads, head_dim=LLAMA.head_dim, norm_eps=1e-5, tap_layers=(0, 1),
)  # fmt: skip


def check(head: EagleConfig, windows: tuple[int | None, ...] = LLAMA.windows) -> None:
    loaded: Any = SimpleNamespace(head=SimpleNamespace(config=head))
    target: Any = SimpleNamespace(config=replace(LLAMA, windows=windows))
    check_gpu_head(Path("head"), loaded, target)


def test_a_head_in_the_shapes_of_the_model_can_draft() -> None:
    check(HEAD)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "eagle"}, "EAGLE 1 or 2"),
        ({"num_kv_heads": 1}, "1 key heads"),
        ({"head_dim": 32}, "32 dimensions"),
        ({"hidden_size": 64}, "64 channels"),
        ({"tap_layers": (0, 2)}, "before the last one"),
        ({"tap_layers": (1, 0)}, "ascending"),
        ({"tap_layers": (1, 1)}, "ascending"),
    ],
    ids=lambda value: str(value),
)
def test_others_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        check(replace(HEAD, **changes))


def test_a_model_with_windows_has_no_head() -> None:
    with pytest.raises(UnsupportedModel, match="sliding windows"):
        check(HEAD, (8, None, None))


@pytest.mark.parametrize("shares_output", [False, True])
def test_what_a_head_keeps_on_the_device_is_counted(shares_output: bool) -> None:
    head: Any = SimpleNamespace(config=HEAD)
    output: Any = None if shares_output else object()
    loaded = LoadedEagle(head, np.arange(50), output)
    target: Any = SimpleNamespace(head=SimpleNamespace(weight=SimpleNamespace(shape=(97, 32))))
    expected = (64 + 3000) * 2 * 32 * 2 + (50 * 32 * 2 if shares_output else 0)
    assert count_drafter_bytes({"eagle": loaded}, target, max_tokens=64, max_requests=3000, item_bytes=2) == expected
