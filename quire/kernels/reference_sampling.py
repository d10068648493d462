"""The sampling rule of `sampling.py`, and the log probabilities of tokens, in plain torch. Ops of `reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.philox import token_words
from quire.kernels.sampling import TEMPERATURE

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


Logprobs = tuple[Tensor, Tensor, Tensor, Tensor]


def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """logits [n, vocab] float32, tokens [n] -> the log probability of each row's token [n] float32, its rank among all
    tokens [n] int64, from 1, and the `num_top` likeliest tokens and their log probabilities, [n, num_top] each,
    likeliest first. A row's result does not depend on other rows.
    """
    all_logprobs = torch.log_softmax(logits, -1)
    own = all_logprobs.gather(1, tokens[:, None])
    ranks = (all_logprobs > own).sum(1) + 1
    top = top_tokens(all_logprobs, min(num_top, logits.shape[1]))
    return own[:, 0], ranks, top, all_logprobs.gather(1, top)


def beam_candidates(
    logits: Tensor, processed: Tensor | None, count: int, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The likeliest tokens of each row, for beam search. logits [n, vocab] float32; a token is banned if its logit in
    `processed` is minus infinity.

    Returns tokens [n, count] int64, their log probabilities [n, count] (minus infinity if banned), their ranks among
    all tokens [n, count], and the likeliest of all tokens with their log probabilities, [n, num_top] each. Tokens of
    equal probability are in the order of their ids.
    """
    raw = all_logprobs = torch.log_softmax(logits, -1)
    if processed is not None:
        all_logprobs = raw.masked_fill(processed == -torch.inf, -torch.inf)
    count = min(count, logits.shape[1])
    tokens = sort_keys(all_logprobs).topk(count, largest=False).values & 0xFFFFFFFF  # ties by id, for any `count`
    values = all_logprobs.gather(1, tokens)
    top = top_tokens(raw, min(num_top, raw.shape[1]))
    ranks = torch.arange(1, count + 1, device=tokens.device).expand_as(tokens)
    if num_top and raw is not all_logprobs:
        ranks = torch.stack([(raw > column[:, None]).sum(1) + 1 for column in values.unbind(1)], 1)
    return tokens, values, ranks, top, raw.gather(1, top)


def top_tokens(all_logprobs: Tensor, count: int) -> Tensor:
    """[n, vocab] -> the likeliest tokens of each row, [n, count]. Ties are in the order of ids."""
    return sort_keys(all_logprobs).topk(count, largest=False).values & 0xFFFFFFFF


def sort_keys(all_logprobs: Tensor) -> Tensor:
    """[n, vocab] -> int64 keys in ascending order of (-logprob, id), with the id in the lower 32 bits.

    A log probability is not above zero, so its bits without the sign increase as it decreases.
    """
    order = (all_logprobs.view(torch.int32) & 0x7FFFFFFF).long() << 32
    return order | torch.arange(all_logprobs.shape[1], device=all_logprobs.device)
