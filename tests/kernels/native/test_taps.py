"""Taps: the hidden states between layers, against a plain loop over the layers, on quire's kernels and in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels import select_torch
from tests.kernels.native.test_recorded import (
    MAX_TOKENS,
    STEPS,
    cache_options,
    each_family,
    native_cache,
    run_steps,
)
from tests.tools.native import FITTING, RecordedOnTensors, kernels_of, native_model, tensor_kernels_of
from tests.tools.paged import PagedCache
from tests.tools.tiny import tiny_model

pytestmark = pytest.mark.cpu

LAYERS = (0, 2)


class Loop:
    """A model, layer by layer. It keeps the sum of x and the residual after each layer."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.steps: list[list[Tensor]] = []

    def __call__(self, tokens: Tensor, positions: Tensor, paging: Any, kv: Sequence[Any]) -> Tensor:
        x, residual = self.model.embed(tokens, positions), None
        sums = []
        for layer, cache in zip(self.model.layers, kv, strict=True):
            x, residual = layer(x, residual, positions, paging, cache)
            sums.append(x + residual)
        self.steps.append(sums)
        return self.model.norm.add(x, residual)[0]


class Kept:
    """A recorded model. It keeps a copy of the taps after each step."""

    def __init__(self, model: Any, source: Any) -> None:
        self.model = model
        self.source = source  # of the taps
        self.steps: list[list[Tensor]] = []

    def __call__(self, *arguments: Any) -> Tensor:
        hidden: Tensor = self.model(*arguments)
        self.steps.append([torch.as_tensor(tap).clone() for tap in self.source.taps])
        return hidden


def check(kept: Kept, loop: Loop) -> None:
    assert len(kept.steps) == len(loop.steps) == len(STEPS)
    for taps, sums in zip(kept.steps, loop.steps, strict=True):
        assert len(taps) == len(LAYERS)
        for tap, layer in zip(taps, LAYERS, strict=True):
            assert torch.equal(tap, sums[layer])


@each_family
def test_taps_of_a_recorded_model(family: str) -> None:
    config, ops = FITTING[family], kernels_of()
    cache = native_cache(config, "float32")
    recorded = RecordedOnTensors(ops, native_model(config, ops), cache, MAX_TOKENS, LAYERS)
    kept, loop = Kept(recorded, recorded.recorded), Loop(native_model(config, tensor_kernels_of()))
    hidden = run_steps(kept, cache)
    expected = run_steps(loop, native_cache(config, "float32"))
    assert all(torch.equal(*pair) for pair in zip(hidden, expected, strict=True))
    check(kept, loop)


@each_family
def test_taps_in_torch(family: str) -> None:
    config, ops = FITTING[family], select_torch("cpu")
    model, caches = tiny_model(config), [PagedCache(**cache_options(config)) for _ in range(2)]
    tapped = ops.record(model, caches[0].layers, MAX_TOKENS, LAYERS)
    kept, loop = Kept(tapped, tapped), Loop(model)
    hidden, expected = run_steps(kept, caches[0]), run_steps(loop, caches[1])
    assert all(torch.equal(*pair) for pair in zip(hidden, expected, strict=True))
    check(kept, loop)


def test_a_model_without_taps_is_the_model_itself() -> None:
    model = tiny_model(FITTING["llama"])
    assert select_torch("cpu").record(model, [], MAX_TOKENS) is model
