"""Routing and ExpertWeights: the arguments of the ops `route` and `experts`, which compute a mixture of experts.

`layers/moe.py` makes them from a configuration; each backend's ops read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from quire.kernels.arrays import Array

ExpertActivation = Literal["silu", "gelu_tanh", "clamped_silu"]


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts follow from its logits, one for each expert.

    A score is the softmax or the sigmoid of a logit. With `num_groups` > 1 only the experts of the `top_groups` best
    groups are candidates; a group's score is the sum of its `group_scores` largest. Then the `top_k` best candidates
    are chosen, of equals the first. Their scores, divided by their sum if `normalize`, times `factor`, are the weights.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_scores: int = 1

    def __post_init__(self) -> None:
        assert 0 < self.top_k <= self.num_experts, self
        assert self.num_experts % self.num_groups == 0, self
        assert 0 < self.top_groups <= self.num_groups, self
        assert self.top_k <= self.top_groups * (self.num_experts // self.num_groups), self
        assert self.num_groups == 1 or 0 < self.group_scores <= self.num_experts // self.num_groups, self


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The matrices of all experts: gate and up of expert 0, then of expert 1, and so on, in one weight.

    "clamped_silu" is gpt-oss's: gate and up are limited to `limit`, and silu(1.702 * gate) / 1.702 * (up + 1).
    """

    num_experts: int
    gate_up: Any  # a Weight [num_experts * 2 * size, hidden_size]
    down: Any  # a Weight [num_experts * hidden_size, size]
    activation: ExpertActivation = "silu"
    gate_up_bias: Array | None = None  # [num_experts * 2 * size]
    down_bias: Array | None = None  # [num_experts * hidden_size]
    limit: float = 0.0

    @property
    def size(self) -> int:
        """The inner size of one expert."""
        size: int = self.down.shape[1]
        return size

    @property
    def hidden_size(self) -> int:
        size: int = self.gate_up.shape[1]
        return size
