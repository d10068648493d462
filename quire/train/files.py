"""Writes a trained head as a directory that `--speculate KIND:DIR` loads (`weights/heads.py`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from quire.errors import ModelError
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder
from quire.train.settings import write_atomically
from quire.weights.heads import target_digest


def describe_head(kind: str, model: Decoder, config: ModelConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    target = {
        "digest": target_digest(model),
        "family": config.family,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "vocab_size": config.vocab_size,
    }
    return {"quire_head": 1, "kind": kind, "target": target, **fields}


def write_tensors(directory: Path, parameters: Mapping[str, Tensor], draft_ids: Tensor) -> None:
    tensors = {name: value.detach().to("cpu", torch.float16).contiguous() for name, value in parameters.items()}
    if bad := [name for name, value in tensors.items() if not value.isfinite().all()]:
        raise ModelError(f"{bad[0]} of the head has values that float16 cannot hold. Train with another seed.")
    write_atomically(directory / "model.safetensors", save({**tensors, "draft_ids": draft_ids.cpu()}))


def write_config(directory: Path, described: Mapping[str, Any]) -> None:
    write_atomically(directory / "config.json", json.dumps(described, indent=1) + "\n")
