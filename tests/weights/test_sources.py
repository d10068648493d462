"""The sources of weights that are no files: what a survey notes, and that random weights repeat themselves."""

import pytest
import torch

from quire.errors import WeightMismatch
from quire.layers.source import Part
from quire.weights.names import gguf_name, may_stay_unread, text_name
from quire.weights.random_tensors import RandomTensors
from quire.weights.survey import Survey, check

pytestmark = pytest.mark.cpu

CPU = "cpu"


def random_weights(seed=0, dtype=torch.float32):
    return RandomTensors(seed, dtype, CPU)


def test_random_weights_depend_on_seed_and_name_only():
    one, other = random_weights(), random_weights()
    other.vector([Part("x.weight", 5)])
    assert torch.equal(one.matrix([Part("a", 8)], 32).dense(), other.matrix([Part("a", 8)], 32).dense())
    assert not torch.equal(one.matrix([Part("a", 8)], 32).dense(), one.matrix([Part("b", 8)], 32).dense())
    assert not torch.equal(one.matrix([Part("a", 8)], 32).dense(), random_weights(1).matrix([Part("a", 8)], 32).dense())


def test_fused_random_weights_are_the_separate_ones():
    source = random_weights()
    fused = source.matrix([Part("a", 8), Part("b", 4)], 32).dense()
    assert torch.equal(fused[:8], source.matrix([Part("a", 8)], 32).dense())
    assert torch.equal(fused[8:], source.matrix([Part("b", 4)], 32).dense())
    ends = source.vector([Part("a.bias", 8), Part("b.bias", 4)])
    assert torch.equal(ends[8:], source.vector([Part("b.bias", 4)]))


def test_random_weights_are_scaled():
    source = random_weights()
    assert source.matrix([Part("a", 500)], 400).dense().std().item() == pytest.approx(400**-0.5, rel=0.02)
    assert source.vector([Part("norm.weight", 4000)]).mean().item() == pytest.approx(1.0, abs=0.01)
    assert source.vector([Part("q_proj.bias", 4000)]).mean().item() == pytest.approx(0.0, abs=0.01)
    assert random_weights(dtype=torch.bfloat16).matrix([Part("a", 2)], 4).data.dtype == torch.bfloat16


def test_a_survey_notes_every_part_and_holds_nothing():
    survey = Survey()
    weight, vector = survey.matrix([Part("q", 8), Part("k", 2)], 16), survey.vector([Part("b", 3)])
    assert survey.declared == [(Part("q", 8), 16), (Part("k", 2), 16), (Part("b", 3), None)]
    assert weight.shape == (10, 16)
    assert vector is None


def test_check_accepts_what_fits():
    check({"a": (1, 2)}, {"a": (1, 2), "ignored": (3,)}, {"ignored"})


def test_check_names_five_and_counts_the_rest():
    expected = {f"t{index}": (index,) for index in range(7)}
    with pytest.raises(
        WeightMismatch, match=r"7 missing \(t0 \[0\], t1 \[1\], t2 \[2\], t3 \[3\], t4 \[4\] and 2 more\)"
    ):
        check(expected, {})


@pytest.mark.parametrize(
    ("family", "name", "expected"),
    [
        ("llama", "model.embed_tokens.weight", "token_embd.weight"),
        ("llama", "model.norm.weight", "output_norm.weight"),
        ("llama", "lm_head.weight", "output.weight"),
        ("llama", "model.layers.12.self_attn.q_proj.bias", "blk.12.attn_q.bias"),
        ("llama", "model.layers.3.post_attention_layernorm.weight", "blk.3.ffn_norm.weight"),
        ("gemma3", "model.layers.3.post_attention_layernorm.weight", "blk.3.post_attention_norm.weight"),
        ("gemma3", "model.layers.3.pre_feedforward_layernorm.weight", "blk.3.ffn_norm.weight"),
        ("gemma3", "model.layers.3.post_feedforward_layernorm.weight", "blk.3.post_ffw_norm.weight"),
        ("llama", "something.else", "something.else"),
    ],
)
def test_gguf_names(family, name, expected):
    assert gguf_name(name, family) == expected


def test_text_names():
    assert text_name("language_model.model.norm.weight") == "model.norm.weight"
    assert text_name("model.language_model.norm.weight") == "model.norm.weight"
    assert text_name("language_model.lm_head.weight") == "lm_head.weight"
    assert text_name("model.norm.weight") == "model.norm.weight"


def test_what_may_stay_unread():
    assert may_stay_unread("lm_head.weight", tied=True)
    assert not may_stay_unread("lm_head.weight", tied=False)
    assert may_stay_unread("rope_freqs.weight", tied=False)
    assert may_stay_unread("model.layers.4.self_attn.rotary_emb.inv_freq", tied=False)
    assert may_stay_unread("model.vision_tower.encoder.weight", tied=False)
    assert not may_stay_unread("model.norm.weight", tied=True)
