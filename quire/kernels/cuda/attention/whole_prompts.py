"""Latent attention of whole prompts, un-absorbed: keys and values of all heads are computed from the latents of the
step, and torch's attention (cuDNN's) takes one prompt at a time. A prompt of 8,192 tokens takes a third of the
operations of absorbed attention.

It is for steps that consist of long prompts without cached tokens, which are launched op by op. Captured steps do not
know their rows, and exact engines would get other bits for a prompt than for its chunks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.paging import Paging

MIN_TOKENS = 512  # of each prompt


def are_whole_prompts(paging: Paging) -> bool:
    """Whether all rows are long prompts whose first token is in this step. The host's lists are empty in captures."""
    counts = [stop - start for start, stop in pairwise(paging.host_query_starts)]
    return bool(counts) and counts == paging.host_seq_lens and min(counts) >= MIN_TOKENS and paging.paths is None


def attend_to_prompts(
    q: Tensor, latents: Tensor, absorb: Any, values: Any, paging: Paging, scale: float
) -> Tensor | None:
    """q [tokens, heads, key_dim + rotated], latents [tokens, rank + rotated], after norm and rotation; weights absorb
    [heads * rank, key_dim] and values [heads * value_dim, rank] of `LatentAttention` -> [tokens, heads, value_dim]"""
    if absorb.data is None or values.data is None or not are_whole_prompts(paging):
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel  # not in the stub of `launch/torch_stub.py`

    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    tokens, heads, _ = q.shape
    rank = values.shape[1]
    latent, end = latents[:, :rank], latents[:, rank:]
    each = latent.expand(heads, tokens, rank)
    k = torch.cat((torch.bmm(each, absorb.data.view(heads, rank, -1)), end.expand(heads, *end.shape)), dim=2)
    v = torch.bmm(each, values.data.view(heads, -1, rank).transpose(1, 2))
    out = torch.empty(tokens, heads, v.shape[2], dtype=q.dtype, device=q.device)
    with sdpa_kernel(backends, set_priority=True):
        for start, stop in pairwise(paging.host_query_starts):
            own = slice(start, stop)
            found = functional.scaled_dot_product_attention(
                q[own].transpose(0, 1)[None], k[None, :, own], v[None, :, own], is_causal=True, scale=scale
            )
            out[own] = found[0].transpose(0, 1)
    return out
