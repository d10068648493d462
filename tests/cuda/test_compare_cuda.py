"""`quire compare` on a GPU: the same numbers as on a CPU, and none between a model and itself."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.cuda.gpu import DEVICE, SMALL_MODEL  # skips this module where there is no GPU

from quire.bench.compare import compare_models  # isort: skip
from quire.config import EngineConfig

pytestmark = pytest.mark.cuda

TEXT = "hello world, hello 12 worlds; the quick brown fox says hello again and again. " * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with random weights and a tokenizer of single bytes."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(SMALL_MODEL))
    save_file(draw_weights(), path / "model.safetensors")
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return str(path)


def draw_weights() -> dict[str, torch.Tensor]:
    generator, size, inner = (
        torch.Generator().manual_seed(0),
        SMALL_MODEL["hidden_size"],
        SMALL_MODEL["intermediate_size"],
    )
    kv = SMALL_MODEL["num_key_value_heads"] * SMALL_MODEL["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (SMALL_MODEL["vocab_size"], size), "lm_head": (SMALL_MODEL["vocab_size"], size),
        "model.norm": (size,),
    }  # fmt: skip
    for index in range(SMALL_MODEL["num_hidden_layers"]):
        of_layer = {
            "self_attn.q_proj": (size, size), "self_attn.k_proj": (kv, size), "self_attn.v_proj": (kv, size),
            "self_attn.o_proj": (size, size), "mlp.gate_proj": (inner, size), "mlp.up_proj": (inner, size),
            "mlp.down_proj": (size, inner), "input_layernorm": (size,), "post_attention_layernorm": (size,),
        }  # fmt: skip
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in of_layer.items()}
    return {
        f"{name}.weight": torch.ones(shape) if len(shape) == 1 else 0.05 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def test_a_model_does_not_differ_from_itself(model: str) -> None:
    config = EngineConfig(model=model, device=DEVICE.type)
    found = compare_models(config, config, TEXT, window=100)
    assert (found.kl.mean, found.kl_max, found.top1_agreement.mean) == (0.0, 0.0, 1.0)


def test_in_float32_it_is_near_the_cpu(model: str) -> None:
    on_gpu = EngineConfig(model=model, device=DEVICE.type, dtype="float32")
    on_cpu = EngineConfig(model=model, device="cpu", kernels="torch", kv_dtype="float32")
    found = compare_models(on_cpu, on_gpu, TEXT, window=100)
    rounded = compare_models(on_cpu, EngineConfig(model=model, device=DEVICE.type, dtype="bfloat16"), TEXT, window=100)
    assert found.kl_max < 1e-5
    assert found.kl.mean < rounded.kl.mean < 1e-2
