"""What CUDA tests share. Importing it skips the importing module where there is no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("this machine has no NVIDIA GPU", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from quire.config import EngineConfig
from quire.engine.client import InProcess

DEVICE = torch.device("cuda")
SMALL_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2000,
    "max_position_embeddings": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "hidden_act": "silu", "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def assert_near(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """By the norm of the difference, and no NaN anywhere."""
    assert got.shape == expected.shape
    assert got.isfinite().all()
    error = (got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    assert error < TOLERANCES[dtype], float(error)


def start(path: Path, shapes: dict[str, Any] | None = None, **options: Any) -> InProcess:
    """An engine with random weights in a small model's shapes, described in the folder `path`: it needs no file."""
    (path / "config.json").write_text(json.dumps(SMALL_MODEL | (shapes or {})))
    return InProcess(EngineConfig(model="small", device=DEVICE.type, weights="random", **options), path)
