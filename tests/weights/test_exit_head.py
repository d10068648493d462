"""Files of exit heads: what is read, and what is refused with a sentence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.errors import BadModelFile, ModelError, UnsupportedModel, WeightMismatch
from quire.weights.exit_head import ExitCalibration, load_exit_head
from quire.weights.heads import load_block_head
from tests.tools.exits import exit_config, exit_tensors
from tests.tools.heads import block_config, block_tensors, write_head
from tests.weights.test_heads import CONFIG, OPS, TARGET, Change, change_config, change_target, change_tensor, drop

pytestmark = pytest.mark.cpu


def test_a_head_that_was_written_is_read(tmp_path: Path) -> None:
    config = exit_config(TARGET, layer=2, rank=17)
    tensors = exit_tensors(config, CONFIG)
    loaded = load_exit_head(write_head(tmp_path, config, tensors), TARGET, OPS)
    assert loaded.layer == 2
    np.testing.assert_array_equal(loaded.draft_ids, tensors["draft_ids"])
    np.testing.assert_array_equal(loaded.head.norm.weight, tensors["norm.weight"])
    np.testing.assert_array_equal(loaded.head.out_norm.weight, tensors["out_norm.weight"])
    for name, linear in (("down", loaded.head.adapter_down), ("up", loaded.head.adapter_up)):
        dense = linear.weight.dense()  # type: ignore[attr-defined]
        np.testing.assert_allclose(dense, tensors[f"adapter_{name}.weight"], atol=0.02)
    assert loaded.calibration == ExitCalibration((0.1, 0.5, 0.9), (0.2, 0.6, 0.95))


def test_confidence_is_read_from_the_table() -> None:
    table = ExitCalibration((0.1, 0.5, 0.9), (0.2, 0.6, 0.95))
    assert table.confidence(0.1) == 0.2
    assert table.confidence(0.3) == pytest.approx(0.4)
    assert table.confidence(1.0) == 0.95
    assert table.confidence(0.05) == pytest.approx(0.1)
    assert table.confidence(0.0) == 0.0
    assert math.isnan(table.confidence(math.nan))
    assert ExitCalibration((0.0,), (0.7,)).confidence(0.0) == 0.7
    assert math.isnan(ExitCalibration((0.0,), (0.7,)).confidence(math.nan))


def test_probabilities_may_be_rounded_to_the_same_number(tmp_path: Path) -> None:
    config = exit_config(TARGET, calibration=[[0.5, 0.5], [1.0, 0.9], [1.0, 0.97]])
    loaded = load_exit_head(write_head(tmp_path, config, exit_tensors(config, CONFIG)), TARGET, OPS)
    assert loaded.calibration.confidence(0.75) == pytest.approx(0.7)
    assert loaded.calibration.confidence(1.0) in (0.9, 0.97)


HUGE: Any = 10**400
REFUSED: dict[str, tuple[Change, type[ModelError], str]] = {
    "digest": (change_target(digest="0" * 64), UnsupportedModel, "was trained for another model"),
    "no mark": (drop("quire_head"), BadModelFile, "quire train-draft"),
    "kind": (change_config(kind="block"), UnsupportedModel, "block:DIR instead of self:DIR"),
    "no layer": (drop("layer"), BadModelFile, "layer is missing"),
    "layer 0": (change_config(layer=0), BadModelFile, "layer is 0"),
    "last layer": (change_config(layer=3), BadModelFile, "layer is 3, and must be from 1 to 2: the model has 3 layers"),
    "layer is text": (change_config(layer="1"), BadModelFile, "layer is '1'"),
    "rank": (change_config(rank=0), BadModelFile, "rank is 0"),
    "large rank": (change_config(rank=10**6), BadModelFile, "from 1 to 4096"),
    "eps": (change_config(rms_norm_eps=0.0), BadModelFile, "rms_norm_eps"),
    "no calibration": (drop("calibration"), BadModelFile, "calibration must be a list"),
    "missing tensor": (drop("adapter_up.weight"), WeightMismatch, "missing .adapter_up.weight"),
    "missing ids": (drop("draft_ids"), WeightMismatch, "draft_ids"),
    "other rank": (change_config(rank=16), WeightMismatch, "instead of"),
    "wrong shape": (change_tensor("out_norm.weight", np.ones(63, np.float32)), WeightMismatch, "is .63. instead"),
    "too many": (change_tensor("bias", np.ones(1, np.float32)), WeightMismatch, "unexpected"),
    "id too large": (change_tensor("draft_ids", np.arange(38, 98)), BadModelFile, "from 0 to 96"),
    "no numbers": (
        change_tensor("adapter_down.weight", np.full((32, 64), np.nan, np.float32)),
        BadModelFile,
        "Train the head again",
    ),
} | {
    f"calibration {name}": (change_config(calibration=points), BadModelFile, words)
    for name, points, words in (
        ("is empty", [], "1 to 1,000 pairs"),
        ("is an object", {"0.1": 0.2}, "calibration must be a list"),
        ("has a number", [0.5], "pairs of numbers"),
        ("has three numbers", [[0.1, 0.2, 0.3]], "pairs of numbers"),
        ("has text", [["0.1", 0.2]], "pairs of numbers"),
        ("has a truth", [[True, 0.2]], "pairs of numbers"),
        ("is above 1", [[0.5, 1.5]], "from 0 to 1"),
        ("is below 0", [[-0.5, 0.5]], "from 0 to 1"),
        ("is huge", [[0.5, HUGE]], "from 0 to 1"),
        ("is no number", [[0.5, math.nan]], "from 0 to 1"),
        ("is infinite", [[math.inf, 0.5]], "from 0 to 1"),
        ("descends", [[0.5, 0.5], [0.4, 0.6]], "ascending"),
        ("is long", [[nth / 2000, 0.5] for nth in range(1001)], "1 to 1,000"),
    )
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_head_is_refused(name: str, tmp_path: Path) -> None:
    change, error, words = REFUSED[name]
    config = exit_config(TARGET)
    tensors = exit_tensors(config, CONFIG)
    change(config, tensors)
    with pytest.raises(error, match=words):
        load_exit_head(write_head(tmp_path, config, tensors), TARGET, OPS)


def test_an_exit_head_is_no_block_head(tmp_path: Path) -> None:
    config = block_config(TARGET, kind="exit")
    with pytest.raises(UnsupportedModel, match="self:DIR instead of block:DIR"):
        load_block_head(write_head(tmp_path, config, block_tensors(config, CONFIG)), TARGET, OPS)
