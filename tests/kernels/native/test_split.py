"""A model on two tapes gives the bits of the whole model: at once, token by token, and row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.cpu.split import SplitModel
from quire.kernels.paging import Paging, skip_tokens, tree_paths
from tests.kernels.native.test_recorded import MAX_TOKENS, each_family, native_cache, run_recorded, run_steps
from tests.tools.native import FITTING, all_of, as_arrays, each_cache_type, kernels_of, mixed, native_model

pytestmark = pytest.mark.cpu

LAYERS = (1, 2)  # of 3


class OnTensors:
    """A split model over a cache of tensors, called with tensors."""

    def __init__(self, split: SplitModel, layers: list[Any]) -> None:
        self.split = split
        self.layers = layers

    def __call__(self, tokens: Tensor, positions: Tensor, paging: Paging, kv: Any) -> Tensor:
        return torch.from_numpy(self.run(*map(as_arrays, (tokens, positions, paging))))

    def run(self, tokens: Any, positions: Any, paging: Any) -> Any:
        return self.split(tokens, positions, paging, self.layers)


class ByToken(OnTensors):
    """Each token's first layers in a pass of their own, as drafts are made, and the later layers at once."""

    def run(self, tokens: Any, positions: Any, paging: Any) -> Any:
        states = np.empty((len(tokens), self.split.hidden_size), np.float32)
        for row, (start, stop) in enumerate(zip(paging.host_query_starts, paging.host_query_starts[1:], strict=False)):
            for index in range(start, stop):
                (_, one) = skip_tokens(one_row(paging, row, index + 1), [index - start])
                states[index] = self.split.first(tokens[index : index + 1], positions[index : index + 1], one)
        return self.split.second(states, positions, paging)


class ByRow(OnTensors):
    """The first layers at once, and the later ones in two passes, of other rows each."""

    def run(self, tokens: Any, positions: Any, paging: Any) -> Any:
        states = self.split.first(tokens, positions, paging).copy()
        counts = np.diff(paging.host_query_starts)
        out = np.full_like(states, np.nan)
        for parity in (1, 0):
            skips = [count if row % 2 == parity else 0 for row, count in enumerate(counts.tolist())]
            index, rest = skip_tokens(paging, skips)
            out[index] = self.split.second(states[index], positions[index], rest)
        return out


def one_row(paging: Any, row: int, stop: int) -> Paging:
    """The tokens of one row, those before `stop`."""
    start, end = paging.host_query_starts[row : row + 2]
    length = paging.host_seq_lens[row] - (end - stop)
    return Paging(
        np.array([0, stop - start], np.int32), np.array([length], np.int32),
        [table[row : row + 1] for table in paging.block_tables],
        [slots[start:stop] for slots in paging.slot_mapping], paging.block_size, [0, stop - start], [length],
    )  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("way", [OnTensors, ByToken, ByRow])
@each_family
@each_cache_type
def test_parts_give_the_bits_of_the_whole(family: str, way: Any, layer: int, kind: str) -> None:
    config, ops = FITTING[family], kernels_of()
    for formats in (mixed, all_of("q8_0")):
        model = native_model(config, ops, formats)
        expected = run_recorded(config, ops, model, kind)
        cache = native_cache(config, kind)
        layers = [as_arrays(each) for each in cache.layers]
        assert ops.native is not None
        split = SplitModel(model, layers, ops.native, MAX_TOKENS, layer)
        found = run_steps(way(split, layers), cache)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_taps_of_both_parts() -> None:
    config, ops = FITTING["llama"], kernels_of()
    model, caches = native_model(config, ops), [native_cache(config, "float32") for _ in range(2)]
    layers = [[as_arrays(each) for each in cache.layers] for cache in caches]
    assert ops.native is not None
    split = SplitModel(model, layers[0], ops.native, MAX_TOKENS, 2, (0, 1, 2))
    recorded = ops.record(model, layers[1], MAX_TOKENS, (0, 1, 2))
    taps: list[list[Any]] = [[], []]

    class Kept(OnTensors):
        def run(self, *arguments: Any) -> Any:
            result = split(*arguments, layers[0])
            taps[0] += [tap.copy() for tap in split.taps]
            recorded(*arguments, layers[1])
            taps[1] += [tap.copy() for tap in recorded.taps]
            return result

    run_steps(Kept(split, layers[0]), caches[0])
    assert len(taps[0]) == 12
    assert all(np.array_equal(*pair) for pair in zip(*taps, strict=True))


def test_tokens_that_are_skipped() -> None:
    starts, lens = [0, 5, 6, 9], [9, 7, 8]
    paths = tree_paths(starts, [None, None, [-1, -1]])
    paging = Paging(
        np.array(starts, np.int32), np.array(lens, np.int32), [np.arange(9, dtype=np.int32).reshape(3, 3)],
        [np.arange(20, 29)], 4, starts, lens, paths,
    )  # fmt: skip
    index, rest = skip_tokens(paging, [3, 1, 0])
    assert index.tolist() == [3, 4, 6, 7, 8]
    assert rest.host_query_starts == rest.query_starts.tolist() == [0, 2, 5]
    assert rest.host_seq_lens == rest.seq_lens.tolist() == [9, 8]
    assert rest.block_tables[0].tolist() == [[0, 1, 2], [6, 7, 8]]
    assert rest.slot_mapping[0].tolist() == [23, 24, 26, 27, 28]
    assert rest.paths is not None
    assert rest.paths.tolist() == paths[[3, 4, 6, 7, 8]].tolist()
    index, rest = skip_tokens(paging, [5, 1, 3])
    assert not len(index)
    assert rest.host_query_starts == [0]
