"""Each sampling option alone, against what it is meant to do."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch

from quire.core.drafts import Drafts
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.logits_processors import banned_words
from quire.engine.sampling_state import settings_of, signed
from quire.kernels import select_torch
from quire.kernels.reference_sampling import gumbel, sampling_mask, sort_keys, top_p_mask
from tests.tools.sampling import changed, make_sampler, sample, samples_of

pytestmark = pytest.mark.cpu

OPS = select_torch("cpu")
LOGITS = torch.tensor([0.0, 3.0, 2.0, 1.0, -1.0, 2.9, -5.0, 0.5])


def position(prompt=(0, 1), output=(), seed=0, ends=(), words=(), **options) -> Request:
    params, words = SamplingParams(**options), tuple(words)
    ends = frozenset(ends)
    return Request("r", list(prompt), params, end_token_ids=ends, bad_word_ids=words, seed=seed, output=list(output))


def greedy(logits=LOGITS, **options) -> int | None:
    (token,), _ = sample(logits.clone()[None], [position(temperature=0.0, **options)], OPS)
    return token


def draw(count: int, logits=LOGITS, **options) -> Counter[int | None]:
    """`count` draws, each at another position."""
    positions = [position(output=[0] * index, **options) for index in range(count)]
    tokens, _ = sample(logits.expand(count, -1).clone(), positions, OPS)
    return Counter(tokens)


def test_greedy_takes_the_largest() -> None:
    assert greedy() == 1


def test_logit_bias_moves_the_choice() -> None:
    assert greedy(logit_bias={6: 50.0}) == 6
    assert greedy(logit_bias={1: -100.0}) == 5


def test_allowed_tokens_are_the_only_ones() -> None:
    assert greedy(allowed_token_ids=[4, 6]) == 4
    assert set(draw(200, temperature=5.0, allowed_token_ids=[4, 6])) == {4, 6}


def test_bad_words_are_banned_where_they_would_be_completed() -> None:
    assert banned_words([(1,), (2, 5), (9, 2, 7)], [9, 2]) == [1, 5, 7]
    assert banned_words([(2, 5)], [5]) == []
    assert banned_words([(2, 5)], []) == []
    assert greedy(words=[(1,)]) == 5
    assert greedy(words=[(3, 1)], output=[3]) == 5
    assert greedy(words=[(3, 1)], output=[4]) == 1


def test_no_end_before_min_tokens() -> None:
    assert greedy(ends=[1], min_tokens=2, output=[3]) == 5
    assert greedy(ends=[1], min_tokens=2, output=[3, 3]) == 1
    assert greedy(stop_token_ids=[1], min_tokens=2) == 5


def test_presence_and_frequency_look_at_the_answer_only() -> None:
    assert greedy(prompt=[1, 1], presence_penalty=2.0) == 1
    assert greedy(output=[1], presence_penalty=0.2) == 5
    assert greedy(output=[1], frequency_penalty=0.05) == 1
    assert greedy(output=[1, 1, 1], frequency_penalty=0.05) == 5


def test_repetition_looks_at_the_prompt_too_and_pushes_negative_logits_down() -> None:
    assert greedy(prompt=[1], repetition_penalty=1.1) == 5
    logits = torch.tensor([-1.0, -1.05])
    assert greedy(logits, prompt=[0], repetition_penalty=1.2) == 1


def test_what_is_changed_in_one_row_leaves_the_others_alone() -> None:
    asked: list[dict[str, object]] = [
        {}, {"repetition_penalty": 1.3, "output": [1, 5, 1]}, {"frequency_penalty": 0.4, "output": [5, 5, 2]},
        {"presence_penalty": 0.3, "repetition_penalty": 0.5, "output": [7, 2]}, {"presence_penalty": 1.0, "output": []},
        {"logit_bias": {2: 1.5}, "frequency_penalty": -0.5, "output": [2, 1]}, {"allowed_token_ids": [3, 4]},
    ]  # fmt: skip
    positions = [position(**options) for options in asked]
    untouched = torch.randn(len(asked), 8, generator=torch.Generator().manual_seed(1))
    together = changed(untouched, positions, OPS)
    alone = torch.cat([changed(untouched[row : row + 1], [each], OPS) for row, each in enumerate(positions)])
    assert together.equal(alone)
    assert together.ne(untouched).any(1).tolist() == [False, True, True, True, False, True, True]
    assert (untouched - together)[2].tolist() == pytest.approx([0, 0, 0.4, 0, 0, 0.8, 0, 0])


@pytest.mark.parametrize("options", [{"frequency_penalty": 0.3}, {"presence_penalty": 0.5, "repetition_penalty": 1.2}])
def test_counts_follow_the_answer_from_step_to_step(options: dict[str, float]) -> None:
    """What is counted on the device as tokens are chosen is what counting them all again would give."""
    generator = torch.Generator().manual_seed(2)
    request, sampler = position(temperature=0.0, **options), make_sampler(8, 2, OPS)
    for step in range(30):
        logits = torch.randn(1, 8, generator=generator)
        if step == 12:
            sampler.state.clear()
        chosen = int(sampler.sample(samples_of(sampler, [request]), logits).tokens[0])
        assert [chosen] == sample(logits, [position(output=request.tokens[2:], temperature=0.0, **options)], OPS)[0]
        request.tokens.append(chosen)


def test_penalties_see_the_drafts_before_a_position() -> None:
    generator, options = torch.Generator().manual_seed(3), {"frequency_penalty": 0.9, "temperature": 0.0}
    request, logits = position(output=[3], **options), torch.randn(4, 8, generator=generator)
    request.drafts = Drafts([5, 5, 1])
    expected = [
        sample(logits[nth : nth + 1], [position(output=[3, *[5, 5, 1][:nth]], **options)], OPS)[0][0]
        for nth in range(4)
    ]
    sampler = make_sampler(8, 1, OPS)
    assert sampler.sample(samples_of(sampler, [request]), logits).tokens.tolist() == expected
    request.drafts = None
    request.tokens += [5, 5]  # of the drafts two were right
    after = torch.randn(1, 8, generator=generator)
    chosen = sampler.sample(samples_of(sampler, [request]), after).tokens.tolist()
    assert chosen == sample(after, [position(output=[3, 5, 5], **options)], OPS)[0]


def test_requests_keep_their_entries_while_they_run() -> None:
    sampler, rng = make_sampler(8, 4, OPS), random.Random(5)
    running, owners = [position(seed=seed) for seed in range(4)], dict[int, Request]()
    for number in range(200):
        running = [request if rng.random() < 0.8 else position(seed=100 + number) for request in running]
        samples = samples_of(sampler, rng.sample(running, rng.randint(1, 4)))
        assert len(set(samples.entries)) == len(samples)
        for request, entry in zip(samples.requests, samples.entries, strict=True):
            owners[entry] = request
            assert sampler.state.seeds[entry] == request.seed
        assert len(sampler.state._free) + len(sampler.state._indices) == sampler.state.size


def test_temperature_one_draws_from_the_softmax() -> None:
    count = 4000
    drawn = draw(count, temperature=1.0)
    for token, probability in enumerate(torch.softmax(LOGITS, -1).tolist()):
        spread = math.sqrt(count * probability * (1 - probability))
        assert abs(drawn[token] - count * probability) < 5 * spread + 1


def test_top_k_and_min_p() -> None:
    assert set(draw(300, temperature=3.0, top_k=3)) == {1, 5, 2}
    assert set(draw(300, temperature=1.0, min_p=0.5)) == {1, 5}
    assert set(draw(50, temperature=3.0, top_k=1)) == {1}


def test_top_p_keeps_the_token_that_reaches_it() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.1, 0.1])
    logits = probabilities.log()
    assert top_p_mask(probabilities, logits, 0.5).tolist() == [True, False, False, False]
    assert top_p_mask(probabilities, logits, 0.51).tolist() == [True, True, False, False]
    assert set(draw(300, temperature=1.0, top_p=0.7)) == {1, 5}


def test_top_p_beyond_the_first_thousand_equals_a_full_sort() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 0.1 * torch.randn(5000, generator=generator)
    probabilities = torch.softmax(logits, -1)
    kept = top_p_mask(probabilities, logits, 0.9)
    values, order = probabilities.sort(descending=True)
    count = int((values.double().cumsum(-1) - values.double() < 0.9).sum())
    assert count > 1024
    assert set(kept.nonzero().flatten().tolist()) == set(order[:count].tolist())


def test_of_equal_logits_at_the_cut_the_lower_ids_are_kept() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0]).repeat(700)  # more equals at the cut than are looked at first
    ones = (logits == 1.0).nonzero().flatten().tolist()
    twos = (logits == 2.0).nonzero().flatten().tolist()

    def kept(**options) -> list[int]:
        temperature, top_k, top_p, floor = settings_of(SamplingParams(**options))
        return sampling_mask(logits, temperature, int(top_k), top_p, floor).nonzero().flatten().tolist()

    assert kept(top_k=1000) == sorted(twos + ones[:300])
    assert kept(top_k=3, temperature=0.5) == twos[:3]
    whole = 700 * (math.e**2 + 3 * math.e + 1)
    assert kept(top_p=(700 * math.e**2 + 399.5 * math.e) / whole) == sorted(twos + ones[:400])
    assert kept(top_p=2.5 * math.e**2 / whole) == twos[:3]
    both = 700 * math.e**2 + 300 * math.e
    assert kept(top_k=1000, top_p=(both - 99.5 * math.e) / both) == sorted(twos + ones[:201])


def test_banned_tokens_are_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 1.0, -math.inf, 2.0, -math.inf])
    for options in ({}, {"top_k": 4}, {"top_p": 0.999}, {"min_p": 1e-9}, {"temperature": 100.0}):
        assert set(draw(100, logits, **{"temperature": 1.0} | options)) == {1, 3}


def test_the_largest_noise_is_finite() -> None:
    """The uniform numbers next to 0 and next to 1 give the largest and the smallest noise there is."""
    noise = torch.cat([gumbel(torch.tensor(seed), torch.tensor(1), 50_000) for seed in range(20)])
    assert noise.isfinite().all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert -3.2 < noise.min() < -2.0
    assert 12.0 < noise.max() < 22.9


@pytest.mark.parametrize(("size", "most"), [(3e-6, 1e-3), (1e-2, 0.02), (0.3, 0.2)])
def test_noise_in_the_logits_seldom_moves_a_draw(size: float, most: float) -> None:
    """Logits as another number format, another order of sums or a draft model would give them."""
    count, vocab = 600, 2000
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(count, vocab, generator=generator)
    other = logits + size * torch.randn(count, vocab, generator=generator)
    positions = [position(output=[0] * index, temperature=1.0) for index in range(count)]
    moved = [a != b for a, b in zip(sample(logits, positions, OPS)[0], sample(other, positions, OPS)[0], strict=True)]
    assert sum(moved) <= most * count


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    one = [position(seed=seed, output=[0] * place) for seed in range(4) for place in range(8)]
    tokens, _ = sample(LOGITS.expand(32, -1).clone(), one, OPS)
    backwards, _ = sample(LOGITS.expand(32, -1).clone(), one[::-1], OPS)
    single = [sample(LOGITS.clone()[None], [p], OPS)[0][0] for p in one]
    assert tokens == backwards[::-1] == single
    assert len({tuple(tokens[8 * seed : 8 * seed + 8]) for seed in range(4)}) == 4


def test_seeds_use_all_their_bits() -> None:
    assert signed(2**64 - 1) == -1
    assert signed(5) == 5
    wide = [torch.tensor(signed(seed)) for seed in (1, 1 + 2**40, 2**63 + 1)]
    assert len({tuple(gumbel(seed, torch.tensor(2), 8).tolist()) for seed in wide}) == 3


def test_logprobs_are_of_the_untouched_logits() -> None:
    (token,), (scored,) = sample(
        LOGITS.clone()[None], [position(temperature=0.0, logprobs=3, logit_bias={6: 50.0})], OPS
    )
    expected = torch.log_softmax(LOGITS, -1)
    assert token == 6
    assert scored is not None
    assert scored.chosen == (6, pytest.approx(float(expected[6])), 8)
    assert [entry[0] for entry in scored.top] == [1, 5, 2]
    assert [entry[2] for entry in scored.top] == [1, 2, 3]


@pytest.mark.parametrize("logits", [LOGITS, torch.full_like(LOGITS, math.nan)], ids=["all banned", "not numbers"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_when_no_token_is_left_it_says_so(logits: torch.Tensor, temperature: float) -> None:
    bad = position(temperature=temperature, allowed_token_ids=[3], words=[(3,)])
    if not logits.isfinite().all():
        bad = position(temperature=temperature)
    tokens, _ = sample(torch.stack([logits.clone(), LOGITS.clone()]), [bad, position(temperature=0.0)], OPS)
    assert tokens == [None, 1]


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6])
def test_hardly_any_temperature_takes_the_likeliest(temperature):
    logits = torch.tensor([[3.0, 80.0, -torch.inf, 79.99]])
    request = Request("r", [1], SamplingParams(temperature=temperature), seed=3)
    tokens, _ = sample(logits, [request], select_torch("cpu"))
    assert tokens == [1]


def test_places_rise_from_the_likeliest_and_of_equals_from_the_lowest_id():
    logprobs = torch.log_softmax(torch.randn(5, 3000).bfloat16().float(), -1)  # many are equal
    logprobs[2, 17:40] = -torch.inf
    logprobs[3] = -torch.inf
    logprobs[3, 9] = 0.0
    order = logprobs.sort(descending=True, stable=True).indices
    assert torch.equal(sort_keys(logprobs).sort().values & 0xFFFFFFFF, order)
