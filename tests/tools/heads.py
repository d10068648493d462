"""Draft heads with random weights, written as directories, and engines that draft with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from quire.engine.draft_heads import LoadedHead, build_heads, find_tap_layers, head_specs
from quire.engine.eagle import EagleProposer
from quire.engine.engine import Engine
from quire.engine.heads import RequestFeatures
from quire.kernels import Kernels
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder
from quire.speculative.controller import Controller
from quire.speculative.proposer import ModelProposer, Proposer
from quire.speculative.step_times import EqualTimes
from quire.weights.heads import Target, target_digest
from tests.tools.tiny import TinyEngine

Tensors = dict[str, NDArray[Any]]


def describe_target(target: Target) -> dict[str, Any]:
    config = target.config
    return {
        "digest": target_digest(target.model),
        "family": config.family,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "vocab_size": config.vocab_size,
    }


def block_config(target: Target, **changes: Any) -> dict[str, Any]:
    return {
        "quire_head": 1,
        "kind": "block",
        "target": describe_target(target),
        "tap_layers": [0, 1],
        "kv_layers": [1, 2],
        "depth": 4,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-5,
        "bigram_rank": 8,
    } | changes


def block_tensors(config: Mapping[str, Any], model: ModelConfig, num_ids: int = 60, seed: int = 0) -> Tensors:
    rng = np.random.default_rng(seed)
    size, inner = model.hidden_size, config["intermediate_size"]
    width, rank = model.num_heads * model.head_dim, config["bigram_rank"]

    def matrix(rows: int, cols: int) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)

    def norm() -> NDArray[np.float32]:
        return (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    tensors: Tensors = {f"norms.{index}.weight": norm() for index in range(4)}
    tensors |= {"in_proj.weight": matrix(size, 4 * size), "slots.weight": matrix(config["depth"], size) * 4}
    for layer in range(len(config["kv_layers"])):
        name = f"layers.{layer}"
        tensors |= {
            f"{name}.input_layernorm.weight": norm(),
            f"{name}.self_attn.q_proj.weight": matrix(width, size),
            f"{name}.self_attn.o_proj.weight": matrix(size, width),
            f"{name}.post_attention_layernorm.weight": norm(),
            f"{name}.mlp.gate_proj.weight": matrix(inner, size),
            f"{name}.mlp.up_proj.weight": matrix(inner, size),
            f"{name}.mlp.down_proj.weight": matrix(size, inner),
        }
    tensors["norm.weight"] = 6 * norm()  # so that some tokens are likely
    tensors["draft_ids"] = np.sort(rng.permutation(model.vocab_size)[:num_ids]).astype(np.int64)
    if rank:
        tensors |= {"bigram_in.weight": matrix(num_ids, rank), "bigram_out.weight": matrix(num_ids, rank)}
    return tensors


def medusa_config(target: Target, **changes: Any) -> dict[str, Any]:
    """Without `quire_head` it is in the published layout."""
    return {"medusa_num_heads": 3, "medusa_num_layers": 2} | changes


def medusa_tensors(config: Mapping[str, Any], model: ModelConfig, num_ids: int | None = None, seed: int = 0) -> Tensors:
    """With `num_ids` the heads share rows of the target's head."""
    rng = np.random.default_rng(seed)
    size, tensors = model.hidden_size, Tensors()
    for head in range(config["medusa_num_heads"]):
        for layer in range(config["medusa_num_layers"]):
            tensors[f"{head}.{layer}.linear.weight"] = rng.standard_normal((size, size)).astype(np.float32) / 4
            tensors[f"{head}.{layer}.linear.bias"] = rng.standard_normal(size).astype(np.float32) / 4
        if num_ids is None:
            output = rng.standard_normal((model.vocab_size, size)) / np.sqrt(size)
            tensors[f"{head}.{config['medusa_num_layers']}.weight"] = output.astype(np.float32)
    if num_ids is not None:
        tensors["draft_ids"] = rng.permutation(model.vocab_size)[:num_ids].astype(np.int64)
    return tensors


def write_head(directory: Path, config: Mapping[str, Any], tensors: Tensors, name: str = "model.safetensors") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / name)
    return directory


def build_engine(
    config: ModelConfig,
    model: Decoder,
    ops: Kernels,
    heads: Mapping[str, LoadedHead],
    proposers: list[Proposer] | None = None,
    **settings: Any,
) -> tuple[Engine, list[ModelProposer]]:
    """An engine that asks the heads before each step, and verifies all that they propose."""
    max_requests, max_tokens = settings.pop("max_requests", 8), settings.pop("max_tokens", 96)
    features = RequestFeatures(max_requests)
    tiny = TinyEngine(
        config, model=model, ops=ops, max_requests=max_requests, max_tokens=max_tokens,
        tap_layers=find_tap_layers(heads), listeners=[features], more_specs=head_specs(heads), **settings,
    )  # fmt: skip
    models = build_heads(
        heads, model, tiny.layers, tiny.more_layers, features, tiny.scheduler, ops, config.max_len, max_requests
    )
    tiny.runner.listeners += [model for model in models if isinstance(model, EagleProposer)]
    controller = Controller(proposers or [], max_tokens, config.vocab_size, 12.0, models)
    controller.times, controller._clock = EqualTimes(12.0), lambda: 0.0
    return Engine(tiny.scheduler, tiny.runner, None, controller), models  # type: ignore[arg-type]
