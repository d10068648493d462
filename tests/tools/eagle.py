"""EAGLE heads with random weights, in the published layouts and in quire's own. `heads.py` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.models.config import ModelConfig
from quire.weights.heads import Target
from tests.tools.heads import Tensors, describe_target

KINDS = ("own", "eagle3", "eagle")


def eagle_config(kind: str, target: Target, **changes: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
    }
    if kind == "own":
        described = {"quire_head": 1, "kind": "eagle", "target": describe_target(target)}
        return described | sizes | {"tap_layers": [0, 1, 2], "num_training_steps": 3} | changes
    config = target.config
    sizes |= {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "num_hidden_layers": 1}
    if kind == "eagle3":
        sizes |= {"draft_vocab_size": 60, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    return sizes | changes


def eagle_tensors(
    kind: str, config: Mapping[str, Any], model: ModelConfig, seed: int = 0, num_ids: int = 60
) -> Tensors:
    rng = np.random.default_rng(seed)
    size, inner, dim = model.hidden_size, config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def matrix(rows: int, cols: int) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)

    def norm() -> NDArray[np.float32]:
        return (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    layer, width = ("layers.0", size) if kind == "eagle" else ("midlayer", 2 * size)
    tensors: Tensors = {
        "fc.weight": matrix(size, 2 * size if kind == "eagle" else 3 * size),
        f"{layer}.self_attn.q_proj.weight": matrix(heads * dim, width),
        f"{layer}.self_attn.k_proj.weight": matrix(kv_heads * dim, width),
        f"{layer}.self_attn.v_proj.weight": matrix(kv_heads * dim, width),
        f"{layer}.self_attn.o_proj.weight": matrix(size, heads * dim),
        f"{layer}.post_attention_layernorm.weight": norm(),
        f"{layer}.mlp.gate_proj.weight": matrix(inner, size),
        f"{layer}.mlp.up_proj.weight": matrix(inner, size),
        f"{layer}.mlp.down_proj.weight": matrix(size, inner),
    }
    ids = np.sort(rng.permutation(model.vocab_size)[:num_ids]).astype(np.int64)
    if kind == "eagle":
        tensors["fc.weight"] *= 5  # so that some tokens are likely
        return tensors | {"fc.bias": 0.1 * norm()}
    tensors |= {
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "norm.weight": 6 * norm(),  # so that some tokens are likely
    }
    if kind == "own":
        return tensors | {"draft_ids": ids}
    is_drafted = np.zeros(model.vocab_size, np.bool_)
    is_drafted[ids] = True
    return tensors | {"lm_head.weight": matrix(num_ids, size), "d2t": ids - np.arange(num_ids), "t2d": is_drafted}


def mtp_tensors(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """Those of a model's own layer for multi-token prediction."""
    rng = np.random.default_rng(seed)
    size, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    widths = {
        "q": config["num_attention_heads"] * dim,
        "k": config["num_key_value_heads"] * dim,
        "v": config["num_key_value_heads"] * dim,
    }

    def matrix(rows: int, cols: int) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)

    tensors: Tensors = {
        "input_proj.weight": matrix(size, 2 * size),
        "self_attn.o_proj.weight": matrix(size, widths["q"]),
    }
    for name in ("token", "hidden", "input", "post_attention", "final"):
        tensors[f"{name}_layernorm.weight"] = (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)
    for letter, width in widths.items():
        tensors[f"self_attn.{letter}_proj.weight"] = matrix(width, size)
        tensors[f"self_attn.{letter}_proj.bias"] = 0.1 * matrix(width, 1)[:, 0]
    for part, shape in (("gate", (inner, size)), ("up", (inner, size)), ("down", (size, inner))):
        tensors[f"mlp.{part}_proj.weight"] = matrix(*shape)
    tensors["final_layernorm.weight"] *= 6  # so that some tokens are likely
    return {f"model.mtp_layers.0.{name}": each for name, each in tensors.items()}
