"""The cross entropy of one distribution against another, and its gradient, in one pass over their logits. Draft heads
are trained with it (`train/vocabulary.py`); the engine does not use it.

Rows are the anchors of dialogues. A row's logits are those of the draft vocabulary and those of the dialogue's own
tokens, of which it has the ones that occur up to the anchor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, OWN_BLOCK = 2048, 128
NUM_WARPS = 8


@triton.jit
def _add(largest, total, x):
    """A running maximum, and the sum of exponentials relative to it."""
    following = tl.maximum(largest, tl.max(x, 0))
    return following, total * tl.exp(largest - following) + tl.sum(tl.exp(x - following), 0)


@triton.jit
def _load(pointers, inside):
    return tl.load(pointers, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit(do_not_specialize=["num_own", "num_anchors"])  # each batch has others
def _soft_cross_entropy(
    known, known_own, products, products_own, first, anchors, weights, losses, num_ids, num_own, num_anchors,
    BLOCK: tl.constexpr, OWN_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    weight, anchor = tl.load(weights + row), tl.load(anchors + row)
    known, products = known + row * num_ids, products + row * num_ids
    known_own, products_own = known_own + row * num_own, products_own + row * num_own
    first += row // num_anchors * num_own
    lanes, own_lanes = tl.arange(0, BLOCK), tl.arange(0, OWN_BLOCK)
    used_ids, used_own = tl.where(weight > 0, num_ids, 0), tl.where(weight > 0, num_own, 0)
    largest, total = tl.full((), -1e30, tl.float32), tl.full((), 0.0, tl.float32)  # of the wanted distribution
    its_largest, its_total = tl.full((), -1e30, tl.float32), tl.full((), 0.0, tl.float32)  # of the head's
    for start in range(0, num_ids, BLOCK):
        inside = start + lanes < used_ids
        largest, total = _add(largest, total, _load(known + start + lanes, inside))
        its_largest, its_total = _add(its_largest, its_total, _load(products + start + lanes, inside))
    for start in range(0, num_own, OWN_BLOCK):
        inside = start + own_lanes < used_own
        inside &= tl.load(first + start + own_lanes, mask=inside, other=0) <= anchor
        largest, total = _add(largest, total, _load(known_own + start + own_lanes, inside))
        its_largest, its_total = _add(its_largest, its_total, _load(products_own + start + own_lanes, inside))
    mean = tl.full((), 0.0, tl.float32)  # of the head's logits under the wanted distribution
    for start in range(0, num_ids, BLOCK):
        inside = start + lanes < used_ids
        wanted, x = _load(known + start + lanes, inside), _load(products + start + lanes, inside)
        wanted = tl.where(inside, tl.exp(wanted - largest) / total, 0.0)
        mean += tl.sum(tl.where(inside, wanted * x, 0.0), 0)
        error = tl.where(inside, weight * (tl.exp(x - its_largest) / its_total - wanted), 0.0)
        tl.store(products + start + lanes, error, mask=start + lanes < num_ids)
    for start in range(0, num_own, OWN_BLOCK):
        inside = start + own_lanes < used_own
        inside &= tl.load(first + start + own_lanes, mask=inside, other=0) <= anchor
        wanted, x = _load(known_own + start + own_lanes, inside), _load(products_own + start + own_lanes, inside)
        wanted = tl.where(inside, tl.exp(wanted - largest) / total, 0.0)
        mean += tl.sum(tl.where(inside, wanted * x, 0.0), 0)
        error = tl.where(inside, weight * (tl.exp(x - its_largest) / its_total - wanted), 0.0)
        tl.store(products_own + start + own_lanes, error, mask=start + own_lanes < num_own)
    tl.store(losses + row, tl.where(weight > 0, weight * (its_largest + tl.log(its_total) - mean), 0.0))


def soft_cross_entropy(
    known: Tensor, known_own: Tensor, products: Tensor, products_own: Tensor, first: Tensor, anchors: Tensor,
    weights: Tensor,
) -> Tensor:  # fmt: skip
    """The losses of anchors, with their weights, [dialogues, anchors]. The gradient replaces `products`.

    known, products [dialogues, anchors, ids] and known_own, products_own [dialogues, anchors, own]: the logits of the
    wanted distribution and of the head's. first [dialogues, own]: where each own token occurs first. anchors, weights
    [dialogues, anchors].
    """
    tensors = (known, known_own, products, products_own, first, anchors, weights)
    assert all(tensor.is_contiguous() for tensor in tensors)
    rows, num_anchors, num_ids = known.shape
    losses = torch.empty(rows, num_anchors, dtype=torch.float32, device=known.device)
    _soft_cross_entropy[(rows * num_anchors,)](
        *tensors, losses, num_ids, known_own.shape[2], num_anchors, BLOCK, OWN_BLOCK, num_warps=NUM_WARPS
    )
    return losses
