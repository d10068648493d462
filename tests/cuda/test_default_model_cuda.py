"""The default model on a GPU: in float32 the tokens of the CPU's reference, in half precision its numbers, rounded.

Its file is looked for in quire's cache and never fetched here: a GPU machine may have no network.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda.gpu import DEVICE  # skips this module where there is no GPU

from quire.config import DEFAULT_MODEL, EngineConfig  # isort: skip
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.client import InProcess
from quire.errors import ModelNotFound
from quire.store import resolve

pytestmark = pytest.mark.cuda

PROMPTS = [
    [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
    [504, 1345, 3575, 282, 260, 2591, 314],
    [9, 9, 8],
    [*range(20, 150)],
    [(37 * place * place + 11) % 49152 for place in range(700)],
    *([place * 1009 % 49152 for place in range(first, first + 12)] for first in range(0, 60, 12)),
]
LENGTH = 48


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return resolve(DEFAULT_MODEL, pull=False).path
    except ModelNotFound:
        pytest.skip(f"{DEFAULT_MODEL} is not in quire's cache, and is not fetched here")


def start(path: Path, device: str, dtype: str, **options: Any) -> InProcess:
    return InProcess(EngineConfig(device=device, dtype=dtype, kv_memory=1.0, max_len=2048, **options), path)


def answer(client: InProcess, **params: Any) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy tokens, and log probabilities of the prompts' tokens where asked for."""
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True} | params)
    requests = [Request(str(n), prompt, sampling, max_tokens=sampling.max_tokens) for n, prompt in enumerate(PROMPTS)]
    scores: dict[str, list[float]] = {request.id: [] for request in requests}
    for request in requests:
        client.add(request)
    while client.engine.has_work:
        for update in client.step():
            assert update.finish is None or update.finish.value == "length", update
            found = update.detail.prompt_logprobs if update.detail else None
            scores[update.id] += [scored.chosen[1] for scored in found or []]
    return [request.tokens[request.num_prompt :] for request in requests], list(scores.values())


@pytest.fixture(scope="module")
def expected(path: Path) -> tuple[list[list[int]], list[list[float]]]:
    client = start(path, "cpu", "float32", kernels="torch", max_tokens_per_step=1024, threads=4)
    return answer(client)[0], answer(client, prompt_logprobs=0, max_tokens=1)[1]


@pytest.mark.parametrize("options", [{}, {"exact": True}, {"max_tokens_per_step": 50, "max_requests": 8}], ids=str)
def test_float32_gives_the_reference_tokens(path, expected, options):
    assert answer(start(path, DEVICE.type, "float32", **options))[0] == expected[0]


def test_float32_gives_the_reference_numbers(path, expected):
    client = start(path, DEVICE.type, "float32", prefix_cache=False)
    assert differences(answer(client, prompt_logprobs=0, max_tokens=1)[1], expected[1]).max() < 2e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_agrees_to_its_rounding(path, expected, dtype):
    """It is as far from float32 as the reference is in the same type."""
    client = start(path, DEVICE.type, dtype, prefix_cache=False)
    off = differences(answer(client, prompt_logprobs=0, max_tokens=1)[1], expected[1])
    parted = [first_difference(*pair) for pair in zip(answer(client)[0], expected[0], strict=True)]
    plain = start(path, DEVICE.type, dtype, prefix_cache=False, kernels="torch")
    usual = differences(answer(plain, prompt_logprobs=0, max_tokens=1)[1], expected[1])
    print(f"{dtype}: log probabilities off by {off.mean():.4f} in the mean, {off.max():.3f} at most; ", end="")
    print(f"the reference's by {usual.mean():.4f} and {usual.max():.3f}; ", end="")
    print(f"greedy tokens part from the float32 reference's after {parted} of {LENGTH}")
    assert off.mean() < 1.25 * usual.mean()
    assert off.max() < 2 * usual.max()
    assert sum(parted) > len(parted) * LENGTH // 4


def differences(got: list[list[float]], expected: list[list[float]]) -> torch.Tensor:
    assert [len(row) for row in got] == [len(row) for row in expected] == [len(prompt) - 1 for prompt in PROMPTS]
    flat = [torch.tensor([score for row in rows for score in row]) for rows in (got, expected)]
    return (flat[0] - flat[1]).abs()


def first_difference(tokens: list[int], expected: list[int]) -> int:
    return next((place for place, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1]), LENGTH)
