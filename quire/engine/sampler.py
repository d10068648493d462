"""Sampler: from logits to tokens. A token is a function of the logits, the request's parameters, its seed and the
position, and of nothing else, so it does not matter who shares the batch or how often a step is repeated.

For each position, in this order:
  1. log probabilities are taken from the untouched logits, if asked for
  2. what the request bans, favours or penalizes is changed (logits.py)
  3. the token is chosen (the op `sample`: see `kernels/sampling.py`)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.core.params import SamplingParams
from quire.core.plan import Detail, TokenLogprobs
from quire.core.request import Request
from quire.engine.logits import Position, change
from quire.kernels import Kernels

MIN_TEMPERATURE = 1e-6  # below it only the likeliest token is left, and float32 would overflow


def explain_no_token(request: Request) -> Detail:
    """Why no token could be chosen: what the request restricts leaves none, or the model computes no numbers."""
    if request.constraint is not None and request.constraint.error:
        return Detail(message=request.constraint.error, refused=True)
    if names := request.params.restrictions:
        return Detail(
            message=f"{' and '.join(names)} {'together leave' if len(names) > 1 else 'leaves'} no token that could "
            "come next. Loosen the restrictions.",
            refused=True,
        )
    return Detail(message="No token could be chosen: the model's logits are not numbers. Check the model's file.")


def sample(
    logits: Tensor, positions: Sequence[Position], ops: Kernels
) -> tuple[list[int | None], list[TokenLogprobs | None]]:
    """logits [n, vocab] float32, used up -> a token each (None where none is left), and log probabilities if asked."""
    wants_logprobs = [index for index, p in enumerate(positions) if p.request.params.logprobs is not None]
    raw = {index: torch.log_softmax(logits[index], -1) for index in wants_logprobs}
    change(logits, positions)
    tokens = choose(logits, positions, ops)
    logprobs: list[TokenLogprobs | None] = [None] * len(positions)
    for index, values in raw.items():
        if (token := tokens[index]) is not None:
            num_top = positions[index].request.params.logprobs or 0
            reported = report(values[None], torch.tensor([token], device=logits.device), num_top)
            (logprobs[index],) = tell(reported, [token], [num_top])
    return tokens, logprobs


def choose(logits: Tensor, positions: Sequence[Position], ops: Kernels) -> list[int | None]:
    """The tokens of positions whose logits are as they should be; None where no token is left."""
    device, requests = logits.device, [position.request for position in positions]
    settings = torch.tensor([settings_of(request.params) for request in requests], dtype=torch.float64, device=device)
    seeds = torch.tensor([signed(request.seed) for request in requests], device=device)
    places = torch.tensor([position.place for position in positions], device=device)
    tokens, largest = ops.sample(logits, settings, seeds, places)
    return [
        token if math.isfinite(value) else None
        for token, value in zip(tokens.tolist(), largest.tolist(), strict=True)
    ]  # fmt: skip


def settings_of(params: SamplingParams) -> tuple[float, float, float, float]:
    """A row of the op's settings: temperature, top-k, top-p, and how far min-p lets a logit be below the largest."""
    temperature = 0.0 if params.greedy else max(params.temperature, MIN_TEMPERATURE)
    floor = temperature * math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    return temperature, params.top_k, params.top_p, floor


class Report(NamedTuple):
    """Log probabilities of a row's token and of the likeliest ones, for some rows; all on the logits' device."""

    own: Tensor  # [n] float32
    ranks: Tensor  # [n] int64: how many are likelier, and one
    top: Tensor  # [n, most] int64, likeliest first
    values: Tensor  # [n, most] float32


def report(logprobs: Tensor, tokens: Tensor, num_top: int) -> Report:
    """logprobs [n, vocab], tokens [n]. What is said of a row does not depend on the others."""
    own = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > own).sum(1) + 1
    top = likeliest(logprobs, min(num_top, logprobs.shape[1]))
    return Report(own[:, 0], ranks, top, logprobs.gather(1, top))


def likeliest(logprobs: Tensor, count: int) -> Tensor:
    """logprobs [n, vocab] -> the likeliest tokens of each row, [n, count].

    On a GPU the order of equals would depend on the number of rows, so there they are told apart by their ids.
    """
    if not logprobs.is_cuda or not count:
        return logprobs.topk(count).indices
    return places_of(logprobs).topk(count, largest=False).values & 0xFFFFFFFF


def places_of(logprobs: Tensor) -> Tensor:
    """logprobs [n, vocab] -> numbers with ids in their lower halves that rise from the likeliest token on, of equals
    from the lowest id: a logarithm of a probability is not above zero, so its bits without the sign rise as it falls.
    """
    order = (logprobs.view(torch.int32) & 0x7FFFFFFF).long() << 32
    return order | torch.arange(logprobs.shape[1], device=logprobs.device)


def tell(reported: Report, tokens: Sequence[int], nums_top: Sequence[int]) -> list[TokenLogprobs]:
    """A report that is on the host, for rows that asked for so many of the likeliest tokens."""
    own, ranks, top, values = (part.tolist() for part in reported)
    return [
        TokenLogprobs(
            (token, own[row], ranks[row]),
            [(other, values[row][place], place + 1) for place, other in enumerate(top[row][:num_top])],
        )
        for row, (token, num_top) in enumerate(zip(tokens, nums_top, strict=True))
    ]


def signed(seed: int) -> int:
    """A 64-bit seed as the int64 of the same bits."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed
