"""Sampling from rows as long as real vocabularies, and where top-p cuts between equals: C++ against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels import reference
from tests.tools.native import each_isa, ops_of

pytestmark = pytest.mark.cpu

SETTINGS = {  # temperature, top-k, top-p, floor
    "temperature": (1.0, 0, 1.0, -torch.inf),
    "hot": (3.0, 0, 1.0, -torch.inf),
    "top_p": (0.8, 0, 0.95, -torch.inf),
    "small top_p": (1.0, 0, 0.1, -torch.inf),
    "top_k": (1.0, 40, 1.0, -torch.inf),
    "top_k and top_p": (0.8, 40, 0.95, -torch.inf),
    "large top_k": (0.7, 3000, 0.99, -torch.inf),
    "min_p": (1.0, 0, 1.0, -3.0),
    "min_p and top_p": (1.0, 0, 0.9, -2.0),
}
each_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=list(SETTINGS))


def assert_same_tokens(name: str, logits: Tensor, setting: tuple[float, ...], threads: int = 2, seed: int = 0) -> None:
    settings = torch.tensor([setting] * len(logits), dtype=torch.float64)
    seeds = torch.arange(len(logits)) * 7919 + seed
    arguments = logits, settings, seeds, torch.arange(len(logits)) * 3 + 1
    tokens, largest = ops_of(name, threads).sample(*arguments)
    expected, expected_largest = reference.sample(*arguments)
    assert torch.equal(tokens, expected)
    assert torch.equal(largest, expected_largest)


def make_logits(rows: int, size: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    logits = 2.5 * torch.randn(rows, size, generator=generator)
    for row in range(rows):  # from flat to peaked
        logits[row, torch.randint(0, size, (5,), generator=generator)] += 3.0 * row
    if kind == "ties":
        logits = logits.round()
    if kind == "banned":
        logits[torch.rand(rows, size, generator=generator) < 0.5] = -torch.inf
        logits[:, size - 1] = 0.25
    return logits


@each_isa
@each_setting
@pytest.mark.parametrize("kind", ["normal", "ties", "banned"])
@pytest.mark.parametrize("size", [1, 15, 16, 17, 4097, 49152])
def test_tokens_are_those_of_the_reference(name: str, size: int, kind: str, setting: tuple[float, ...]) -> None:
    assert_same_tokens(name, make_logits(6, size, kind), setting)


@each_isa
@each_setting
@pytest.mark.parametrize("threads", [1, 5])
def test_tokens_of_a_large_vocabulary(name: str, threads: int, setting: tuple[float, ...]) -> None:
    assert_same_tokens(name, make_logits(4, 151_669, "normal"), setting, threads)


@each_isa
@pytest.mark.parametrize(("size", "top_p"), [(64, 0.5), (64, 0.015625), (40, 0.1), (4, 0.75), (2, 0.5)])
def test_top_p_between_equal_logits(name: str, size: int, top_p: float) -> None:
    """The probabilities before the cutoff add up to top_p exactly, so a rough sum cannot decide."""
    assert_same_tokens(name, torch.zeros(500, size), (1.0, 0, top_p, -torch.inf))
    two_values = torch.zeros(500, size)
    two_values[:, size // 2 :] = -200.0  # of no weight
    assert_same_tokens(name, two_values, (1.0, 0, top_p, -torch.inf))


@each_isa
def test_top_p_over_many_seeds(name: str) -> None:
    """Winners that are not kept are replaced by a winner of those that are."""
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(1)).expand(400, -1)
    for top_p in (0.05, 0.3, 0.6, 0.9):
        assert_same_tokens(name, logits, (1.0, 0, top_p, -torch.inf))


@each_isa
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("by_position", [False, True])
def test_tokens_are_distributed_as_softmax_says(name: str, temperature: float, by_position: bool) -> None:
    """Chi-squared over many seeds, and over many positions of one seed. Accepted drafts are such tokens, so speculation
    needs no test of its own."""
    count, size = 40_000, 40
    logits = 1.5 * torch.randn(1, size, generator=torch.Generator().manual_seed(3))
    settings = torch.tensor([(temperature, 0, 1.0, -torch.inf)] * count, dtype=torch.float64)
    varied, fixed = torch.arange(count) + 1, torch.full((count,), 17)
    seeds, lengths = (fixed, varied) if by_position else (varied, fixed)
    tokens, _ = ops_of(name, 2).sample(logits.expand(count, -1).contiguous(), settings, seeds, lengths)
    expected = count * torch.softmax(logits[0].double() / temperature, -1)
    assert expected.min() > 5, "enough for chi-squared"
    found = torch.bincount(tokens, minlength=size)
    assert float(((found - expected) ** 2 / expected).sum()) < 72.1  # 39 degrees of freedom, one in a thousand
