"""Swap in the engine: blocks that go to the host come back bit for bit, costs are measured, and an engine built with
host memory uses it. The same on a GPU is in tests/cuda/test_swap_cuda.py."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quire.config import EngineConfig
from quire.core.pace import Pace
from quire.core.params import SamplingParams
from quire.core.plan import Plan
from quire.core.request import Finish, Request
from quire.core.step_costs import StepCosts
from quire.core.swap import SwapCosts
from quire.engine import host_blocks, memory
from quire.engine.cache import CacheLayout, CacheTensors, lay_out, shape_blocks
from quire.engine.client import InProcess
from quire.engine.costs import time_copies
from quire.engine.engine import Engine
from quire.engine.memory import GIB, CacheSize, size_swap
from quire.errors import InvalidParams, NotEnoughMemory
from quire.kernels import select_torch
from quire.kernels.arrays import Arrays, NumpyArrays
from quire.kernels.cache_spec import BlockShape, KVCacheSpec
from quire.kernels.torch_arrays import TorchArrays
from tests.tools.mixed_specs import MIXED_SPECS
from tests.tools.tiny import CPU, TinyEngine

pytestmark = pytest.mark.cpu

HOST = TorchArrays("cpu")

SHAPES = {
    "float32": BlockShape((4, 2, 8), (4, 2, 8), "float32"),
    "k and v apart": BlockShape((3, 5), (2, 4), "bfloat16"),
    "odd bytes": BlockShape((3,), (7,), "int8"),
}


def layout_of(block: BlockShape, windows: Sequence[int | None] = (None,)) -> CacheLayout:
    return lay_out([KVCacheSpec(1, 1, window=window) for window in windows], [block] * len(windows))


LAYOUTS = {name: layout_of(block, [8, 8, None, 8]) for name, block in SHAPES.items()} | {
    name: lay_out(specs, shape_blocks(specs, select_torch(CPU), "bfloat16", 4)) for name, specs in MIXED_SPECS.items()
}


def fill(cache: CacheTensors) -> list[NDArray[np.uint8]]:
    """Random bytes everywhere, and copies of them."""
    for part in bytes_of(cache):
        part[...] = np.random.default_rng(1).integers(0, 256, part.shape, np.uint8)
    return [part.copy() for part in bytes_of(cache)]


def bytes_of(cache: CacheTensors) -> list[NDArray[np.uint8]]:
    """Views of the stacks, which are tensors or numpy arrays."""
    return [part.view(torch.uint8).numpy() if isinstance(part, torch.Tensor) else part.view(np.uint8)
            for part in cache._stacks]  # fmt: skip


@pytest.mark.parametrize("arrays", [HOST, NumpyArrays()], ids=["torch", "numpy"])
@pytest.mark.parametrize("piece_blocks", [1, 3, 100])
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_come_back_bit_for_bit(
    name: str, piece_blocks: int, arrays: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, rng = LAYOUTS[name], random.Random(2)
    monkeypatch.setattr(host_blocks, "PIECE_BYTES", piece_blocks * layout.block_bytes)
    cache = CacheTensors(layout, CacheSize(30, 4, 0, 12, 3), arrays, num_host_blocks=20)
    assert cache.host.blocks_per_piece == min(piece_blocks, 20)
    before = fill(cache)
    blocks, slots, targets = rng.sample(range(31), 12), rng.sample(range(20), 12), rng.sample(range(31), 12)
    cache.swap_blocks(list(zip(blocks, slots, strict=True)), [])
    for part in bytes_of(cache):
        part[...] = 0
    cache.swap_blocks([], list(zip(slots, targets, strict=True)))
    for part, kept in zip(bytes_of(cache), before, strict=True):
        expected = np.zeros_like(kept)
        expected[:, targets] = kept[:, blocks]
        assert np.array_equal(part, expected)


def test_what_goes_out_leaves_before_something_comes_in() -> None:
    cache = CacheTensors(layout_of(BlockShape((1,), (1,), "float32")), CacheSize(2, 1, 0, 2, 2), HOST, 2)
    cache.layers[0].k[1], cache.layers[0].k[2] = 5.0, 6.0
    cache.swap_blocks([(1, 0)], [])
    cache.swap_blocks([(2, 1)], [(0, 2), (1, 1)])
    assert cache.layers[0].k.flatten().tolist() == [0.0, 6.0, 5.0]


def test_memory_is_taken_as_slots_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_blocks, "PIECE_BYTES", 4 * 8)
    cache = CacheTensors(layout_of(BlockShape((1,), (1,), "float32")), CacheSize(9, 1, 0, 9, 9), HOST, 10)
    assert cache.host._pieces == []
    cache.swap_blocks([(1, 5)], [])
    assert [len(piece) for piece in cache.host._pieces] == [4, 4]
    cache.swap_blocks([(1, 9)], [])
    assert [len(piece) for piece in cache.host._pieces] == [4, 4, 2]


def test_a_trial_copy_is_timed_and_leaves_the_cache_as_it_was() -> None:
    cache = CacheTensors(layout_of(SHAPES["float32"]), CacheSize(9, 4, 0, 9, 9), HOST, 5)
    before = fill(cache)
    assert time_copies(cache, HOST) > 0
    for part, kept in zip(bytes_of(cache), before, strict=True):
        assert np.array_equal(part, kept)


def plan_of(*counts: int) -> Plan:
    requests = [Request(str(number), [1], SamplingParams()) for number in range(len(counts))]
    return Plan(1, requests, [0] * len(counts), list(counts), [1] * len(counts))


def test_prompts_are_timed_by_the_steps_that_compute_them() -> None:
    swap = SwapCosts()
    costs = StepCosts(swap, Pace(), max_tokens_per_step=512)
    costs.learn(plan_of(1, 1, 100), 1.0)
    assert swap.compute_s is None, "too few tokens to tell"
    costs.learn(plan_of(1, 199), 4.0)
    assert swap.compute_s == pytest.approx(0.02)
    costs.learn(plan_of(200), 2.0)
    assert swap.compute_s == pytest.approx(0.01)
    costs.learn(plan_of(200), 3.0)
    assert swap.compute_s == pytest.approx(0.0115)


def test_small_steps_count_where_none_can_be_larger() -> None:
    swap = SwapCosts()
    StepCosts(swap, Pace(), max_tokens_per_step=32).learn(plan_of(32), 1.0)
    assert swap.compute_s == pytest.approx(1 / 32)


@pytest.mark.parametrize("max_tokens_per_step", [1, 2, 3, 7])
def test_a_step_without_prompt_tokens_says_nothing_of_them(max_tokens_per_step: int) -> None:
    swap, pace = SwapCosts(), Pace()
    StepCosts(swap, pace, max_tokens_per_step).learn(plan_of(*[1] * max_tokens_per_step), 1.0)
    assert (swap.compute_s, pace.token_s, pace.decode_s) == (None, None, 1.0)


@pytest.mark.parametrize("max_tokens_per_step", [1, 32, 192, 8192])
def test_the_smallest_steps_that_pace_allows_are_measured(max_tokens_per_step: int) -> None:
    pace = Pace(0.025, 1, 0.01, 1.0)
    costs = StepCosts(SwapCosts(), pace, max_tokens_per_step)
    for _ in range(40):
        num_prompt = pace.prompt_tokens(10_000, 0, max_tokens_per_step)
        costs.learn(plan_of(num_prompt + 1), 0.01 + num_prompt * 20e-6)
    assert pace.token_s is not None
    assert pace.token_s < 0.01


def test_what_a_step_will_take_is_told_by_others_of_its_size() -> None:
    costs = StepCosts(SwapCosts(), Pace(0.025, unit=128), max_tokens_per_step=8192)
    assert costs.predict(plan_of(1, 500)) is None
    costs.learn(plan_of(1, 1), 0.004)
    assert costs.predict(plan_of(1, 1, 1)) == pytest.approx(0.004)
    assert costs.predict(plan_of(1, 500)) is None
    costs.learn(plan_of(1, 500), 0.014)
    assert costs.predict(plan_of(1, 400)) == pytest.approx(0.014), "both are filled up to 512"
    assert costs.predict(plan_of(1, 1000)) == pytest.approx(0.004 + 1000 * 0.010 / 499, rel=0.01)


def test_how_much_the_host_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 20 * GIB)
    cuda = "cuda"
    assert size_swap(None, GIB, cuda) == 5
    assert size_swap(0.0, GIB, cuda) == size_swap(None, GIB, CPU) == 0
    assert size_swap(2.5, GIB, cuda) == size_swap(2.5, GIB, CPU) == 2
    with pytest.raises(NotEnoughMemory, match=r"swap_memory is 21 GiB, but the host has 20.00 GiB free. Lower it"):
        size_swap(21.0, GIB, cuda)
    with pytest.raises(NotEnoughMemory, match=r"0.5 GiB, less than one block of the cache takes \(1.00 GiB\)"):
        size_swap(0.5, GIB, cuda)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 200 * GIB)
    assert size_swap(None, GIB, cuda) == 8


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_wrong_sizes_are_refused(value: float) -> None:
    with pytest.raises(InvalidParams, match=r"swap_memory is .*; give a number of GiB, 0 or more"):
        EngineConfig(swap_memory=value)


MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 200,
    "max_position_embeddings": 512, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "hidden_act": "silu", "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip


def start(path: Path, **options: Any) -> InProcess:
    (path / "config.json").write_text(json.dumps(MODEL))
    defaults = {"device": "cpu", "kernels": "torch", "weights": "random", "block_size": 4, "prefix_cache": False}
    return InProcess(EngineConfig(model="tiny", **{**defaults, **options}), path)


def answer(client: InProcess) -> list[list[int]]:
    rng = random.Random(3)
    requests = [
        Request(str(number), [rng.randrange(2, 200) for _ in range(40)], SamplingParams(temperature=0.0), max_tokens=30)
        for number in range(10)
    ]
    for request in requests:
        client.add(request)
    while client.engine.has_work:
        client.step()
    return [request.tokens[40:] for request in requests]


def test_an_engine_swaps_once_it_has_measured_that_it_pays(tmp_path: Path) -> None:
    expected = answer(start(tmp_path, num_blocks=400))
    client = start(tmp_path, num_blocks=60, swap_memory=0.01)
    costs, counters = client.engine.scheduler.swap.costs, client.engine.scheduler.counters
    assert costs.copy_s is not None
    assert costs.compute_s is None
    costs.copy_s = 1e-9  # a tiny model's tokens are nearly as cheap as a copy
    assert answer(client) == expected
    assert costs.compute_s is not None
    assert counters.swaps == counters.preemptions > 0
    assert client.engine.scheduler.swap.num_free == client.engine.scheduler.swap.num_host_blocks > 0


def test_a_cpu_does_not_swap_unless_asked_to(tmp_path: Path) -> None:
    client = start(tmp_path, num_blocks=60)
    answer(client)
    assert client.engine.scheduler.swap.num_host_blocks == client.engine.scheduler.counters.swaps == 0
    assert client.engine.scheduler.counters.preemptions > 0


def test_nothing_is_planned_behind_a_step_that_could_not_begin() -> None:
    tiny = TinyEngine(num_blocks=40)
    launch = tiny.runner.launch
    tiny.runner.depth = 2
    engine = Engine(tiny.scheduler, tiny.runner, Mock(device="cpu"))
    for name in "ab":
        engine.add(Request(name, [1, 2, 3], SamplingParams(temperature=0.0), max_tokens=8))

    def refuse(plan: Plan) -> Any:
        raise RuntimeError("no memory for it")

    tiny.runner.launch = refuse  # type: ignore[method-assign]
    num_steps = tiny.scheduler.counters.steps
    assert {update.finish for update in engine.step()} == {Finish.ERROR}
    assert tiny.scheduler.counters.steps == num_steps + 1
    tiny.runner.launch, tiny.runner.depth = launch, 1  # type: ignore[method-assign]
    engine.add(Request("c", [1, 2, 3], SamplingParams(temperature=0.0), max_tokens=2))
    finals = []
    while engine.has_work:
        finals += [update.finish for update in engine.step() if update.finish]
    assert finals == [Finish.LENGTH]
