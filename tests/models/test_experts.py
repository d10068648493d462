"""Families with experts against transformers: tiny random models in a Hugging Face directory and in a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels import select_torch
from quire.quant.ggml_types import GGMLType
from quire.weights.loader import LoadedModel, load_model
from tests.models.pair import draw_tokens, run
from tests.tools.tiny_experts import EXPERT_MODELS, GGUF, expected_logits, save, save_gguf, transformers_model

pytestmark = pytest.mark.cpu

TOKENS = draw_tokens(33)
TOLERANCE = 2e-4
SCHEDULES = {
    "one chunk": [[(0, 33)]],
    "chunks": [[(0, 9)], [(0, 1)], [(0, 16)], [(0, 1)], [(0, 6)]],
    "mixed rows": [[(0, 8), (1, 1)], [(1, 12), (0, 1)], [(0, 1), (1, 1)], [(1, 19), (0, 20)], [(0, 3)]],
}


def logits_of(loaded: LoadedModel, schedule: str = "chunks") -> Tensor:
    steps = SCHEDULES[schedule]
    tokens = dict.fromkeys({sequence for rows in steps for sequence, _ in rows}, TOKENS)
    with torch.inference_mode():
        logits = run(loaded.model, loaded.config, tokens, steps)
    return torch.cat([logits[sequence] for sequence in sorted(logits)])


def load(path: Path) -> LoadedModel:
    return load_model(path, dtype="float32", ops=select_torch("cpu"))


@pytest.fixture(scope="module", params=EXPERT_MODELS)
def family(request: pytest.FixtureRequest) -> tuple[str, Any, Tensor]:
    model = transformers_model(request.param)
    return request.param, model, expected_logits(model, TOKENS)


def test_safetensors_give_the_logits_of_transformers(family: tuple[str, Any, Tensor], tmp_path: Path) -> None:
    _, model, expected = family
    loaded = load(save(model, tmp_path))
    assert loaded.unused == ()
    for schedule in SCHEDULES:
        logits = logits_of(loaded, schedule)
        for part in logits.split(len(TOKENS)):
            torch.testing.assert_close(part, expected, atol=TOLERANCE, rtol=0)


def test_gguf_gives_the_logits_of_transformers(family: tuple[str, Any, Tensor], tmp_path: Path) -> None:
    name, model, expected = family
    if name not in GGUF:
        assert name in ("dense layers", "deepseek_v2 groups", "tight gpt_oss")  # llama.cpp does not have these
        return
    logits = logits_of(load(save_gguf(model, name, tmp_path / "model.gguf")))
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_quantized_blocks_stay_packed(tmp_path: Path) -> None:
    path = save_gguf(transformers_model("mixtral"), "mixtral", tmp_path / "model.gguf", GGMLType.Q8_0)
    packed = load_model(path, dtype="float32", ops=select_torch("cpu"), packed=True)
    plain = load(path)
    assert packed.weight_bytes < 0.4 * plain.weight_bytes
    torch.testing.assert_close(logits_of(packed), logits_of(plain), atol=TOLERANCE, rtol=0)
