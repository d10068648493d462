"""Configurations survive the way from one kind of file to the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire.errors import UnsupportedModel
from quire.models.config import ModelConfig, RopeScaling
from quire.models.rope import frequencies
from quire.quantize.gguf_metadata import rope_tensors, scores_of, sizes_of
from quire.quantize.hf_config import made_config, rope_fields
from quire.quantize.outputs import Rows, split_shards
from quire.text.tokenizers.tokenizer import load_tokenizer
from quire.weights.config import config_from_gguf, read_config
from quire.weights.json_config import config_from_json
from tests.tools.tiny_models import FAMILIES, gguf_architecture, tiny_config, tiny_gguf, tiny_text_gguf

pytestmark = pytest.mark.cpu


def essence(config: ModelConfig) -> ModelConfig:
    """Without what the kinds of files store in different ways."""
    rope = replace(config.rope, interleaved=False)
    return replace(config, rope=rope, norm_offset=False, attention_scale=config.scale, eos_token_ids=())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_becomes_a_config(tmp_path: Path, family: str) -> None:
    tokenizer = load_tokenizer(tiny_text_gguf(tmp_path / "text.gguf"))
    config = read_config(tiny_gguf(tmp_path / "tiny.gguf", family))
    made = config_from_json(made_config(config, tokenizer))
    assert made.norm_offset == (family == "gemma3")
    family_name = "mistral" if family == "mistral" else config.family  # a GGUF file calls it a llama with windows
    assert essence(made) == essence(replace(config, family=family_name))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_becomes_metadata(family: str) -> None:
    config = config_from_json(tiny_config(family))
    architecture = gguf_architecture(family)
    metadata = {f"{architecture}.{key}": value for key, value in sizes_of(config, architecture).items()}
    shapes = {"token_embd.weight": (config.vocab_size, config.hidden_size)}
    shapes |= {} if config.tie_embeddings else {"output.weight": (config.vocab_size, config.hidden_size)}
    shapes |= {"blk.0.attn_q.bias": (1,)} if config.attention_bias else {}
    read = config_from_gguf({"general.architecture": architecture, **metadata}, shapes)
    assert read.rope.interleaved == (architecture == "llama")
    assert essence(read) == essence(replace(config, family=architecture))


def test_llama3s_scaling_becomes_a_table() -> None:
    config = config_from_json(tiny_config("llama"))
    rope = replace(config.rope, scaling=RopeScaling("llama3", 8.0, original_max_len=64))
    (table,) = rope_tensors(rope).values()
    stored = replace(config.rope, divisors=tuple(table.data.tolist()))
    assert frequencies(stored) == pytest.approx(frequencies(rope), rel=1e-6)
    assert max(stored.divisors or ()) == 8.0
    with pytest.raises(UnsupportedModel, match="no place"):
        rope_fields(stored)


def test_rows_of_queries_and_keys_are_reordered() -> None:
    config = config_from_json(tiny_config("llama"))
    rows = Rows.between(config, interleaved=True)
    order = rows.order("model.layers.0.self_attn.q_proj.weight", 32)
    assert order is not None
    assert order[:4].tolist() == [0, 8, 1, 9]
    assert order[16:18].tolist() == [16, 24]
    assert rows.order("model.layers.0.self_attn.v_proj.weight", 32) is None
    back = Rows.between(replace(config, rope=replace(config.rope, interleaved=True)), interleaved=False)
    again = back.order("model.layers.0.self_attn.k_proj.bias", 32)
    assert again is not None
    assert order[again].tolist() == list(range(32))
    with pytest.raises(UnsupportedModel, match="8 of 16"):
        Rows.between(replace(config, rope=replace(config.rope, dim=8)), interleaved=True)


def test_earlier_merges_score_higher() -> None:
    assert scores_of(["a", "ab", "abc"], ["a b", "ab c"]) == [-1e6, 0.0, -1.0]


def test_shards_are_not_larger_than_allowed() -> None:
    placed = [(None, str(index), size) for index, size in enumerate([3, 4, 5, 9, 1])]
    shards = split_shards(placed, most=8)  # type: ignore[arg-type]
    assert [[name for _, name, _ in shard] for shard in shards] == [["0", "1"], ["2"], ["3"], ["4"]]
