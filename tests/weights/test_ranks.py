"""Ranks read their rows of files in every format, and answer as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.kernels import Kernels
from quire.quant.ggml_types import GGMLType
from quire.weights.loader import load_model
from tests.tools.family_cases import save
from tests.tools.native import ISAS, kernels_of
from tests.tools.ranks import ThreadRanks
from tests.tools.tiny import TinyEngine
from tests.tools.tiny_models import tiny_gguf
from tests.weights.schemes.packed import METHODS, quantized_model

pytestmark = pytest.mark.cpu

FAMILIES = ["bloom", "falcon-40b", "gpt2", "gpt_bigcode", "gpt_neox", "mpt", "opt", "phi3", "olmo2", "gptj"]
KINDS = (GGMLType.Q8_0, GGMLType.Q4_1, GGMLType.F16)


def check(path: Path, size: int) -> None:
    ops = kernels_of(ISAS[0])
    loaded = load_model(path, dtype="float32", ops=ops)
    expected = TinyEngine(loaded.config, model=loaded.model, ops=ops).answer(requests())

    def load_share(ops: Kernels) -> Any:
        return load_model(path, dtype="float32", ops=ops).model

    with ThreadRanks(loaded.config, size, load_share, isa=ISAS[0]) as engine:
        assert engine.answer(requests()) == expected


def requests() -> list[Request]:
    params = SamplingParams(temperature=1.0, max_tokens=None)
    prompts = [[3, 14, 15, 92, 65], [35, 8], list(range(24))]
    return [Request(str(n), prompt, params, seed=n, max_tokens=6) for n, prompt in enumerate(prompts)]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_read_by_rank(method: str, tmp_path: Path) -> None:
    check(quantized_model(tmp_path, method)[0], 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_of_a_directory_is_read_by_rank(family: str, tmp_path: Path) -> None:
    """Fused, grouped and transposed matrices."""
    check(save(family, tmp_path), 3)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_gguf_file_are_read_by_rank(kind: GGMLType, tmp_path: Path) -> None:
    check(tiny_gguf(tmp_path / "model.gguf", "llama", kind), 3)
