"""The op `route`: a token's experts and their weights from the router's logits. A program computes one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous
from quire.kernels.routing import Routing

# Below all scores, in this order: NaN, experts outside the best groups, and what is chosen already. So ids are always
# valid, even of a token whose logits are NaN, as those of padding rows may be.
NOT_A_NUMBER, NO_CANDIDATE = tl.constexpr(-1e30), tl.constexpr(-2e30)
EPSILON = tl.constexpr(1e-20)


@triton.jit
def _keep_top_groups(choice, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP: tl.constexpr, SUMMED: tl.constexpr):
    """The scores for the choice, [GROUPS * SIZE], without experts that are not in one of the best groups."""
    grouped = tl.reshape(choice, [GROUPS, SIZE])
    members, groups = tl.arange(0, SIZE), tl.arange(0, GROUPS)
    left = grouped
    scores = tl.zeros([GROUPS], tl.float32)
    for _ in tl.static_range(SUMMED):
        best, index = tl.max(left, axis=1, return_indices=True)
        scores += best
        left = tl.where(members[None, :] == index[:, None], float("-inf"), left)
    kept = groups < 0
    for _ in tl.static_range(TOP):
        group = tl.argmax(tl.where(kept, float("-inf"), scores), axis=0)
        kept |= groups == group
    return tl.reshape(tl.where(kept[:, None], grouped, NO_CANDIDATE), [GROUPS * SIZE])


@triton.jit
def _route(
    logits, bias, ids, weights, num_groups, group_size, factor, TOP_K: tl.constexpr, IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr, NORMALIZE: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_SCORES: tl.constexpr, RANKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    places, ranks = tl.arange(0, GROUPS * SIZE), tl.arange(0, RANKS)  # groups are padded to powers of two
    exists = (places // SIZE < num_groups) & (places % SIZE < group_size)
    experts = places // SIZE * group_size + places % SIZE
    if HAS_BIAS:
        shift = tl.load(bias + experts, mask=exists, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    wide = tl.load(logits + token * num_groups * group_size + experts, mask=exists, other=float("-inf")).to(tl.float32)
    if IS_SIGMOID:
        scores = tl.sigmoid(wide)
    else:
        powers = tl.exp(wide - tl.max(wide, axis=0))
        scores = powers / tl.sum(powers, axis=0)
    choice = scores + shift if HAS_BIAS else scores
    choice = tl.where(choice == choice, choice, NOT_A_NUMBER)
    choice = tl.where(exists, choice, float("-inf"))
    if GROUPS > 1:
        choice = tl.where(exists, _keep_top_groups(choice, GROUPS, SIZE, TOP_GROUPS, GROUP_SCORES), float("-inf"))
    chosen_ids = tl.zeros([RANKS], tl.int32)
    chosen = tl.zeros([RANKS], tl.float32)
    total = 0.0
    for rank in tl.static_range(TOP_K):
        place = tl.argmax(choice, axis=0)
        score = tl.sum(tl.where(places == place, scores, 0.0), axis=0)
        chosen_ids = tl.where(ranks == rank, place // SIZE * group_size + place % SIZE, chosen_ids)
        chosen = tl.where(ranks == rank, score, chosen)
        total += score
        choice = tl.where(places == place, float("-inf"), choice)
    if NORMALIZE:
        chosen = chosen / (total + EPSILON)
    tl.store(ids + token * TOP_K + ranks, chosen_ids, mask=ranks < TOP_K)
    tl.store(weights + token * TOP_K + ranks, chosen * factor, mask=ranks < TOP_K)


def route(
    logits: Tensor, bias: Tensor | None, routing: Routing, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As in the reference; ids are int32."""
    tokens, count = logits.shape
    ids = torch.empty(tokens, routing.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, routing.top_k, dtype=torch.float32, device=logits.device)
    assert logits.is_contiguous()
    group_size = count // routing.num_groups
    groups, size = triton.next_power_of_2(routing.num_groups), triton.next_power_of_2(group_size)
    if tokens:
        _route[(tokens,)](
            logits, logits if bias is None else bias, ids, weights, routing.num_groups, group_size, routing.factor,
            TOP_K=routing.top_k, IS_SIGMOID=routing.scoring == "sigmoid", HAS_BIAS=bias is not None,
            NORMALIZE=routing.normalize, GROUPS=groups, SIZE=size, TOP_GROUPS=routing.top_groups,
            GROUP_SCORES=routing.group_scores, RANKS=triton.next_power_of_2(routing.top_k),
            num_warps=max(1, groups * size // 128), **pdl_options(),
        )  # fmt: skip
    return ids, weights if factors is None else weights * factors[ids.long()]
