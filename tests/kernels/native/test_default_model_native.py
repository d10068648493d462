"""The default model on the C++ kernels: logits bit for bit alone, in a batch, in chunks and on any threads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.client import start_engine
from tests.tools.scores import Scores

pytest.importorskip("quire.kernels.cpu._native", reason="the C++ kernels are not built")

pytestmark = pytest.mark.model

PROMPTS = [[1, 319, 907, 4420, 88, 12, 7], [9, 9, 8], list(range(20, 150)), [*range(20, 84), 5, 6]]


def run_engine(engine: Any, prompts: Sequence[Sequence[int]], length: int = 4) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=length)
    requests = [Request(str(len(p)), p, params, max_tokens=length) for p in prompts]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return [request.tokens[request.num_prompt :] for request in requests]


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_the_default_model_bit_for_bit(default_model: Path, kind: str, scores: list[Scores]) -> None:
    options = {"kernels": "native", "kv_dtype": kind, "kv_memory": 0.2, "max_len": 512, "speculate": "off"}
    engine = start_engine(EngineConfig(**options, prefix_cache=False, threads=1), default_model)
    expected = [run_engine(engine, [prompt])[0] for prompt in PROMPTS]
    alone = scores[-1]
    for way in ({"threads": 2}, {"threads": 2, "max_tokens_per_step": 17, "max_requests": 4}, {"threads": 3}):
        scores.append(Scores())
        engine = start_engine(EngineConfig(**options, **way), default_model)
        assert run_engine(engine, PROMPTS) == expected
        scores[-1].check(alone)


def test_the_default_model_bit_for_bit_on_several_ranks(default_model: Path, scores: list[Scores]) -> None:
    """Three key heads: two ranks have one and two of them."""
    options = {"kernels": "native", "kv_memory": 0.2, "max_len": 512, "speculate": "off"}
    expected = run_engine(start_engine(EngineConfig(**options), default_model), PROMPTS)
    alone = scores[-1]
    for size in (2, 3):
        scores.append(Scores())
        engine = start_engine(EngineConfig(**options, tensor_parallel_size=size), default_model)
        assert run_engine(engine, PROMPTS) == expected
        scores[-1].check(alone)
        engine.close()
