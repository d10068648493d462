"""Models put on a tape: what they compute is what the reference computes, and bit for bit what the same ops give one by
one, so that no value was written over another that is still needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels import Kernels, select_torch
from quire.kernels.torch_arrays import TorchArrays
from quire.models.config import ModelConfig
from quire.models.registry import MODELS
from tests.tools.native import (
    CACHE_TYPES,
    FITTING,
    THREADS,
    NativePagedCache,
    PanelSource,
    RecordedOnTensors,
    all_of,
    as_arrays,
    each_isa,
    kernels_of,
    mixed,
    native_model,
    native_of,
    ops_of,
    tensor_kernels_of,
)
from tests.tools.paged import PagedCache

pytestmark = pytest.mark.cpu

REFERENCE = replace(select_torch("meta"), arrays=TorchArrays("cpu"))
MAX_TOKENS = 40
each_family = pytest.mark.parametrize("family", FITTING)

Steps = Sequence[Sequence[tuple[int, int]]]
STEPS: Steps = [[(0, 5), (1, 1)], [(1, 30), (2, 9), (0, 1)], [(0, 1), (1, 1), (2, 1)], [(2, 17), (1, 1), (0, 0)]]
TOKENS = torch.randint(0, 97, (3, 64), generator=torch.Generator().manual_seed(3))


def cache_options(config: ModelConfig) -> dict[str, Any]:
    windows = sorted(set(config.windows), key=lambda window: window or 0)
    groups = [windows.index(window) for window in config.windows]
    return {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim, "groups": groups, "windows": windows}


def run_steps(model: Any, cache: PagedCache, steps: Steps = STEPS, texts: Tensor = TOKENS) -> list[Tensor]:
    """The hidden states of each step."""
    found = []
    for rows in steps:
        paging = cache.step(rows)
        positions = cache.positions(rows)
        starts = [(sequence, cache.lengths[sequence] - count, count) for sequence, count in rows]
        tokens = torch.cat([texts[sequence, start : start + count] for sequence, start, count in starts])
        found.append(model(tokens, positions, paging, cache.layers).clone())
    return found


def run_recorded(config: ModelConfig, ops: Kernels, model: Any, kind: str = "float32") -> list[Tensor]:
    cache = native_cache(config, kind)
    return run_steps(RecordedOnTensors(ops, model, cache, MAX_TOKENS), cache)


def native_cache(config: ModelConfig, kind: str, block_size: int = 4) -> NativePagedCache:
    return NativePagedCache(ops_of(), kind, **cache_options(config), block_size=block_size)


def run_reference(config: ModelConfig, formats: Any) -> tuple[Any, list[Tensor]]:
    """The same numbers in the same formats, unpacked, on the reference's ops."""
    model = MODELS[config.family](config, PanelSource(native_of(), formats, dense=True), REFERENCE)
    return model, run_steps(model, PagedCache(**cache_options(config)))


@each_isa
@each_family
@pytest.mark.parametrize("format", ["f32", "bf16", "f16"])
def test_plain_formats_compute_what_the_reference_does(name: str, family: str, format: str) -> None:
    config, ops = FITTING[family], kernels_of(name)
    model = native_model(config, ops, all_of(format))
    plain, expected = run_reference(config, all_of(format))
    for out, hidden in zip(run_recorded(config, ops, model), expected, strict=True):
        torch.testing.assert_close(out, hidden, atol=2e-5, rtol=2e-5)
        logits = torch.from_numpy(model.head(out.numpy()))
        torch.testing.assert_close(logits, plain.head(hidden), atol=2e-5, rtol=2e-5)


@each_isa
@each_family
@pytest.mark.parametrize(("format", "kind"), [("q8_0", "float32"), ("q4_1", "bfloat16"), ("q8_0", "int8")])
def test_rounded_formats_and_caches_stay_near(name: str, family: str, format: str, kind: str) -> None:
    """Activations (and the cache) in few bits, against the same weights with all of them."""
    config, ops = FITTING[family], kernels_of(name)
    model = native_model(config, ops, all_of(format))
    _, expected = run_reference(config, all_of(format))
    for out, hidden in zip(run_recorded(config, ops, model, kind), expected, strict=True):
        assert (out - hidden).norm() < 0.05 * hidden.norm()


@each_isa
@each_family
@pytest.mark.parametrize(("kind", "threads"), list(zip(CACHE_TYPES, (*THREADS, 2), strict=True)))
def test_recorded_is_bit_for_bit_op_by_op(name: str, family: str, kind: str, threads: int) -> None:
    config, ops = FITTING[family], kernels_of(name, threads)
    model = native_model(config, ops, mixed)
    recorded = run_recorded(config, ops, model, kind)
    on_tensors = native_model(config, tensor_kernels_of(name, threads), mixed)
    for out, hidden in zip(recorded, run_steps(on_tensors, native_cache(config, kind)), strict=True):
        assert torch.equal(out, hidden)


@each_isa
@each_family
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_many_rows_are_computed_as_few_are(name: str, family: str, threads: int) -> None:
    """With many rows a thread takes some of them through several ops, in several passes if there are over 64 each."""
    config, ops = FITTING[family], kernels_of(name, threads)
    model = native_model(config, ops, mixed)
    texts = torch.randint(0, 97, (2, 300), generator=torch.Generator().manual_seed(4))

    def run(steps: Steps) -> Tensor:
        cache = native_cache(config, "float32", block_size=16)
        return torch.cat(run_steps(RecordedOnTensors(ops, model, cache, 300), cache, steps, texts))

    few = run([[(0, 10)]] * 29 + [[(0, 1)]])
    assert torch.equal(run([[(0, 50)], [(0, 33)], [(0, 97)], [(0, 111)]]), few)
    beside = run([[(0, 291), (1, 9)]])
    assert torch.equal(beside[:291], few)


@each_family
def test_blocks_of_any_size_give_the_same(family: str) -> None:
    config, ops = FITTING[family], kernels_of()
    model = native_model(config, ops)
    expected = run_recorded(config, ops, model)
    cache = native_cache(config, "float32", block_size=16)
    for out, hidden in zip(run_steps(RecordedOnTensors(ops, model, cache, MAX_TOKENS), cache), expected, strict=True):
        assert torch.equal(out, hidden)


def num_buffers(config: ModelConfig) -> int:
    ops = kernels_of()
    recorded = RecordedOnTensors(ops, native_model(config, ops), native_cache(config, "float32"), MAX_TOKENS)
    return len({id(storage.memory) for storage in recorded.recorded.tape._storages if storage.needed})


@each_family
def test_a_deeper_model_needs_no_more_buffers(family: str) -> None:
    """Up to some depth it may: free buffers are handed out in turn, whether their last user needed them or not."""
    config = FITTING[family]
    nine, many = (replace(config, num_layers=3 * n, windows=config.windows * n) for n in (3, 10))
    assert num_buffers(nine) == num_buffers(many)


def test_two_models_take_turns() -> None:
    first, second = FITTING["llama"], FITTING["gemma3"]
    ops = kernels_of()
    models = [(config, native_model(config, ops)) for config in (first, second)]
    expected = [run_recorded(config, ops, model) for config, model in models]
    caches = [native_cache(config, "float32") for config, _ in models]
    recorded = [
        RecordedOnTensors(ops, model, cache, MAX_TOKENS) for (_, model), cache in zip(models, caches, strict=True)
    ]
    for index, step in enumerate(STEPS):
        for own, cache, hidden in zip(recorded, caches, expected, strict=True):
            assert torch.equal(run_steps(own, cache, [step])[0], hidden[index])


def test_more_tokens_than_it_was_recorded_for_are_refused() -> None:
    config, ops = FITTING["llama"], kernels_of()
    cache = native_cache(config, "float32")
    recorded = RecordedOnTensors(ops, native_model(config, ops), cache, 4)
    with pytest.raises(AssertionError, match="5"):
        run_steps(recorded, cache, [[(0, 5)]])


def test_other_caches_than_it_was_recorded_for_are_refused() -> None:
    config, ops = FITTING["llama"], kernels_of()
    recorded = RecordedOnTensors(ops, native_model(config, ops), native_cache(config, "float32"), 8)
    recorded.layers = list(recorded.layers)
    with pytest.raises(AssertionError):
        run_steps(recorded, native_cache(config, "float32"), [[(0, 5)]])


def test_a_timed_run_names_every_op_and_computes_the_same() -> None:
    config, ops = FITTING["llama"], kernels_of()
    cache = native_cache(config, "float32")
    own = RecordedOnTensors(ops, native_model(config, ops), cache, 8)
    paging, positions, recorded = cache.step([(0, 5)]), torch.arange(5), own.recorded
    expected = own(TOKENS[0, :5], positions, paging, cache.layers).clone()
    times = recorded.tape.run_timed(*map(as_arrays, (TOKENS[0, :5], positions, paging)))
    assert len(times) == len(recorded.tape.ops)
    assert all(duration >= 0 for _, duration in times)
    assert torch.equal(torch.from_numpy(recorded._whole.result[:5]), expected)
