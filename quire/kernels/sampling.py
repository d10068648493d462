"""Sampling: how a token is chosen from a row of logits. This is the reference; backends have kernels of the same rule.

Temperature 0 takes the largest logit. Otherwise min-p, top-k and top-p select some of the ids. Of these the token is

    argmax(logit / temperature + gumbel(seed, length, id))

where `length` is the number of tokens before the sampled one. This draws from the softmax (the Gumbel-max trick). The
noise depends on the id. So a small change of the logits, by
other kernels, number formats or a draft model, changes the token only if two candidates have about equal scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.philox import token_words

# Columns of `settings`, float64.
TEMPERATURE = 0  # 0 is greedy
TOP_K = 1  # 0 keeps all
TOP_P = 2
FLOOR = 3  # min-p as temperature * log(min_p), or -inf: the smallest allowed logit - largest logit
NUM_SETTINGS = 4

IN_PROMPT = 1 << 30  # added to the count of a token that occurs in the prompt

TOP_FIRST = 1024  # top-p sorts this many ids first, and all ids only if these do not reach it


def sample(logits: Tensor, settings: Tensor, seeds: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """logits [n, vocab] float32, settings [n, NUM_SETTINGS], seeds and lengths [n] int64 -> tokens [n] int64, and the
    largest logit of each row [n]. If that is not finite, the row has no valid token, and its entry is undefined.
    """
    largest, tokens = logits.max(dim=-1)
    is_random = (settings[:, TEMPERATURE] > 0) & largest.isfinite()
    for row in is_random.nonzero().flatten().tolist():
        tokens[row] = sample_row(logits[row], settings[row].tolist(), seeds[row], lengths[row])
    return tokens, largest


def sample_row(logits: Tensor, settings: list[float], seed: Tensor, length: Tensor) -> Tensor:
    """logits [vocab] -> the token, []. Of equal scores the lowest id wins."""
    temperature, top_k, top_p, floor = settings
    mask = sampling_mask(logits, temperature, int(top_k), top_p, floor)
    scaled = (logits - logits.max()) / temperature
    scores = scaled + gumbel(seed, length, len(logits))
    return scores.masked_fill(~mask, -torch.inf).argmax()


def gumbel(seed: Tensor, length: Tensor, vocab_size: int) -> Tensor:
    """seed [], length [] -> standard Gumbel noise for each id, [vocab_size] float32.

    A word becomes a uniform number v in (0, 1) that is precise next to 0, where the noise is large: -log(-log(1 - v)).
    """
    words = token_words(seed, length, vocab_size)
    uniform = (words.float() * 2.0**-32 + 2.0**-33).clamp(max=1 - 2.0**-24)
    return -(-torch.log1p(-uniform.double())).log().float()


def sampling_mask(logits: Tensor, temperature: float, top_k: int, top_p: float, floor: float) -> Tensor:
    """The ids that min-p, top-k and top-p keep, [vocab] bool. Of equal logits at a cutoff, lower ids are kept."""
    below = logits - logits.max()
    mask = below >= floor
    if 0 < top_k < len(logits):
        ids = top_ids(logits, top_k)[:top_k]
        mask &= torch.zeros_like(mask).index_fill_(0, ids, True)
    if top_p < 1.0:
        scaled = (below / temperature).masked_fill(~mask, -torch.inf)
        mask &= top_p_mask(torch.softmax(scaled, -1), logits, top_p)
    return mask & (logits > -torch.inf)


def top_ids(logits: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest logits, and of those equal to the last: largest first, of equals the lowest id."""
    least = torch.topk(logits, count).values[-1]
    ids = (logits >= least).nonzero().flatten()
    return ids[logits[ids].sort(descending=True, stable=True).indices]


def top_p_mask(probabilities: Tensor, logits: Tensor, top_p: float) -> Tensor:
    """Ids from the largest logit on, until their probabilities add up to `top_p` or more, [vocab] bool."""
    ids = top_ids(logits, min(TOP_FIRST, len(logits)))
    if probabilities[ids].double().sum() < top_p:
        ids = logits.sort(descending=True, stable=True).indices
    values = probabilities[ids].double()
    before = values.cumsum(-1) - values
    kept = ids[(before < top_p) & (values > 0)]
    return torch.zeros_like(probabilities, dtype=torch.bool).index_fill_(0, kept, True)
