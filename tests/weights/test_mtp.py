"""The layer for multi-token prediction in a model's checkpoint: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.errors import InvalidParams, WeightMismatch
from quire.weights.heads import Target
from quire.weights.json_config import config_from_json
from quire.weights.loader import load_model
from quire.weights.mtp import load_mtp
from tests.tools.eagle import mtp_tensors
from tests.tools.native import kernels_of
from tests.tools.tiny_models import tiny_config, tiny_directory, tiny_weights, write_directory

pytestmark = pytest.mark.cpu

OPS = kernels_of()


def write(directory: Path, num_layers: int = 1, without: str = "") -> Path:
    config = tiny_config("mimo") | {"num_nextn_predict_layers": num_layers}
    tensors = {name: torch.from_numpy(each) for name, each in mtp_tensors(config).items()}
    tensors.pop(without, None)
    return write_directory(directory, config, tiny_weights("mimo") | tensors)


def load_target(path: Path) -> Target:
    loaded = load_model(path, dtype="float32", ops=OPS)
    return Target(loaded.model, loaded.config)


def test_mimo_is_a_qwen2_with_a_layer_more() -> None:
    config = config_from_json(tiny_config("mimo"))
    assert config.family == "mimo"
    assert config.num_mtp_layers == 1
    assert config.num_layers == 2
    assert config.attention_bias
    assert not config_from_json(tiny_config("mimo") | {"attention_bias": False}).attention_bias
    assert config_from_json(tiny_config("qwen2")).num_mtp_layers == 0


def test_the_layer_is_read(tmp_path: Path) -> None:
    path = write(tmp_path)
    loaded = load_model(path, dtype="float32", ops=OPS)
    assert len(loaded.unused) == 16
    assert all(name.startswith("model.mtp_layers.0.") for name in loaded.unused)
    head = load_mtp(path, Target(loaded.model, loaded.config), OPS)
    assert head.head.config.kind == "mtp"
    assert head.head.config.attention_bias
    assert head.head.embedding is loaded.model.embedding
    assert head.draft_ids is None
    assert head.output is None


def test_models_without_the_layer_are_refused(tmp_path: Path) -> None:
    path = tiny_directory(tmp_path / "llama")
    with pytest.raises(InvalidParams, match="and llama has none of them; leave it out"):
        load_mtp(path, load_target(path), OPS)
    path = write(tmp_path / "two", 2)
    with pytest.raises(InvalidParams, match=r"one layer for multi-token prediction.*two has 2 of them"):
        load_mtp(path, load_target(path), OPS)
    path = write(tmp_path / "mimo")
    target = load_target(path)
    with pytest.raises(InvalidParams, match=r"model\.gguf is a GGUF file"):
        load_mtp(tmp_path / "model.gguf", target, OPS)


def test_a_layer_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, without="model.mtp_layers.0.input_proj.weight")
    with pytest.raises(WeightMismatch, match=r"1 missing \(model.mtp_layers.0.input_proj.weight \[64, 128\]\)"):
        load_mtp(path, load_target(path), OPS)
