"""Structure: how a `Transformer` is wired, in one form for all families. The defaults are Llama's.

Sizes are in `ModelConfig`. The readers in `weights/json_classics.py`, `json_modern.py` and `gguf_families.py` choose a
family's values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Structure:
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False  # of LayerNorms
    norms: Literal["before", "after", "both"] = "before"  # where: before attention and MLP, after them, or both
    parallel: bool = False  # attention and MLP read the same state, and both are added to it
    shared_norm: bool = False  # a parallel block has one norm for attention and MLP
    qk_norm: Literal["head", "whole"] | None = None  # of each head of q and k, or of all heads together

    qkv_groups: int = 0  # q, k and v are one stored matrix of as many groups (`fused_parts`); 0: three matrices
    gated: bool = True  # the MLP has a gate
    fused_gate_up: bool = False  # gate and up are one stored matrix
    transposed: bool = False  # matrices of layers are stored as (in, out)

    slopes: tuple[float, ...] | None = None  # ALiBi: one a head
    unrotated: tuple[int, ...] = ()  # layers that do not rotate
    num_positions: int = 0  # rows of the table of learned positions; 0: none
    position_offset: int = 0  # rows of that table before position 0

    embedding_norm: bool = False
    embedding_scale: float | None = None  # rounded to the weights' type
    logit_scale: float | None = None
    head_bias: bool = False  # of the output matrix

    @property
    def positions(self) -> Literal["rope", "alibi", "learned"]:
        """What tells a model where a token is."""
        if self.slopes is not None:
            return "alibi"
        return "learned" if self.num_positions else "rope"

    @property
    def rotates(self) -> bool:
        return self.positions == "rope"
