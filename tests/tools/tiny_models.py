"""Tiny random models of every family, written as a Hugging Face directory or as a GGUF file.

Both come from the same weights, so what is loaded from either must answer alike. GGUF names are taken from the gguf
package and not from quire, which they are there to check.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from quire.kernels import Kernels, select_torch
from quire.models.registry import MODELS
from quire.quant.dense import Dense
from quire.quant.ggml_types import GGMLType
from quire.weights.json_config import config_from_json
from quire.weights.random_tensors import RandomTensors
from quire.weights.survey import Survey
from tests.text.vocabularies import byte_level
from tests.tools.gguf_writer import tensor, write_gguf

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True, "rope_theta": 10000.0},
    "mistral": {"model_type": "mistral", "sliding_window": 8, "rope_theta": 10000.0},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "rope_theta": 1000000.0},
    "mimo": {"model_type": "mimo", "num_nextn_predict_layers": 1, "rope_theta": 640000.0},
    "qwen3": {"model_type": "qwen3", "rope_theta": 1000000.0},
    "gemma3": {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "num_hidden_layers": 7,
    },
}


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """A `config.json`."""
    return COMMON | SPECIAL[family] | changes


def tiny_weights(family: str, seed: int = 0, **changes: Any) -> dict[str, torch.Tensor]:
    """Every tensor of the model by its canonical name."""
    config, survey = config_from_json(tiny_config(family, **changes)), Survey()
    MODELS[config.family](config, survey, cpu_ops())
    source = RandomTensors(seed, torch.float32, "cpu")
    weights = {}
    for part, cols in survey.declared:
        if cols is None:
            weights[part.name] = source.vector([part]) - (1.0 if config.norm_offset else 0.0)
        else:
            matrix = source.matrix([part], cols)
            assert isinstance(matrix, Dense)
            weights[part.name] = matrix.data
    return weights


def cpu_ops() -> Kernels:
    return select_torch("cpu")


def write_directory(directory: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], shards: int = 1) -> Path:
    """A Hugging Face directory; with more than one shard, tensors are dealt out in turn and an index is written."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, directory / "model.safetensors")
        return directory
    files = [f"model-{index + 1:05}-of-{shards:05}.safetensors" for index in range(shards)]
    placed = {name: files[index % shards] for index, name in enumerate(weights)}
    for file in files:
        save_file({name: weights[name] for name in weights if placed[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return directory


def tiny_directory(directory: Path, family: str = "llama", shards: int = 1) -> Path:
    return write_directory(directory, tiny_config(family), tiny_weights(family), shards)


def gguf_architecture(family: str) -> str:
    return "llama" if family == "mistral" else family


def gguf_metadata(family: str, **changes: Any) -> dict[str, Any]:
    config, architecture = tiny_config(family, **changes), gguf_architecture(family)
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    }
    if "sliding_window" in config:
        keys["attention.sliding_window"] = config["sliding_window"]
    named = {f"{architecture}.{key}": value for key, value in keys.items()}
    return {"general.architecture": architecture, **named, "tokenizer.ggml.eos_token_id": 2}


def gguf_arrays(family: str, weights: dict[str, torch.Tensor], **changes: Any) -> dict[str, np.ndarray]:
    """The tensors as converters store them: renamed, llama's queries and keys permuted, gemma's norms plus one."""
    config, architecture = tiny_config(family, **changes), gguf_architecture(family)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config["num_hidden_layers"])
    arrays = {}
    for name, weight in weights.items():
        array = weight.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            array = interleave(array, config["head_dim"])
        if family == "gemma3" and "norm" in name:
            array = array + 1
        arrays[names.get_name(name, try_suffixes=(".weight", ".bias"))] = array
    return arrays


def interleave(array: np.ndarray, head_dim: int) -> np.ndarray:
    """Dimensions i and i + head_dim / 2 of each head become neighbours."""
    split = array.reshape(-1, 2, head_dim // 2, array.shape[-1])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(array.shape)


def tiny_gguf(path: Path, family: str = "llama", kind: GGMLType = GGMLType.F32) -> Path:
    """A GGUF file whose matrices are of that type."""
    arrays = gguf_arrays(family, tiny_weights(family))
    tensors = {name: tensor(array, kind if array.ndim == 2 else GGMLType.F32) for name, array in arrays.items()}
    return write_gguf(path, gguf_metadata(family), tensors)


def tiny_text_gguf(
    path: Path, num_padded: int = 7, embedding_scale: float = 0.05, changes: dict[str, Any] | None = None, **more: Any
) -> Path:
    """A model that reads and writes text. Its vocabulary is padded beyond the tokenizer's; `changes` are those of its
    configuration, `more` is metadata."""
    changes = changes or {}
    arrays = gguf_arrays("llama", tiny_weights("llama", **changes), **changes)
    vocabulary = byte_level()
    vocab_size = len(vocabulary["tokenizer.ggml.tokens"]) + num_padded
    embedding = np.random.default_rng(0).normal(scale=embedding_scale, size=(vocab_size, COMMON["hidden_size"]))
    arrays["token_embd.weight"] = embedding.astype(np.float32)
    types = {"tokenizer.ggml.token_type": np.array(vocabulary["tokenizer.ggml.token_type"], np.int32)}
    metadata = {**gguf_metadata("llama", **changes), **vocabulary, **types, **more}
    return write_gguf(path, metadata, {name: tensor(array) for name, array in arrays.items()})
