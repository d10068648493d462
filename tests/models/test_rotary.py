"""Frequencies and magnitudes of stretched rotations against those of transformers, at the sizes of real models."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from quire.kernels.torch_arrays import TorchArrays
from quire.models.config import Rope, RopeScaling
from quire.models.rope import frequencies, magnitude, rotary_table

pytestmark = pytest.mark.cpu

LLAMA_3_1 = (128, 500_000.0, RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0))
LLAMA_3_2 = (64, 500_000.0, RopeScaling("llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0))
QWEN_YARN = (128, 1_000_000.0, RopeScaling("yarn", 4.0, 32768))
ODD_YARN = (64, 10_000.0, RopeScaling("yarn", 40.0, 4096, beta_fast=16.0, beta_slow=2.0, truncate=False))
GIVEN_YARN = (64, 10_000.0, RopeScaling("yarn", 16.0, 4096, attention_factor=1.5))
LINEAR = (256, 1_000_000.0, RopeScaling("linear", 8.0))


def theirs(dim: int, theta: float, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    parameters = {
        "rope_theta": theta,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_len,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "attention_factor": scaling.attention_factor,
        "truncate": scaling.truncate,
    }
    config = SimpleNamespace(
        standardize_rope_params=lambda: None,
        rope_parameters=parameters,
        head_dim=dim,
        hidden_size=dim,
        num_attention_heads=1,
        max_position_embeddings=131_072,
    )
    return ROPE_INIT_FUNCTIONS[scaling.kind](config, torch.device("cpu"))


@pytest.mark.parametrize("rope", [LLAMA_3_1, LLAMA_3_2, QWEN_YARN, ODD_YARN, GIVEN_YARN, LINEAR])
def test_stretches_are_those_of_transformers(rope: tuple[int, float, RopeScaling]) -> None:
    dim, theta, scaling = rope
    expected, factor = theirs(dim, theta, scaling)
    ours = torch.from_numpy(frequencies(Rope(dim, theta, scaling=scaling)))
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert magnitude(scaling) == pytest.approx(factor, rel=1e-6)
    assert not torch.allclose(torch.from_numpy(frequencies(Rope(dim, theta))), expected, rtol=1e-3, atol=0)


def test_table_holds_cosines_then_sines() -> None:
    rope = rotary_table(Rope(4, 100.0, interleaved=True), 7, TorchArrays("cpu"))
    assert rope.interleaved
    assert rope.table.shape == (7, 4)
    angles = torch.tensor([5.0, 0.5])
    torch.testing.assert_close(rope.table[5], torch.cat((angles.cos(), angles.sin())))


def test_yarn_scales_the_table() -> None:
    scaling = RopeScaling("yarn", 4.0, 16, attention_factor=1.5)
    table = rotary_table(Rope(8, scaling=scaling), 3, TorchArrays("cpu")).table
    torch.testing.assert_close(table[0], torch.tensor([1.5] * 4 + [0.0] * 4))
