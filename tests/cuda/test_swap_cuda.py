"""Swap on a GPU: blocks go to pinned memory and come back bit for bit, and an engine that swaps, with steps launched
ahead, gives the answers of one that never has to."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda import gpu  # skips this module where there is no GPU
from tests.cuda.gpu import DEVICE

from quire.core.params import SamplingParams  # isort: skip
from quire.core.request import Request
from quire.engine import host_blocks
from quire.engine.cache import CacheTensors, lay_out, shape_blocks
from quire.engine.client import InProcess
from quire.engine.costs import time_copies
from quire.engine.memory import CacheSize
from quire.kernels import select_torch
from quire.kernels.cache_spec import BlockShape, KVCacheSpec
from quire.kernels.torch_arrays import TorchArrays
from tests.tools.mixed_specs import MIXED_SPECS

pytestmark = pytest.mark.cuda

ON_GPU = TorchArrays("cuda")
NUM_BLOCKS = 200
BLOCK = BlockShape((2, 16, 64), (2, 16, 64), "bfloat16")
BLOCK_BYTES = 4 * 2 * 2 * 16 * 64 * 2  # of four layers, keys and values


def make_cache(num_host_blocks: int) -> CacheTensors:
    return CacheTensors(
        lay_out([KVCacheSpec(2, 64)] * 4, [BLOCK] * 4), CacheSize(NUM_BLOCKS, 16, 0, 16, 1), ON_GPU, num_host_blocks
    )


@pytest.mark.parametrize("piece_blocks", [1, 7, 1000])
@pytest.mark.parametrize("count", [1, 16, 100])
def test_blocks_come_back_bit_for_bit(count: int, piece_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_blocks, "PIECE_BYTES", piece_blocks * BLOCK_BYTES)
    cache, rng = make_cache(120), random.Random(count)
    for part in cache._stacks:
        part.view(torch.uint8).random_(0, 256)
    before = [part.clone() for part in cache._stacks]
    blocks, targets = (rng.sample(range(1, NUM_BLOCKS + 1), count) for _ in range(2))
    slots = rng.sample(range(120), count)
    cache.swap_blocks(list(zip(blocks, slots, strict=True)), [])
    for part in cache._stacks:
        part.zero_()
    cache.swap_blocks([], list(zip(slots, targets, strict=True)))
    for part, kept in zip(cache._stacks, before, strict=True):
        expected = torch.zeros_like(kept)
        expected[:, targets] = kept[:, blocks]
        assert torch.equal(part.view(torch.uint8), expected.view(torch.uint8))
    assert all(piece.is_pinned() for piece in cache.host._pieces)


@pytest.mark.parametrize("name", [name for name in MIXED_SPECS if name != "keys wider than values"])
def test_blocks_of_mixed_layers_are_copied_whole(name: str) -> None:
    specs = MIXED_SPECS[name]
    layout = lay_out(specs, shape_blocks(specs, select_torch("cuda"), "bfloat16", 16))
    cache = CacheTensors(layout, CacheSize(9, 16, 0, 16, 1), ON_GPU, 5)
    for part in cache._stacks:
        part.random_(0, 100)
    before = [(layer.k.clone(), layer.v.clone()) for layer in cache.layers]
    cache.swap_blocks([(2, 4), (3, 0)], [(0, 5), (4, 6)])
    cache.copy_blocks([(5, 7)])
    sources = [0, 1, 2, 3, 4, 3, 2, 3, 8, 9]
    for layer, (k, v) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.k, k[sources])
        assert torch.equal(layer.v, v[sources])


def test_many_swaps_in_a_row_keep_their_order() -> None:
    """Nobody waits between them: each must find what the one before has left."""
    cache, expected = make_cache(64), torch.arange(NUM_BLOCKS + 1, dtype=torch.float32)
    cache.layers[0].k[:] = expected.to(DEVICE, torch.bfloat16)[:, None, None, None]
    rng, on_host = random.Random(1), torch.zeros(64)
    for _ in range(50):
        blocks, targets = (rng.sample(range(1, NUM_BLOCKS + 1), 40) for _ in range(2))
        slots = rng.sample(range(64), 40)
        out, back = list(zip(blocks, slots, strict=True)), list(zip(slots[10:], targets[10:], strict=True))
        cache.swap_blocks(out, back)
        for block, slot in out:
            on_host[slot] = expected[block]
        for slot, block in back:
            expected[block] = on_host[slot]
    assert torch.equal(cache.layers[0].k[:, 0, 0, 0].float().cpu(), expected.bfloat16().float())


def test_copies_are_timed_by_the_device() -> None:
    assert time_copies(make_cache(100), ON_GPU) > 0


DEFAULTS = {"dtype": "float32", "max_requests": 32, "max_len": 1024, "prefix_cache": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def start(model: Path, **options: Any) -> InProcess:
    return gpu.start(model, **DEFAULTS | options)


def draw_requests(count: int, *, greedy: bool) -> list[Request]:
    rng, requests = random.Random(7), []
    for number in range(count):
        params = SamplingParams(temperature=0.0 if greedy or number % 3 else 0.8, ignore_eos=True)
        prompt = [rng.randrange(2, 2000) for _ in range(rng.choice([3, 60, 200, 400]))]
        requests.append(Request(str(number), prompt, params, max_tokens=rng.randrange(20, 90), seed=number))
    return requests


def answer(client: InProcess, requests: list[Request]) -> list[list[int]]:
    for request in requests:
        client.add(request)
    while client.engine.has_work:
        client.step()
    return [request.tokens[request.num_prompt :] for request in requests]


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "mixed"])
def test_the_same_answers_as_with_a_large_cache(model: Path, greedy: bool, prefix_cache: bool) -> None:
    expected = answer(start(model, kv_memory=1.0), draw_requests(40, greedy=greedy))
    client = start(model, num_blocks=80, swap_memory=0.25, prefix_cache=prefix_cache)
    scheduler = client.engine.scheduler
    assert scheduler.swap.costs.copy_s is not None
    scheduler.swap.costs.copy_s = 0.0
    assert answer(client, draw_requests(40, greedy=greedy)) == expected
    assert scheduler.counters.swaps > 5
    assert scheduler.swap.num_free == scheduler.swap.num_host_blocks
    assert scheduler.kv.pool.num_free == 80


def test_aborts_leave_nothing_on_the_host(model: Path) -> None:
    client, rng = start(model, num_blocks=80, swap_memory=0.25), random.Random(11)
    scheduler = client.engine.scheduler
    scheduler.swap.costs.copy_s = 0.0
    for request in draw_requests(60, greedy=True):
        client.add(request)
    while client.engine.has_work:
        client.step()
        if scheduler.requests and rng.random() < 0.1:
            client.abort(rng.choice(list(scheduler.requests)))
    assert scheduler.counters.swaps > 0
    assert scheduler.swap.num_free == scheduler.swap.num_host_blocks
    assert scheduler.kv.pool.num_free == 80
