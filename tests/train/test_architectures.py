"""Heads for models whose layers are unlike Llama's: what they start from, and what is refused before any training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import UnsupportedModel
from quire.kernels import reference, select_torch
from quire.models.config import LatentConfig
from quire.models.structure import Structure
from quire.train.heads.eagle import EagleModule
from quire.train.settings import SCALES, Settings, choose
from quire.train.target import Target
from quire.weights.loader import load_model
from tests.tools import expert_models
from tests.tools.family_cases import save
from tests.tools.tiny import LLAMA

pytestmark = pytest.mark.cpu


def target_of(path: Path) -> Target:
    loaded = load_model(path, dtype="float32", ops=select_torch("cpu"))
    return Target(loaded.model, loaded.config, select_torch("cpu"), "float32")


@pytest.mark.parametrize("name", ["olmo2", "cohere", "gpt2"])
def test_an_eagle_head_starts_from_any_layer(tmp_path: Path, name: str) -> None:
    """Norms after the layer, one norm for attention and MLP, an MLP without a gate."""
    EagleModule(target_of(save(name, tmp_path)), 2, torch.Generator().manual_seed(0), list(range(20)))


def test_an_eagle_head_of_a_mixture(tmp_path: Path) -> None:
    path = expert_models.save(expert_models.transformers_model("olmoe"), tmp_path)
    EagleModule(target_of(path), 2, torch.Generator().manual_seed(0), list(range(20)))


def test_keys_of_a_layer_with_norms_behind_it(tmp_path: Path) -> None:
    """OLMo 2: the input is not normed, and keys are normed whole."""
    target, x, positions = target_of(save("olmo2", tmp_path)), torch.randn(5, 64), torch.arange(5)
    attention: Any = target.model.layers[1].attention
    keys, values = target.keys_values(1, x, positions)
    _, k, v = attention.qkv(x).view(5, -1, attention.head_dim).split_with_sizes(attention.heads, dim=1)
    k = attention.qk_norm[1](k.flatten(1)).view(k.shape)
    expected, _ = reference.rope(k, k, positions, attention.rotary.table, attention.rotary.interleaved)
    torch.testing.assert_close(keys, expected)
    torch.testing.assert_close(values, v)


@pytest.mark.parametrize("kind", ["block", "eagle"])
def test_latents_are_refused(kind: str) -> None:
    latent = LatentConfig(rank=32, rotated_dim=16, key_dim=16, value_dim=16)
    with pytest.raises(UnsupportedModel, match="this model has latents instead"):
        choose(Settings(kind=kind), SCALES["cpu"], replace(LLAMA, latent=latent))
    choose(Settings(kind="medusa"), SCALES["cpu"], replace(LLAMA, latent=latent))


def test_an_output_matrix_with_a_bias_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="output matrix has a bias"):
        choose(Settings(kind="medusa"), SCALES["cpu"], replace(LLAMA, structure=Structure(head_bias=True)))
