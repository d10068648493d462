"""The same model stored another way gives the same logits: paired rotations, ready-made stretches, other types."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.kernels import select_torch
from quire.models.config import ModelConfig
from quire.models.registry import MODELS
from quire.models.rope import frequencies
from tests.models.pair import Pair, draw_tokens, run
from tests.models.test_parity import CASES
from tests.tools.state_dict_source import StateDictSource

pytestmark = pytest.mark.cpu

STEPS = [[(0, 11)], [(0, 1)], [(0, 8)]]
TOKENS = draw_tokens(20)


def logits_of(
    config: ModelConfig, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    with torch.inference_mode():
        model = MODELS[config.family](config, StateDictSource(tensors, dtype), select_torch("cpu"))
        return run(model, config, {0: TOKENS}, STEPS, dtype)[0]


def interleave(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of a projection, so that what was paired at (i, i + dim / 2) lies at (2i, 2i + 1)."""
    heads = rows.view(-1, 2, head_dim // 2, rows.shape[-1])
    return heads.transpose(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_interleaved_rope(name: str) -> None:
    pair = Pair(CASES[name])
    tensors = dict(pair.theirs.state_dict())
    for key in tensors:
        if key.endswith(("q_proj.weight", "k_proj.weight")):
            tensors[key] = interleave(tensors[key], pair.config.head_dim)
    config = replace(pair.config, rope=replace(pair.config.rope, interleaved=True))
    expected = logits_of(pair.config, pair.theirs.state_dict())
    torch.testing.assert_close(logits_of(config, tensors), expected, atol=1e-4, rtol=0)


def test_divisors_stand_for_a_stretch() -> None:
    pair = Pair(CASES["llama3"])
    plain = replace(pair.config.rope, scaling=None)
    divisors = frequencies(plain) / frequencies(pair.config.rope)
    assert divisors.max() > 3.9
    config = replace(pair.config, rope=replace(plain, divisors=tuple(divisors.tolist())))
    tensors = pair.theirs.state_dict()
    torch.testing.assert_close(logits_of(config, tensors), logits_of(pair.config, tensors), atol=1e-4, rtol=0)


def test_norms_with_the_one_added() -> None:
    pair = Pair(CASES["gemma3"])
    tensors = {
        key: tensor + 1 if key.endswith("norm.weight") else tensor for key, tensor in pair.theirs.state_dict().items()
    }
    expected = logits_of(pair.config, pair.theirs.state_dict())
    torch.testing.assert_close(logits_of(replace(pair.config, norm_offset=False), tensors), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama2", "gemma3"])
def test_attention_softcap_bends_large_scores_only(name: str) -> None:
    pair = Pair(CASES[name])
    tensors = pair.theirs.state_dict()
    plain, tight, wide = (logits_of(replace(pair.config, attention_softcap=cap), tensors) for cap in (None, 0.5, 1e4))
    assert (tight - plain).abs().max() > 0.01
    torch.testing.assert_close(wide, plain, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3", "gemma3"])
def test_half_types_are_as_good_as_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    pair = Pair(CASES[name])
    with torch.inference_mode():
        exact = pair.expected(TOKENS)
        ours = logits_of(pair.config, pair.theirs.state_dict(), dtype)
        theirs = pair.theirs.to(dtype)(TOKENS[None], use_cache=False).logits[0].float()
    assert ours.dtype == torch.float32
    error, their_error = ((logits - exact).square().mean().sqrt() for logits in (ours, theirs))
    assert 0 < error < 1.25 * their_error
