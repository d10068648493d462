"""Whole models of every method: torch and the C++ kernels hold the values that were packed, and answer alike."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.client import start_engine
from quire.kernels import select_native
from quire.weights.loader import load_model
from tests.tools.native import NativePagedCache, RecordedOnTensors, native_of, ops_of
from tests.tools.paged import PagedCache
from tests.tools.tiny_models import cpu_ops, tiny_config, tiny_weights, write_directory
from tests.weights.schemes.packed import GROUP, METHODS, float8, int8, quantized_model

pytestmark = pytest.mark.cpu

each_method = pytest.mark.parametrize("method", METHODS)


def matrices(model: Any) -> list[Any]:
    layers = [
        [layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down] for layer in model.layers
    ]
    return [linear.weight for layer in layers for linear in layer]


def load(path: Path, *, native: bool = False, packed: bool = False) -> Any:
    ops = select_native(native_of()) if native else cpu_ops()
    return load_model(path, dtype="float32", ops=ops, packed=packed)


@each_method
def test_every_backend_has_the_values(method: str, tmp_path: Path) -> None:
    quantized, plain = quantized_model(tmp_path, method)
    expected = [np.asarray(weight.dense()) for weight in matrices(load(plain).model)]
    for options in ({}, {"packed": True}, {"native": True}):
        loaded = load(quantized, **options)
        for weight, values in zip(matrices(loaded.model), expected, strict=True):
            assert np.array_equal(np.asarray(weight.dense()), values)


@pytest.mark.parametrize("method", ["gptq 4 sym", "awq", "fp8 block"])
def test_codes_are_not_unpacked(method: str, tmp_path: Path) -> None:
    """Against float32. Scales of such small groups take a fifth of a byte a code, and norms stay plain."""
    quantized, plain = quantized_model(tmp_path, method)
    dense = sum(weight.nbytes for weight in matrices(load(plain).model))
    for options in ({"packed": True}, {"native": True}):
        held = sum(weight.nbytes for weight in matrices(load(quantized, **options).model))
        assert held < dense * (0.3 if "fp8" in method else 0.2)


def test_fused_parts_of_different_kinds_stay_apart(tmp_path: Path) -> None:
    quantized, plain = quantized_model(tmp_path, "gptq 4 order", plain=("k_proj", "up_proj"))
    for options in ({}, {"packed": True}, {"native": True}):
        for weight, other in zip(matrices(load(quantized, **options).model), matrices(load(plain).model), strict=True):
            assert np.array_equal(np.asarray(weight.dense()), np.asarray(other.dense()))


def logits(model: Any, ops: Any, cache_type: Any) -> Any:
    """Of a prompt of 24 tokens and of one of 1."""
    config, steps = model.config, [(0, 24), (1, 1)]
    options = {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim, "num_blocks": 64}
    options |= {"groups": [0] * config.num_layers, "windows": [None]}
    cache = cache_type(**options)
    paging, positions = cache.step(steps), cache.positions(steps)
    tokens = (7 * positions + 3) % config.vocab_size
    if cache_type is PagedCache:
        return model.model.head(model.model(tokens, positions, paging, cache.layers))
    hidden = RecordedOnTensors(ops, model.model, cache, 64)(tokens, positions, paging, cache.layers)
    return torch.from_numpy(model.model.head(hidden.numpy()))


@each_method
def test_logits_agree_up_to_the_rounding_of_activations(method: str, tmp_path: Path) -> None:
    """fp8 is multiplied in float32, so only sums differ. Others round activations to 1/254 of a block's largest."""
    quantized, _ = quantized_model(tmp_path, method)
    ops = select_native(native_of())
    expected = logits(load(quantized), None, PagedCache)
    found = logits(load(quantized, native=True), ops, partial(NativePagedCache, ops_of(), "float32"))
    limit = 1e-4 if "fp8" in method or method in ("modelopt", "squeezellm") else 0.04
    assert (found - expected).norm() < limit * expected.norm()


def answer(path: Path, **options: Any) -> list[list[int]]:
    engine = start_engine(EngineConfig(**({"num_blocks": 64} | options)), path)
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    prompts = [[3, 14, 15, 92, 65], [35, 8], list(range(40))]
    requests = [Request(str(number), prompt, params, max_tokens=10) for number, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return [request.tokens[request.num_prompt :] for request in requests]


@pytest.mark.parametrize("method", ["gptq 4 order", "gptq 3", "awq", "fp8 block", "w8a8"])
def test_engines_answer_alike_in_any_batch_and_chunks(method: str, tmp_path: Path) -> None:
    quantized, _ = quantized_model(tmp_path, method)
    expected = answer(quantized, kernels="native")
    for options in ({"threads": 1}, {"max_requests": 1}, {"max_tokens_per_step": 16}, {"num_blocks": 10}):
        assert answer(quantized, kernels="native", **options) == expected, options
    assert all(len(tokens) == 10 for tokens in answer(quantized, kernels="torch"))


@pytest.mark.parametrize(
    ("kernels", "kind", "why"),
    [
        ("native", "int8", "this cache has a scale for each token and head"),
        ("native", "fp8", "this cache has a scale for each token and head"),
        ("native", "bfloat16", "a bfloat16 cache needs none"),
        ("torch", "float32", "a float32 cache needs none"),
    ],
)
def test_scales_of_keys_and_values_are_said_to_be_unused(tmp_path: Path, kernels: str, kind: str, why: str) -> None:
    path, _ = quantized_model(tmp_path, "fp8 tensor")
    config: dict[str, Any] = {"kernels": kernels, "kv_dtype": kind, "num_blocks": 64}
    assert "scales of keys" not in start_engine(EngineConfig(**config), path).info.summary
    tensors = load_file(path / "model.safetensors")
    for layer in range(2):
        tensors |= {f"model.layers.{layer}.self_attn.{each}_scale": torch.tensor(0.1) for each in "kv"}
    save_file(tensors, path / "model.safetensors")
    summary = start_engine(EngineConfig(**config), path).info.summary
    assert summary.endswith(f"; the file's 4 scales of keys and values are not used: {why}")


def test_a_gated_product_in_float8_before_one_in_int8(tmp_path: Path) -> None:
    """Products with float8 panels write floats only, so the next product rounds its inputs itself."""
    rng, stored, dense = np.random.default_rng(0), {}, {}
    for name, weight in tiny_weights("llama").items():
        tensors, values = {name: weight}, weight.numpy()
        if "gate_proj" in name or "up_proj" in name:
            tensors, values = float8(name.removesuffix(".weight"), weight.numpy(), rng, kind="channel")
        elif "down_proj" in name:
            tensors, values = int8(name.removesuffix(".weight"), weight.numpy(), rng)
        stored |= tensors
        dense[name] = torch.from_numpy(np.ascontiguousarray(values))
    floats = {"targets": ["re:.*(gate|up)_proj"], "format": "float-quantized", "weights": {**GROUP, "type": "float"}}
    integers = {"targets": ["re:.*down_proj"], "format": "int-quantized", "weights": GROUP}
    section = {"quant_method": "compressed-tensors", "config_groups": {"a": floats, "b": integers}}
    config = tiny_config("llama")
    quantized = write_directory(tmp_path / "quantized", config | {"quantization_config": section}, stored)
    expected = logits(load(write_directory(tmp_path / "plain", config, dense)), None, PagedCache)
    ops = select_native(native_of())
    found = logits(load(quantized, native=True), ops, partial(NativePagedCache, ops_of(), "float32"))
    assert (found - expected).norm() < 0.04 * expected.norm()
