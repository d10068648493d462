"""Scores: what tokens were sampled from, to hold two runs of the same requests against each other bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire.engine.batch import Samples


@dataclass
class Scores:
    """The logits that each position of each request was sampled from. One sampled twice must be so from the same."""

    found: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def keep(self, logits: Any, samples: Samples) -> None:
        for row, request, length in zip(torch.as_tensor(logits), samples.requests, samples.lengths, strict=True):
            place = request.id, length
            assert torch.equal(self.found.setdefault(place, row.clone()), row), place

    def check(self, expected: Scores) -> None:
        assert self.found
        assert self.found.keys() == expected.found.keys()
        for place, row in self.found.items():
            assert torch.equal(row, expected.found[place]), place
