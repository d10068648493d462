"""Gemma 4 against transformers: tiny random models, from a directory, through whole engines on both CPU backends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.client import InProcess
from quire.engine.prompt_logits import prompt_logits
from quire.engine.ranks import check_ranks
from quire.errors import BadModelFile, InvalidParams, UnsupportedModel, WeightMismatch
from quire.kernels import select_torch
from quire.weights.json_config import config_from_json
from quire.weights.loader import load_model
from tests.tools.expert_models import expected_logits
from tests.tools.gemma4_models import GEMMA4_MODELS, LENGTH, gemma4_model, save, save_gguf
from tests.tools.native import kernels_of

pytestmark = pytest.mark.cpu

TOLERANCE = 2e-4
TOKENS = torch.randint(3, 97, (40,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=GEMMA4_MODELS)
def model_files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = gemma4_model(request.param)
    return model, save(model, tmp_path_factory.mktemp("model"))


@contextmanager
def engine_of(path: Path, kernels: str, **options: Any) -> Iterator[InProcess]:
    config = EngineConfig(kernels=kernels, num_blocks=120, kv_dtype="float32", max_len=LENGTH, **options)
    with closing(InProcess(config, path)) as client:
        yield client


def logits_of(path: Path, kernels: str) -> Tensor:
    with engine_of(path, kernels) as client:
        return torch.from_numpy(np.concatenate(list(prompt_logits(client.engine, TOKENS.tolist()))))


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_logits_are_those_of_transformers(model_files: tuple[Any, Path], kernels: str) -> None:
    model, path = model_files
    expected = expected_logits(model, TOKENS)[:-1]
    assert expected.std() > 0.5
    torch.testing.assert_close(logits_of(path, kernels), expected, atol=TOLERANCE, rtol=0)


def test_answers_are_those_of_transformers(model_files: tuple[Any, Path]) -> None:
    """Greedy, several requests at once in chunks of 7, once more from the prefix cache."""
    model, path = model_files
    prompts = [TOKENS[:30].tolist(), TOKENS[:1].tolist(), TOKENS[4:23].tolist()]
    expected = [greedy(model, prompt, 5) for prompt in prompts]
    with engine_of(path, "native", max_tokens_per_step=7, max_requests=3, speculate="off") as client:
        for _ in range(2):
            params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
            requests = [Request(str(index), prompt, params, max_tokens=5) for index, prompt in enumerate(prompts)]
            for request in requests:
                client.add(request)
            while client.engine.has_work:
                client.step()
            assert [request.tokens[request.num_prompt :] for request in requests] == expected
        assert client.engine.scheduler.counters.cached_tokens > 0


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(expected_logits(model, torch.tensor(tokens))[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", ["31b", "26b-a4b", "e2b"])
def test_gguf_files(name: str, tmp_path: Path) -> None:
    model = gemma4_model(name)
    expected = expected_logits(model, TOKENS)[:-1]
    path = save_gguf(model, tmp_path / "plain.gguf")
    torch.testing.assert_close(logits_of(path, "native"), expected, atol=TOLERANCE, rtol=0)
    blocks = logits_of(save_gguf(model, tmp_path / "q8_0.gguf", quantized=True), "native")
    errors = (blocks - expected).norm(dim=1) / expected.norm(dim=1)
    assert 0 < errors[:2].max() < 0.06  # for later tokens, rounded numbers may choose another expert


def test_a_gguf_file_has_embeddings_of_all_tokens_for_each_layer(tmp_path: Path) -> None:
    path = save_gguf(gemma4_model("e2b", vocab_size_per_layer_input=96), tmp_path / "short.gguf")
    with pytest.raises(BadModelFile, match=r"per_layer_token_embd.weight has 96 rows, for a vocabulary of 97"):
        load_model(path, dtype="float32", ops=select_torch("cpu"))


def test_a_published_file(tmp_path: Path) -> None:
    """Its names of sizes, the prefix of multimodal checkpoints, and keys of layers that share, which are not read."""
    model = gemma4_model("e2b", num_global_key_value_heads=None)
    path = save(model, tmp_path)
    config = json.loads((path / "config.json").read_text())
    del config["per_layer_config"]
    text = config | {"global_head_dim": 32, "num_global_key_value_heads": None, "model_type": "gemma4_text"}
    (path / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": text}))
    tensors = {
        key.replace("model.", "model.language_model."): value
        for key, value in load_file(path / "model.safetensors").items()
    }
    tensors["model.language_model.layers.5.self_attn.k_proj.weight"] = torch.zeros(32, 64)
    tensors["model.vision_tower.patch_embedder.input_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, path / "model.safetensors")
    torch.testing.assert_close(logits_of(path, "torch"), expected_logits(model, TOKENS)[:-1], atol=TOLERANCE, rtol=0)


def test_ranks_are_refused() -> None:
    config = config_from_json(gemma4_model("31b").config.to_dict())
    with pytest.raises(InvalidParams, match="does not share Gemma 4 among ranks"):
        check_ranks(EngineConfig(tensor_parallel_size=2), config, kernels_of())


@pytest.mark.parametrize("name", ["26b-a4b", "e2b"])
def test_drafts_of_its_first_layers(name: str, tmp_path: Path) -> None:
    path = save(gemma4_model(name), tmp_path)
    if name == "e2b":
        with (
            pytest.raises(InvalidParams, match="embeddings for each layer"),
            engine_of(path, "native", speculate="self:2"),
        ):
            pass
        return
    answers = []
    for speculate in ("off", "self:2"):
        with engine_of(path, "native", speculate=speculate) as client:
            request = Request("0", TOKENS.tolist(), SamplingParams(temperature=0.0, ignore_eos=True), max_tokens=12)
            client.add(request)
            while client.engine.has_work:
                client.step()
            answers.append(request.tokens)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("26b-a4b", "model.layers.1.router.per_expert_scale", r"router.per_expert_scale \[6\]"),
        ("31b", "model.layers.2.layer_scalar", r"layers.2.layer_scalar \[1\]"),
        ("e2b", "model.layers.4.per_layer_projection.weight", r"layers.4.per_layer_projection.weight \[64, 16\]"),
    ],
)
def test_missing_tensors_are_named(name: str, tensor: str, message: str, tmp_path: Path) -> None:
    path = save(gemma4_model(name), tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors[tensor]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(WeightMismatch, match=message):
        load_model(path, dtype="float32", ops=select_torch("cpu"))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("31b", {"use_bidirectional_attention": "all"}, "causal attention only"),
        ("31b", {"attention_bias": True}, "attention_bias is set"),
        ("31b", {"per_layer_config": {"0": {"head_dim": 32}}}, "not those of full attention"),
        ("e2b", {"num_kv_shared_layers": 5}, "no layer of full attention has any"),
        ("e2b", {"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6"),
        ("e2b", {"vocab_size_per_layer_input": 96}, "vocab_size_per_layer_input is 96"),
        ("26b-a4b", {"top_k_experts": 7}, "top_k_experts is 7"),
    ],
)
def test_what_is_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = json.loads((save(gemma4_model(name), tmp_path) / "config.json").read_text())
    with pytest.raises((UnsupportedModel, BadModelFile), match=message):
        config_from_json(config | changes)
