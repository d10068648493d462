"""KeptStates: hidden states of tokens whose first layers are computed, and whose later layers are not.

Drafts of self-speculation have them, and tokens that exited early. The step that computes the later layers
(`split_steps.py`) takes them, so the first layers are not computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.core.request import Request

Floats = NDArray[np.float32]


@dataclass(slots=True)
class Kept:
    """Consecutive tokens of a request, from position `first` on."""

    request: Request
    first: int
    num_preemptions: int
    tokens: list[int] = field(default_factory=list)
    states: list[Floats] = field(default_factory=list)


class KeptStates:
    """One `Kept` a request. A step uses those that are still valid, and drops all."""

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self, request: Request, first: int) -> None:
        self._kept[request.id] = Kept(request, first, request.num_preemptions)

    def add(self, request: Request, token: int, state: Floats) -> None:
        """The next token's state, [hidden_size]. It is copied."""
        kept = self._kept[request.id]
        kept.tokens.append(token)
        kept.states.append(state.copy())

    def find(self, request: Request, start: int, tokens: Sequence[int]) -> list[Floats]:
        """The states of the first tokens of a row, which begins at position `start`, as far as they are valid: these
        are its tokens, and it has not lost its blocks since. A block that is copied keeps its contents.
        """
        kept = self._kept.get(request.id)
        if kept is None or kept.request is not request or kept.first != start:
            return []
        if kept.num_preemptions != request.num_preemptions:
            return []
        count = 0
        for token, own in zip(kept.tokens, tokens, strict=False):
            if token != own:
                break
            count += 1
        return kept.states[:count]

    def drop(self, request_id: str) -> None:
        self._kept.pop(request_id, None)

    def reset(self) -> None:
        self._kept.clear()
