"""Files of draft heads: what is read, and what is refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.errors import BadModelFile, ModelError, ModelNotFound, UnsupportedModel, WeightMismatch
from quire.kernels import select_torch
from quire.weights.heads import MEDUSA_FILE, Target, load_block_head, load_medusa, round_to_bfloat16, target_digest
from quire.weights.loader import load_model
from tests.tools.heads import (
    Tensors,
    block_config,
    block_tensors,
    describe_target,
    medusa_config,
    medusa_tensors,
    write_head,
)
from tests.tools.native import FITTING, all_of, kernels_of, native_model
from tests.tools.tiny_models import tiny_directory

pytestmark = pytest.mark.cpu

CONFIG = FITTING["llama"]
OPS = kernels_of()
TARGET = Target(native_model(CONFIG, OPS, all_of("f32")), CONFIG)

Change = Callable[[dict[str, Any], Tensors], None]


def test_a_head_that_was_written_is_read(tmp_path: Path) -> None:
    config = block_config(TARGET)
    tensors = block_tensors(config, CONFIG)
    loaded = load_block_head(write_head(tmp_path, config, tensors), TARGET, OPS)
    assert loaded.head.config.depth == 4
    assert loaded.head.config.tap_layers == (0, 1)
    np.testing.assert_array_equal(loaded.slots, tensors["slots.weight"])
    np.testing.assert_array_equal(loaded.draft_ids, tensors["draft_ids"])
    assert loaded.bigram is not None
    np.testing.assert_array_equal(loaded.bigram.before, tensors["bigram_in.weight"])
    found = loaded.head.layers[1].mlp.down.weight.dense()
    np.testing.assert_allclose(found, tensors["layers.1.mlp.down_proj.weight"], atol=0.01)


def test_a_head_without_bigrams(tmp_path: Path) -> None:
    config = block_config(TARGET, bigram_rank=0, kv_layers=[2])
    loaded = load_block_head(write_head(tmp_path, config, block_tensors(config, CONFIG)), TARGET, OPS)
    assert loaded.bigram is None
    assert len(loaded.head.layers) == 1


@pytest.mark.parametrize("name", ["model.safetensors", MEDUSA_FILE])
def test_a_published_medusa(name: str, tmp_path: Path) -> None:
    config = medusa_config(TARGET)
    loaded = load_medusa(write_head(tmp_path, config, medusa_tensors(config, CONFIG), name), TARGET, OPS)
    assert loaded.draft_ids is None
    assert [weight.shape for weight in loaded.heads.outputs] == [(97, 64)] * 3


def test_an_own_medusa(tmp_path: Path) -> None:
    config = {"quire_head": 1, "kind": "medusa", "target": describe_target(TARGET)} | medusa_config(TARGET)
    loaded = load_medusa(write_head(tmp_path, config, medusa_tensors(config, CONFIG, 20)), TARGET, OPS)
    assert loaded.draft_ids is not None
    assert len(loaded.draft_ids) == 20
    assert not loaded.heads.outputs


def test_the_digest_is_that_of_the_weights(tmp_path: Path) -> None:
    digest = target_digest(TARGET.model)
    assert digest == target_digest(native_model(CONFIG, OPS, all_of("f32")))
    assert digest != target_digest(native_model(CONFIG, OPS, all_of("f32"), seed=1))
    path = tiny_directory(tmp_path)
    native = load_model(path, dtype="float32", ops=OPS)
    in_torch = load_model(path, dtype="float32", ops=select_torch("cpu"))
    assert target_digest(native.model) == target_digest(in_torch.model)
    in_bfloat16 = load_model(path, dtype="bfloat16", ops=select_torch("cpu"))
    assert target_digest(native.model) == target_digest(in_bfloat16.model)


def test_rounding_is_that_of_torch() -> None:
    bits = np.concatenate([np.arange(1 << 16, dtype=np.uint32) + 0x3F800000, [0x3F80FFFF, 0x80000001, 0xC0018000]])
    values = bits.astype(np.uint32).view(np.float32)
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(round_to_bfloat16(values), expected)


def change_config(**changes: Any) -> Change:
    return lambda config, tensors: config.update(changes)


def change_target(**changes: Any) -> Change:
    return lambda config, tensors: config.update(target=config["target"] | changes)


def change_tensor(name: str, value: Any) -> Change:
    return lambda config, tensors: tensors.update({name: value})


def drop(name: str) -> Change:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        (tensors if name in tensors else config).pop(name)

    return change


REFUSED: dict[str, tuple[Change, type[ModelError], str]] = {
    "digest": (
        change_target(digest="0" * 64),
        UnsupportedModel,
        f"0{{64}}, this model has {target_digest(TARGET.model)}",
    ),
    "hidden size": (change_target(hidden_size=128), UnsupportedModel, "hidden_size is 128, and the model has 64"),
    "vocabulary": (change_target(vocab_size=96), UnsupportedModel, "vocab_size is 96, and the model has 97"),
    "layers": (change_target(num_layers=4), UnsupportedModel, "num_layers is 4, and the model has 3"),
    "no target": (drop("target"), BadModelFile, "target is missing"),
    "no mark": (drop("quire_head"), BadModelFile, "quire train-draft"),
    "version": (change_config(quire_head=2), UnsupportedModel, "version 1"),
    "kind": (change_config(kind="medusa"), UnsupportedModel, "medusa:DIR"),
    "depth": (change_config(depth=0), BadModelFile, "depth is 0"),
    "large depth": (change_config(depth=1000), BadModelFile, "from 1 to 32"),
    "taps": (change_config(tap_layers=[0, 3]), BadModelFile, "layers from 0 to 2"),
    "taps out of order": (change_config(tap_layers=[1, 0]), BadModelFile, "ascending"),
    "tap is text": (change_config(tap_layers="01"), BadModelFile, "tap_layers is '01'"),
    "no key layers": (change_config(kv_layers=[]), BadModelFile, "kv_layers"),
    "negative key layer": (change_config(kv_layers=[-1]), BadModelFile, "kv_layers"),
    "eps": (change_config(rms_norm_eps=-1.0), BadModelFile, "rms_norm_eps"),
    "missing tensor": (drop("in_proj.weight"), WeightMismatch, "missing .in_proj.weight"),
    "missing slots": (drop("slots.weight"), WeightMismatch, "missing .slots.weight"),
    "missing ids": (drop("draft_ids"), WeightMismatch, "draft_ids"),
    "missing bigrams": (drop("bigram_out.weight"), WeightMismatch, "missing .bigram_out.weight"),
    "wrong shape": (change_tensor("norm.weight", np.ones(63, np.float32)), WeightMismatch, "is .63. instead of .64."),
    "too many": (change_tensor("layers.2.x", np.ones(1, np.float32)), WeightMismatch, "unexpected"),
    "id too large": (change_tensor("draft_ids", np.arange(38, 98)), BadModelFile, "from 0 to 96"),
    "negative id": (change_tensor("draft_ids", np.arange(-1, 59)), BadModelFile, "from 0 to 96"),
    "id twice": (change_tensor("draft_ids", np.zeros(60, np.int64)), BadModelFile, "different token ids"),
    "ids are floats": (change_tensor("draft_ids", np.arange(60, dtype=np.float32)), UnsupportedModel, "I64"),
    "norm is integers": (change_tensor("norm.weight", np.ones(64, np.int64)), UnsupportedModel, "norm.weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_head_is_refused(name: str, tmp_path: Path) -> None:
    change, error, words = REFUSED[name]
    config = block_config(TARGET)
    tensors = block_tensors(config, CONFIG)
    change(config, tensors)
    with pytest.raises(error, match=words):
        load_block_head(write_head(tmp_path, config, tensors), TARGET, OPS)


def test_a_window_of_one_token_cannot_be_read(tmp_path: Path) -> None:
    config = block_config(TARGET)
    directory = write_head(tmp_path, config, block_tensors(config, CONFIG))
    narrow = Target(TARGET.model, replace(CONFIG, windows=(1,) * 3))
    with pytest.raises(UnsupportedModel, match="window of 1 token"):
        load_block_head(directory, narrow, OPS)


def test_a_medusa_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    config = medusa_config(TARGET)
    tensors = medusa_tensors(config, replace(CONFIG, vocab_size=99))
    with pytest.raises(WeightMismatch, match=r"0.2.weight is \[99, 64\] instead of \[97, 64\]"):
        load_medusa(write_head(tmp_path, config, tensors), TARGET, OPS)


def test_a_directory_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        load_block_head(tmp_path, TARGET, OPS)
