"""Sampling on the GPU against the engine's sampler, which is its meaning."""

from __future__ import annotations

import pytest
import torch

from tests.cuda.gpu import DEVICE, DTYPES  # skips this module where there is no GPU

from quire.core.params import SamplingParams  # isort: skip
from quire.kernels.cuda.sampling.top_k_top_p import HIGH, LOW, TopKTopP
from tests.cuda.sampling import (
    check,
    check_alone_and_among_others,
    check_bad_rows,
    check_distribution,
    check_equals,
    check_logits_processors,
    check_logprobs,
    check_random,
    inputs_of,
)

pytestmark = pytest.mark.cuda

CUTS = [{}, {"top_k": 40}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 900, "top_p": 0.9, "temperature": 0.7}]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 5, 300, 4096, 4097, 20_011, 49_152, 128_256, 262_144])
def test_the_token_has_the_best_score(size, dtype):
    for seed in range(8):
        check_random(seed, size, dtype, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [700, 20_011, 128_256])
def test_a_row_alone_and_among_others(size, dtype):
    for seed in range(3):
        check_alone_and_among_others(seed, size, dtype, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_equals_at_the_cut_the_lower_ids_are_kept(dtype):
    check_equals(dtype, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_choice(dtype):
    check_bad_rows(dtype, DEVICE)


@pytest.mark.parametrize("options", CUTS, ids=lambda options: "+".join(options) or "temperature")
def test_many_seeds_draw_from_the_distribution(options):
    assert check_distribution(SamplingParams(**options), DEVICE) < 27.9  # one in a thousand; the draws are fixed


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits(dtype):
    """Very far apart, next to zero, of both signs of zero: the search ends in one value."""
    largest = torch.finfo(dtype).max
    spread = torch.tensor([-largest, -3.0, -0.0, 0.0, 1e-7, -1e-7, 2.0, 2.5, 1e-3, -20.0]).repeat(500).to(DEVICE, dtype)
    near_zero = torch.tensor([0.0, -0.0, 1e-6, 2e-6, -1e-6]).repeat(1000).to(DEVICE, dtype)
    params = [SamplingParams(top_k=1200), SamplingParams(top_p=0.60331), SamplingParams(top_k=2300, top_p=0.91737)]
    for logits in (spread, near_zero):
        check(logits.repeat(3, 1), params, [1, 2, 3], [4, 5, 6])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
def test_every_search_ends_in_one_value(scale, dtype):
    size, params = 9000, [SamplingParams(top_k=3000, top_p=0.97), SamplingParams(top_k=20, top_p=0.3)]
    logits = (torch.randn(2, size, device=DEVICE) * scale).to(dtype)
    cutter, inputs = TopKTopP(2, size, None, DEVICE), inputs_of(params, [0, 0], [0, 0], DEVICE)
    for by_mass in (False, True):
        cutter(logits, logits.float().max(dim=1).values, inputs.entries, inputs.settings, by_mass=by_mass)
        assert (cutter.cuts[:, HIGH.value] - cutter.cuts[:, LOW.value]).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 5, 4097, 128_256])
def test_log_probabilities(size, dtype):
    for softcap in (None, 12.0):
        check_logprobs(size, dtype, DEVICE, softcap, equals=size % 2 == 0)


@pytest.mark.parametrize("size", [1, 9, 4096, 20_011])
def test_penalties_and_masks(size):
    check_logits_processors(size, DEVICE)
