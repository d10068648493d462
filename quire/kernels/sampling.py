"""Sampling: how a token is chosen from a row of logits. This is the reference; backends have kernels of the same rule.

Temperature 0 takes the largest logit. Otherwise min-p, top-k and top-p keep some of the ids. Of these the token is

    argmax(logit / temperature + gumbel(seed, position, id))

which draws from the softmax (the Gumbel-max trick). The noise belongs to the id: a small change of the logits, by other
kernels, number formats or a draft model, changes the token only where two candidates are about equally good.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.philox import token_words

# Columns of `settings`, float64.
TEMPERATURE = 0  # 0 is greedy
TOP_K = 1  # 0 keeps all
TOP_P = 2
FLOOR = 3  # min-p as the least difference to the largest logit that a kept one may have: a number below zero
NUM_SETTINGS = 4

IN_PROMPT = 1 << 30  # is added to the count of a token that occurs in the prompt

TOP_FIRST = 1024  # most of the probability is usually among so many tokens: they are tried before all are sorted


def sample(logits: Tensor, settings: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """logits [n, vocab] float32, settings [n, NUM_SETTINGS], seeds and positions [n] int64 -> tokens [n] int64, and the
    largest logit of each row [n]. Where that is not finite the row has no token to choose, and its entry means nothing.
    """
    largest, tokens = logits.max(dim=-1)
    is_drawn = (settings[:, TEMPERATURE] > 0) & largest.isfinite()
    for row in is_drawn.nonzero().flatten().tolist():
        tokens[row] = draw(logits[row], settings[row].tolist(), seeds[row], positions[row])
    return tokens, largest


def draw(logits: Tensor, settings: list[float], seed: Tensor, position: Tensor) -> Tensor:
    """logits [vocab] -> the token, []. Of equal scores the lowest id wins."""
    temperature, top_k, top_p, floor = settings
    kept = keep(logits, temperature, int(top_k), top_p, floor)
    scaled = (logits - logits.max()) / temperature
    scores = scaled + gumbel(seed, position, len(logits))
    return scores.masked_fill(~kept, -torch.inf).argmax()


def gumbel(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """seed [], position [] -> standard Gumbel noise for each id, [vocab_size] float32.

    A word becomes a uniform number v in (0, 1) that is precise next to 0, where the noise is large: -log(-log(1 - v)).
    """
    words = token_words(seed, position, vocab_size)
    uniform = (words.float() * 2.0**-32 + 2.0**-33).clamp(max=1 - 2.0**-24)
    return -(-torch.log1p(-uniform.double())).log().float()


def keep(logits: Tensor, temperature: float, top_k: int, top_p: float, floor: float) -> Tensor:
    """Which ids min-p, top-k and top-p keep, [vocab] bool. Of equal logits at a cut, those with lower ids are kept."""
    below = logits - logits.max()
    kept = below >= floor
    if 0 < top_k < len(logits):
        among = rank(logits, top_k)[:top_k]
        kept &= torch.zeros_like(kept).index_fill_(0, among, True)
    if top_p < 1.0:
        scaled = (below / temperature).masked_fill(~kept, -torch.inf)
        kept &= keep_mass(torch.softmax(scaled, -1), logits, top_p)
    return kept & (logits > -torch.inf)


def rank(logits: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest logits, and those equal to the last: likeliest first, of equals the lowest."""
    least = torch.topk(logits, count).values[-1]
    ids = (logits >= least).nonzero().flatten()
    return ids[logits[ids].sort(descending=True, stable=True).indices]


def keep_mass(probabilities: Tensor, logits: Tensor, top_p: float) -> Tensor:
    """Keep ids from the largest logit on until their probabilities reach `top_p`, the one that reaches it included."""
    ids = rank(logits, min(TOP_FIRST, len(logits)))
    if probabilities[ids].double().sum() < top_p:
        ids = logits.sort(descending=True, stable=True).indices
    values = probabilities[ids].double()
    before = values.cumsum(-1) - values
    kept = ids[(before < top_p) & (values > 0)]
    return torch.zeros_like(probabilities, dtype=torch.bool).index_fill_(0, kept, True)
