"""The sampling kernels beside the engine's sampler: what tests of the former share. Needs no GPU by itself."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.core.params import SamplingParams
from quire.engine.sampler import LogprobsArrays
from quire.engine.sampling_state import settings_of, signed
from quire.kernels import reference
from quire.kernels.cuda.sampling.logits_processors import apply_token_bitmask, penalize
from quire.kernels.cuda.sampling.logprobs import logprobs
from quire.kernels.cuda.sampling.sample import SamplingInputs, TokenSampler
from quire.kernels.reference_sampling import gumbel, sampling_mask
from quire.kernels.sampling import IN_PROMPT

ROUNDING = 1e-4  # of scores
SPARE_ROWS = 2


def inputs_of(
    params: Sequence[SamplingParams], seeds: Sequence[int], lengths: Sequence[int], device: torch.device
) -> SamplingInputs:
    """The entries are in another order than the rows."""
    entries = list(reversed(range(len(params))))
    return SamplingInputs(
        torch.tensor(entries, dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.tensor([signed(seeds[state]) for state in entries], device=device),
        torch.tensor([settings_of(params[state]) for state in entries], dtype=torch.float64, device=device),
        torch.full((len(params) + 1,), -7, device=device),
        has_top_k=any(each.top_k for each in params),
        has_top_p=any(each.top_p < 1.0 for each in params),
    )


def choose(
    logits: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], lengths: Sequence[int],
    softcap: float | None = None, sampler: TokenSampler | None = None,
) -> tuple[list[int], Tensor]:  # fmt: skip
    """The kernels' tokens and largest logits. Whatever the rows, what lies behind them is left alone."""
    rows, device = len(params), logits.device
    if sampler is None:
        sampler = TokenSampler(rows + SPARE_ROWS, logits.shape[1], softcap, device)
    tokens = torch.full((rows + SPARE_ROWS,), -7, device=device)
    max_logits = torch.zeros(rows + SPARE_ROWS, device=device)
    inputs = inputs_of(params, seeds, lengths, device)
    sampler(logits, inputs, tokens, max_logits)
    assert tokens[rows:].tolist() == [-7] * SPARE_ROWS
    assert inputs.last_tokens.tolist() == [*reversed(tokens[:rows].tolist()), -7]
    return tokens[:rows].tolist(), max_logits[:rows]


def check(
    logits: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], lengths: Sequence[int],
    softcap: float | None = None,
) -> None:  # fmt: skip
    """Each token is kept by the reference, and none that it keeps has a better score."""
    tokens, max_logits = choose(logits, params, seeds, lengths, softcap)
    assert torch.equal(max_logits, logits.float().max(dim=1).values)
    for row, (each, token) in enumerate(zip(params, tokens, strict=True)):
        products = logits[row].float().cpu()
        if each.greedy:
            assert token == int((products == products.max()).nonzero()[0])
            continue
        capped = products if softcap is None else softcap * torch.tanh(products / softcap)
        kept = kept_by(capped, each)
        assert kept[token], (each, token)
        scaled = (capped - capped.max()) / settings_of(each)[0]
        noise = gumbel(torch.tensor(signed(seeds[row])), torch.tensor(lengths[row]), len(products))
        expected = (scaled + noise).masked_fill(~kept, -torch.inf)
        best = float(expected.max())
        assert float(expected[token]) >= best - ROUNDING * (1 + abs(best)), each


def kept_by(logits: Tensor, params: SamplingParams) -> Tensor:
    temperature, top_k, top_p, floor = settings_of(params)
    return sampling_mask(logits, temperature, int(top_k), top_p, floor)


def weights_of(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities, of what is kept."""
    scaled = (logits / settings_of(params)[0]).masked_fill(~kept_by(logits, params), -torch.inf)
    return torch.softmax(scaled.double(), -1)


def draw_params(rng: random.Random, size: int) -> SamplingParams:
    """Any mix of options. A top-p has odd digits: where a sum may be just what it asks for, rounding would decide."""
    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 2.5]),
        top_k=rng.choice([0, 0, 1, 7, 50, size // 2, size + 5]),
        top_p=rng.choice([1.0, 1.0, 0.10337, 0.50713, 0.90931, 0.99071]),
        min_p=rng.choice([0.0, 0.0, 0.01, 0.3]),
    )


def draw_logits(rng: random.Random, rows: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Flat or steep, and now and then with many equals."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    logits = torch.randn(rows, size, generator=generator) * rng.choice([0.3, 2.0, 8.0])
    if rng.random() < 0.3:
        logits = (logits * 2).round() / 2
    return logits.to(device, dtype)


def check_random(seed: int, size: int, dtype: torch.dtype, device: torch.device, rows: int = 6) -> None:
    rng = random.Random(seed)
    logits = draw_logits(rng, rows, size, dtype, device)
    params = [draw_params(rng, size) for _ in range(rows)]
    seeds, lengths = [rng.randrange(2**64) for _ in range(rows)], [rng.randrange(1, 5000) for _ in range(rows)]
    check(logits, params, seeds, lengths, rng.choice([None, None, 12.0]))


def check_alone_and_among_others(seed: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    """A row's token is the same whatever rows stand beside it, in whatever order."""
    rng, rows = random.Random(seed), 7
    logits = draw_logits(rng, rows, size, dtype, device)
    params = [draw_params(rng, size) for _ in range(rows)]
    seeds, lengths = [rng.randrange(2**64) for _ in range(rows)], [rng.randrange(1, 5000) for _ in range(rows)]
    together, _ = choose(logits, params, seeds, lengths)
    turned, _ = choose(logits.flip(0), params[::-1], seeds[::-1], lengths[::-1])
    alone = [choose(logits[r : r + 1], params[r : r + 1], [seeds[r]], [lengths[r]])[0][0] for r in range(rows)]
    assert together == turned[::-1] == alone


def check_equals(dtype: torch.dtype, device: torch.device, repeats: int = 3000) -> None:
    """Of equal logits at the cut those with lower ids are kept, across tiles too."""
    logits = torch.tensor([1.0, 2.0, 1.0, 0.0]).repeat(repeats)
    mass = repeats * (math.e**2 + 2 * math.e + 1)
    params = [
        SamplingParams(top_k=repeats // 3),
        SamplingParams(top_k=repeats + repeats // 3),
        SamplingParams(top_p=(repeats // 3 - 0.5) * math.e**2 / mass),
        SamplingParams(top_p=(repeats * math.e**2 + (repeats // 3 - 0.5) * math.e) / mass),
        SamplingParams(top_k=repeats + 40, top_p=1 - 20.5 * math.e / (repeats * math.e**2 + 40 * math.e)),
    ]
    for each in params:
        assert 0 < int(kept_by(logits, each).sum()) < 2 * repeats, "the cut is among equals"
    rows = [each for each in params for _ in range(4)]
    check(logits.to(device, dtype).repeat(len(rows), 1), rows, range(len(rows)), [9] * len(rows))


def check_bad_rows(dtype: torch.dtype, device: torch.device, size: int = 5000) -> None:
    """Rows that are no numbers or ban everything say so; those beside them, and banned tokens, are none the wiser."""
    logits = draw_logits(random.Random(1), 5, size, dtype, device)
    logits[1, size - 1] = math.nan
    logits[2] = -math.inf
    logits[3, 7] = math.inf
    logits[4, : size - 3] = -math.inf
    params = [SamplingParams(top_p=0.9, top_k=40, min_p=0.01)] * 5
    tokens, max_logits = choose(logits, params, [5] * 5, [3] * 5)
    assert max_logits.isfinite().tolist() == [True, False, False, False, True]
    assert all(0 <= token < size for token in tokens)
    assert tokens[0] == choose(logits[:1], params[:1], [5], [3])[0][0]
    assert tokens[4] >= size - 3


def check_distribution(
    params: SamplingParams, device: torch.device, *, size: int = 5000, rows: int = 256, rounds: int = 16
) -> float:
    """Chi-squared of many seeds' tokens over ten groups of equal mass; 9 degrees of freedom."""
    logits = torch.randn(size, generator=torch.Generator().manual_seed(3)).to(device)
    left = weights_of(logits.cpu(), params)
    group = ((left.cumsum(-1) - left / 2) / left.sum() * 10).long().clamp(0, 9)
    expected = torch.zeros(10, dtype=torch.float64).index_add_(0, group, left / left.sum()) * rows * rounds
    counts = torch.zeros(10, dtype=torch.float64)
    sampler = TokenSampler(rows + SPARE_ROWS, size, None, device)
    for number in range(rounds):
        seeds = range(number * rows, (number + 1) * rows)
        tokens, _ = choose(logits.expand(rows, -1).contiguous(), [params] * rows, seeds, [7] * rows, None, sampler)
        counts.index_add_(0, group[torch.tensor(tokens)], torch.ones(rows, dtype=torch.float64))
    return float(((counts - expected) ** 2 / expected).sum())


def check_logprobs(size: int, dtype: torch.dtype, device: torch.device, softcap: float | None, equals: bool) -> None:
    """Beside the sampler's own report, of rows that want different numbers of tokens."""
    torch.manual_seed(size)
    logits = 3 * torch.randn(5, size, device=device)
    logits = (logits.round() if equals else logits).to(dtype)
    tokens = torch.randint(size, (5,), device=device)
    nums_top = torch.tensor([0, 1, 5, 20, size + 3], device=device).clamp(max=64)
    capped = logits.float() if softcap is None else softcap * torch.tanh(logits.float() / softcap)
    expected = LogprobsArrays(*reference.logprobs(capped, tokens, min(64, size)))
    ids = (-capped).sort(stable=True).indices
    own, ranks, top, values = logprobs(logits, tokens, nums_top, int(nums_top.max()), softcap)
    torch.testing.assert_close(own, expected.logprobs, atol=2e-5, rtol=2e-5)
    assert ranks.tolist() == [int((row > row[token]).sum()) + 1 for row, token in zip(capped, tokens, strict=True)]
    for row, num_top in enumerate(nums_top.clamp(max=size).tolist()):
        assert top[row, :num_top].tolist() == ids[row, :num_top].tolist()
        torch.testing.assert_close(values[row, :num_top], expected.top_logprobs[row, :num_top], atol=2e-5, rtol=2e-5)
        alone = logprobs(logits[row:][:1], tokens[row:][:1], nums_top[row:][:1], max(1, num_top), softcap)
        assert alone[0][0] == own[row]
        assert torch.equal(alone[3][0, :num_top], values[row, :num_top])


def check_logits_processors(size: int, device: torch.device) -> None:
    """Penalties and masks beside the reference."""
    torch.manual_seed(size)
    logits = 3 * torch.randn(4, size, device=device)
    counts = torch.randint(-3, 3, (5, size), dtype=torch.int32, device=device).clamp(min=0)
    counts += (torch.rand(5, size, device=device) < 0.2).int() * IN_PROMPT
    index = torch.tensor([[2, 4, size - 1, 0], [0, 1, 0, 0], [3, 0, -1, -1]], device=device)
    penalties = torch.tensor([[1.3, 0.4, 0.1], [0.5, 0.0, 1.0], [1.0, -0.7, 0.0]], device=device)
    expected = logits.clone()
    reference.penalize(expected, counts, index, penalties)
    penalize(logits, counts, index, penalties)
    torch.testing.assert_close(logits, expected)
    assert torch.equal(logits[1], expected[1])
    bits = torch.randint(0, 256, (2, -(-size // 8)), dtype=torch.uint8, device=device)
    for num_bytes in {bits.shape[1], max(1, bits.shape[1] - 1)}:
        rows, mask = torch.tensor([3, 1], device=device), bits[:, :num_bytes].contiguous()
        reference.apply_token_bitmask(expected, rows, mask)
        apply_token_bitmask(logits, rows, mask)
        assert torch.equal(logits.isfinite(), expected.isfinite())
        torch.testing.assert_close(logits, expected)
