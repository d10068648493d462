"""Files of EAGLE heads: the published layouts and quire's own, and what is refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.errors import BadModelFile, ModelError, ModelNotFound, UnsupportedModel, WeightMismatch
from quire.weights.eagle import find_window, load_eagle, read_tap_layers
from quire.weights.fields import Fields
from quire.weights.heads import Target
from tests.tools.eagle import eagle_config, eagle_tensors
from tests.tools.heads import Tensors, write_head
from tests.tools.native import FITTING, all_of, kernels_of, native_model

pytestmark = pytest.mark.cpu

CONFIG = FITTING["llama"]
OPS = kernels_of()
TARGET = Target(native_model(CONFIG, OPS, all_of("f32")), CONFIG)

Change = Callable[[dict[str, Any], Tensors], None]


def files_of(kind: str, **changes: Any) -> tuple[dict[str, Any], Tensors]:
    config = eagle_config(kind, TARGET, **changes)
    return config, eagle_tensors(kind, config, CONFIG)


def test_quires_own_layout(tmp_path: Path) -> None:
    config, tensors = files_of("own", tap_layers=[2, 0, 1])
    loaded = load_eagle(write_head(tmp_path, config, tensors), TARGET, OPS)
    assert loaded.head.config.kind == "eagle3"
    assert loaded.head.config.tap_layers == (2, 0, 1)
    assert loaded.output is None
    assert loaded.draft_ids is not None
    np.testing.assert_array_equal(loaded.draft_ids, tensors["draft_ids"])
    assert loaded.head.embedding is TARGET.model.embedding
    found = loaded.head.mlp.down.weight.dense()  # type: ignore[attr-defined]
    np.testing.assert_allclose(found, tensors["midlayer.mlp.down_proj.weight"], atol=0.01)


@pytest.mark.parametrize("layer", ["midlayer", "layers.0"])
def test_eagle_3(layer: str, tmp_path: Path) -> None:
    config, tensors = files_of("eagle3")
    named = {name.replace("midlayer", layer): each for name, each in tensors.items()}
    loaded = load_eagle(write_head(tmp_path, config, named), TARGET, OPS)
    assert loaded.head.config.kind == "eagle3"
    assert loaded.head.config.layer == layer
    assert loaded.output is not None
    assert loaded.output.shape == (60, 64)
    assert loaded.draft_ids is not None
    np.testing.assert_array_equal(loaded.draft_ids, np.flatnonzero(tensors["t2d"]))


def test_eagle_3_with_the_whole_vocabulary(tmp_path: Path) -> None:
    config = eagle_config("eagle3", TARGET, draft_vocab_size=97)
    tensors = eagle_tensors("eagle3", config, CONFIG, num_ids=97)
    del tensors["d2t"], tensors["t2d"]
    loaded = load_eagle(write_head(tmp_path, config, tensors), TARGET, OPS)
    assert loaded.draft_ids is None
    assert loaded.output is not None
    assert loaded.output.shape == (97, 64)


def test_eagle_3_with_rows_of_the_targets_head(tmp_path: Path) -> None:
    config, tensors = files_of("eagle3")
    del tensors["lm_head.weight"]
    loaded = load_eagle(write_head(tmp_path, config, tensors), TARGET, OPS)
    assert loaded.output is None
    assert loaded.draft_ids is not None


def test_sizes_in_a_section(tmp_path: Path) -> None:
    """As the files of the speculators library."""
    flat, tensors = files_of("eagle3")
    flat.pop("eagle_config")
    top = {"draft_vocab_size": flat.pop("draft_vocab_size"), "target_hidden_size": None, "norm_before_residual": True}
    top |= {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "transformer_layer_config": flat}
    tensors["embed_tokens.weight"] = np.ones((97, 64), np.float32)
    loaded = load_eagle(write_head(tmp_path, top, tensors), TARGET, OPS)
    assert loaded.head.config.tap_layers == (0, 1, 2)
    assert loaded.head.config.norm_residual
    assert loaded.head.embedding is not TARGET.model.embedding


def test_a_head_of_another_width(tmp_path: Path) -> None:
    wide = replace(CONFIG, hidden_size=96)
    config = eagle_config("eagle3", TARGET, hidden_size=96, target_hidden_size=64)
    tensors = eagle_tensors("eagle3", config, wide)
    tensors["fc.weight"] = np.ones((96, 3 * 64), np.float32)
    tensors["embed_tokens.weight"] = np.ones((97, 96), np.float32)
    loaded = load_eagle(write_head(tmp_path, config, tensors), TARGET, OPS)
    assert loaded.head.config.num_features == 192
    del tensors["embed_tokens.weight"]
    with pytest.raises(UnsupportedModel, match="hidden_size is 96, and that of the model is 64"):
        load_eagle(write_head(tmp_path, config, tensors), TARGET, OPS)


@pytest.mark.parametrize("bias", [False, True])
def test_eagle_1_and_2(bias: bool, tmp_path: Path) -> None:
    config, tensors = files_of("eagle")
    if not bias:
        del tensors["fc.bias"]
    for letter, rows in zip("qkv", (64, 32, 32), strict=True):
        if bias:
            tensors[f"layers.0.self_attn.{letter}_proj.bias"] = np.ones(rows, np.float32)
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)  # old files have it
    loaded = load_eagle(write_head(tmp_path, config, tensors), TARGET, OPS)
    assert loaded.head.config.kind == "eagle"
    assert loaded.head.config.tap_layers == ()
    assert loaded.head.config.join_bias == loaded.head.config.attention_bias == bias
    assert loaded.output is None
    assert loaded.draft_ids is None


@pytest.mark.parametrize("num_layers", [8, 32])
def test_layers_are_counted_as_published_heads_do(num_layers: int) -> None:
    """An index of quire's means the state after a layer."""
    target = replace(CONFIG, num_layers=num_layers)
    key = "eagle_aux_hidden_state_layer_ids"

    def read(**values: Any) -> tuple[int, ...]:
        return read_tap_layers(Fields(values, "config.json"), target)

    assert read() == (1, num_layers // 2 - 1, num_layers - 4)
    assert read(**{key: [2, 4, 8]}) == (1, 3, 7)
    assert read(eagle_config={key: [1, 3, 4]}) == (1, 3, 4)
    assert read(eagle_config={"use_aux_hidden_state": True}) == read()
    assert read(quire_head=1, tap_layers=[0, 5]) == (0, 5)


def test_rope_is_that_of_the_head(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    config, tensors = files_of("eagle3", rope_theta=500.0, rope_scaling=scaling, max_position_embeddings=32)
    loaded = load_eagle(write_head(tmp_path, config, tensors), TARGET, OPS)
    rotary = loaded.head.attention.rotary
    assert rotary is not None
    assert rotary.table.shape == (CONFIG.max_len, 16)
    assert rotary.table[3, 1] == pytest.approx(np.cos(3 / 500 ** (1 / 8) / 2))


def test_a_head_sees_as_far_as_the_target() -> None:
    assert find_window([4, None, 4]) is None
    assert find_window([4, 8, 4]) == 8
    assert find_window([None]) is None


def change_config(**changes: Any) -> Change:
    return lambda config, tensors: config.update(changes)


def change_tensor(name: str, value: Any) -> Change:
    return lambda config, tensors: tensors.update({name: value})


def drop(name: str) -> Change:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        (tensors if name in tensors else config).pop(name)

    return change


def change_d2t(index: int, value: int) -> Change:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        tensors["d2t"][index] = value

    return change


def flip_t2d(config: dict[str, Any], tensors: Tensors) -> None:
    tensors["t2d"] = ~tensors["t2d"]


def shorten_d2t(config: dict[str, Any], tensors: Tensors) -> None:
    tensors["d2t"] = np.arange(30)
    del tensors["t2d"]


def other_target(config: dict[str, Any], tensors: Tensors) -> None:
    config["target"] = config["target"] | {"digest": "0" * 64}


AUX = "eagle_aux_hidden_state_layer_ids"
REFUSED: dict[str, tuple[str, Change, type[ModelError], str]] = {
    "digest": ("own", other_target, UnsupportedModel, "trained for another model"),
    "kind": ("own", change_config(kind="block"), UnsupportedModel, "block:DIR"),
    "own taps": ("own", change_config(tap_layers=[0, 1, 3]), BadModelFile, "from 0 to 2"),
    "no taps": ("own", drop("tap_layers"), BadModelFile, "tap_layers is None"),
    "own ids": ("own", change_tensor("draft_ids", np.arange(38, 98)), BadModelFile, "draft_ids must be different"),
    "no heads": ("own", drop("num_attention_heads"), BadModelFile, "num_attention_heads is missing"),
    "uneven heads": ("own", change_config(num_key_value_heads=3), BadModelFile, "not a multiple of 3"),
    "hidden size": (
        "eagle3",
        change_config(hidden_size=128),
        UnsupportedModel,
        "hidden_size is 128, and the model has",
    ),
    "target size": ("eagle3", change_config(target_hidden_size=128), UnsupportedModel, "target_hidden_size is 128"),
    "vocabulary": ("eagle3", change_config(vocab_size=96), UnsupportedModel, "vocab_size is 96, and the model has 97"),
    "old vocabulary": ("eagle", change_config(vocab_size=96), UnsupportedModel, "vocab_size is 96"),
    "two layers": ("eagle", change_config(num_hidden_layers=2), UnsupportedModel, "has 2 layers"),
    "activation": ("eagle3", change_config(hidden_act="gelu"), UnsupportedModel, "hidden_act 'gelu'"),
    "other norm": ("eagle3", change_config(norm_before_fc=True), UnsupportedModel, "norm_before_fc"),
    "no aux": ("eagle3", change_config(eagle_config={"use_aux_hidden_state": False}), UnsupportedModel, "is false"),
    "id too large": ("eagle3", change_d2t(59, 38), BadModelFile, "from 0 to 96"),
    "id below 0": ("eagle3", change_d2t(0, -1), BadModelFile, "from 0 to 96"),
    "id twice": ("eagle3", change_tensor("d2t", -np.arange(60)), BadModelFile, "different token ids"),
    "t2d": ("eagle3", flip_t2d, BadModelFile, "t2d and d2t"),
    "t2d is numbers": ("eagle3", change_tensor("t2d", np.ones(97, np.int64)), UnsupportedModel, "BOOL"),
    "short d2t": ("eagle3", shorten_d2t, BadModelFile, "60 rows for 30 token ids"),
    "no d2t": ("eagle3", drop("d2t"), BadModelFile, "60 rows for 97 token ids"),
    "layers beyond": ("eagle3", change_config(eagle_config=None, **{AUX: [1, 2, 4]}), UnsupportedModel, "from 1 to 3"),
    "state before all": (
        "eagle3",
        change_config(eagle_config=None, **{AUX: [0, 1, 2]}),
        UnsupportedModel,
        "from 1 to 3",
    ),
    "few layers": ("eagle3", change_config(eagle_config=None), UnsupportedModel, "states before the layers .2, 1, 0."),
    "layers are text": ("eagle3", change_config(eagle_config=None, **{AUX: "012"}), BadModelFile, "list of 3 layers"),
    "missing tensor": ("eagle3", drop("midlayer.hidden_norm.weight"), WeightMismatch, "unexpected"),
    "no fusion": ("eagle3", drop("fc.weight"), WeightMismatch, "missing .fc.weight"),
    "shape": (
        "eagle",
        change_tensor("fc.weight", np.ones((64, 64), np.float32)),
        WeightMismatch,
        "instead of .64, 128",
    ),
    "too many": ("eagle", change_tensor("layers.1.x", np.ones(1, np.float32)), WeightMismatch, "unexpected"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_head_is_refused(name: str, tmp_path: Path) -> None:
    kind, change, error, words = REFUSED[name]
    config, tensors = files_of(kind)
    change(config, tensors)
    with pytest.raises(error, match=words):
        load_eagle(write_head(tmp_path, config, tensors), TARGET, OPS)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    config, tensors = files_of("eagle")
    write_head(tmp_path, config, tensors, "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin only.*Convert it to model\.safetensors"):
        load_eagle(tmp_path, TARGET, OPS)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ModelNotFound, match=r"model\.safetensors"):
        load_eagle(tmp_path, TARGET, OPS)
