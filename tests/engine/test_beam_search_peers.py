"""Beam search beside transformers': the same beams for the same model, whatever the penalty and the way to stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.plan import Hypothesis
from quire.core.request import Request
from quire.engine.client import InProcess
from tests.tools.tiny_models import COMMON, tiny_directory

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.cpu

PROMPTS = [[5, 17, 40, 3], [8, 9, 10, 11, 12, 13, 70, 2, 33], [60]]
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def peer(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.fixture(scope="module")
def engine(directory: Path) -> InProcess:
    return InProcess(EngineConfig(model="tiny", dtype="float32", kv_dtype="float32", kernels="torch"), directory)


def search(engine: InProcess, prompt: list[int], width: int, ends: list[int], **more: Any) -> list[Hypothesis]:
    params = SamplingParams(use_beam_search=True, n=width, temperature=0.0, max_tokens=MAX_TOKENS, **more)
    engine.add(Request("r", prompt, params, end_token_ids=frozenset(ends), max_tokens=MAX_TOKENS))
    while True:
        for update in engine.step():
            if update.finish:
                assert update.detail is not None
                return update.detail.beams or []


def search_by_peer(
    peer: Any, prompt: list[int], width: int, ends: list[int], **more: Any
) -> tuple[list[list[int]], list[float]]:
    made = peer.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        eos_token_id=ends,
        pad_token_id=COMMON["vocab_size"] - 1,
        return_dict_in_generate=True,
        output_scores=True,
        **more,
    )
    answers = []
    for row in made.sequences.tolist():
        tokens = row[len(prompt) :]
        end = next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))
        answers.append(tokens[:end])
    return answers, made.sequences_scores.tolist()


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 4])
def test_the_same_beams(
    engine: InProcess, peer: Any, width: int, length_penalty: float, early_stopping: bool | str
) -> None:
    num_stopped = 0
    for prompt in PROMPTS:
        free = search(engine, prompt, 4, [])
        ends = sorted({free[0].tokens[3], free[1].tokens[5], free[2].tokens[2]})
        for stops in (ends[:1], ends):
            options: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": early_stopping}
            found = search(engine, prompt, width, stops, **options)
            tokens, scores = search_by_peer(peer, prompt, width, stops, **options)
            assert [each.tokens for each in found] == tokens
            assert [each.score for each in found] == pytest.approx(scores, rel=1e-4)
            num_stopped += sum(each.tokens[-1] in stops for each in found)
    assert num_stopped or length_penalty > 1  # which favours answers that go on
