"""Engines on random weights: what a configuration says is enough, whoever's ops compute."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.client import InProcess
from quire.errors import InvalidParams
from quire.kernels.cpu.native import Missing, load

needs_native = pytest.mark.skipif(isinstance(load(), Missing), reason="the C++ kernels were not built")
pytestmark = pytest.mark.cpu

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 200,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
    "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip


def start(path: Path, **options: str) -> InProcess:
    (path / "config.json").write_text(json.dumps(MODEL))
    return InProcess(EngineConfig(model="m", device="cpu", weights="random", kv_memory=0.01, **options), path)


def answer(client: InProcess) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    client.add(Request("a", [5, 6, 7], params, max_tokens=5))
    tokens: list[int] = []
    while client.engine.has_work:
        for update in client.step():
            assert update.finish is None or update.finish.value == "length", update
            tokens += update.tokens
    return tokens


@needs_native
def test_our_own_kernels_and_torch_s_say_the_same(tmp_path):
    own = answer(start(tmp_path, kernels="native"))
    assert len(own) == 5
    assert own == answer(start(tmp_path, kernels="torch"))


@needs_native
def test_rounding_is_heeded(tmp_path):
    plain, rounded = start(tmp_path, kernels="native"), start(tmp_path, kernels="native", quantize="int4")
    assert rounded.info.weight_bytes < plain.info.weight_bytes / 3
    assert len(answer(rounded)) == 5


def test_rounding_that_cannot_be_heeded_is_refused(tmp_path):
    with pytest.raises(InvalidParams, match="quantize is 'int8'"):
        start(tmp_path, kernels="torch", quantize="int8")


@pytest.mark.model
def test_the_shapes_of_a_file(default_model):
    config = EngineConfig(model="m", device="cpu", weights="random", kernels="torch", kv_memory=0.01, max_len=64)
    assert len(answer(InProcess(config, default_model))) == 5
