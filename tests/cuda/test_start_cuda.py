"""An engine's start on a GPU: the cache takes what a measured step leaves, and what does not fit is said at once.

Random weights in a small model's shapes with a long context, so that a cache without a bound would fill any GPU.
"""

from __future__ import annotations

import gc
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda import gpu  # skips this module where there is no GPU
from tests.cuda.gpu import DEVICE

import triton  # isort: skip

from quire.core.params import SamplingParams  # isort: skip
from quire.core.plan import Update
from quire.core.request import Finish, Request
from quire.engine.client import InProcess
from quire.engine.memory import GRAPH_BYTES
from quire.engine.profile_run import ProfileRun
from quire.errors import NotEnoughMemory, UnsupportedModel

pytestmark = pytest.mark.cuda

LONG = {"intermediate_size": 2048, "vocab_size": 32000, "max_position_embeddings": 131072}


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """These engines take all there is: none may stay for the next test."""
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def start(path: Path, shapes: dict[str, Any] | None = None, **options: Any) -> InProcess:
    return gpu.start(path, LONG | (shapes or {}), **options)


def draw_request(name: str, num_prompt: int, max_tokens: int = 4, **params: Any) -> Request:
    rng = random.Random(name)
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | params)
    return Request(name, [rng.randrange(2, 32000) for _ in range(num_prompt)], sampling, max_tokens=max_tokens)


def run(client: InProcess, requests: list[Request]) -> dict[str, Update]:
    """Requests that arrive together; the last update of each."""
    for request in requests:
        client.add(request)
    ends: dict[str, Update] = {}
    while client.engine.has_work:
        ends |= {update.id: update for update in client.step() if update.finish}
    return ends


def forget_kernels() -> None:
    """What earlier tests compiled counts for nothing."""
    modules = [module for name, module in sys.modules.items() if name.startswith("quire.kernels.cuda")]
    for value in (value for module in modules for value in vars(module).values()):
        if isinstance(value, triton.JITFunction):
            value.device_caches.clear()


def test_the_cache_takes_what_the_largest_step_leaves(tmp_path, monkeypatch):
    taken: list[int] = []
    measure = ProfileRun.measure
    monkeypatch.setattr(ProfileRun, "measure", lambda *given: taken.append(measure(*given)) or taken[0])
    free_before = torch.cuda.mem_get_info()[0]
    client = start(tmp_path, max_requests=1024, block_size=256)
    cache = client.info.cache
    assert cache.nbytes > 0.8 * free_before
    assert torch.cuda.mem_get_info()[0] >= 2 * taken[0]
    reserved = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    crowd = [draw_request(f"short {index}", 5) for index in range(900)]
    crowd += [draw_request(f"long {index}", 3000) for index in range(8)]
    crowd += [draw_request(f"scored {index}", 20, logprobs=1) for index in range(100)]
    ends = run(client, crowd)
    assert {update.finish for update in ends.values()} == {Finish.LENGTH}
    assert len(ends) == len(crowd)
    assert torch.cuda.max_memory_reserved() - reserved <= 2 * taken[0] + GRAPH_BYTES


def test_the_line_at_start_has_all_six_numbers(tmp_path):
    client = start(tmp_path, kv_memory=1.0)
    line = client.info.summary
    assert re.search(r"weights [\d.]+ MiB, steps and graphs up to [\d.]+ [GM]iB, ", line), line
    assert "bfloat16 cache up to 1.00 GiB in 32,768 blocks of 16 tokens; " in line
    assert line.endswith("longest request 131,072 tokens; 512 requests at once, 4 of the longest")
    assert client.info.max_requests == client.engine.scheduler.max_requests == 512


@pytest.mark.parametrize("options", [{"kv_memory": 5000.0, "max_requests": 2048}, {"num_blocks": 50_000_000}], ids=str)
def test_a_cache_that_does_not_fit_is_refused(tmp_path, options):
    with pytest.raises(
        NotEnoughMemory, match=r"A cache of [\d.]+ GiB .* was asked for, .* Lower kv_memory or num_blocks"
    ):
        start(tmp_path, **options)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(NotEnoughMemory, match=r"The weights take [\d.]+ GiB, more than the GPU has: "):
        start(tmp_path, {"intermediate_size": 100_000_000})


def test_a_step_that_does_not_fit_is_refused(tmp_path):
    expected = (
        r"too small for a step of 1,000,000 tokens for 512 requests beside the weights; .* Lower max_tokens_per_step"
    )
    with pytest.raises(NotEnoughMemory, match=expected):
        start(tmp_path, {"intermediate_size": 262_144}, max_tokens_per_step=1_000_000)


def test_heads_that_the_kernels_cannot_serve_are_refused(tmp_path):
    with pytest.raises(UnsupportedModel, match=r"heads of 16 to 256 dimensions, .* have 512\. Set kernels to 'torch'"):
        start(tmp_path, {"head_dim": 512})


def test_out_of_memory_in_a_step_ends_only_its_requests(tmp_path):
    client = start(tmp_path, kv_memory=1.0)
    assert run(client, [draw_request("first", 9)])["first"].finish is Finish.LENGTH
    torch.cuda.empty_cache()
    hog = torch.empty(torch.cuda.mem_get_info()[0] - (48 << 20), dtype=torch.uint8, device=DEVICE)
    (end,) = run(client, [draw_request("large", 8192)]).values()
    assert end.finish is Finish.ERROR
    assert end.detail is not None
    assert end.detail.message.startswith("The GPU ran out of memory in a step of 8,192 tokens for 1 requests. ")
    del hog
    torch.cuda.empty_cache()
    ends = run(client, [draw_request("large again", 8192), draw_request("small", 9)])
    assert {update.finish for update in ends.values()} == {Finish.LENGTH}
    assert client.engine.scheduler.kv.pool.num_free == client.info.cache.num_blocks


@pytest.mark.parametrize("num_prompt", [1, 100, 512])
def test_a_first_token_waits_for_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_prompt: int) -> None:
    forget_kernels()
    client = start(tmp_path, kv_memory=1.0)  # one of a layer's own 2**31 elements and more has a kernel of its own
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **told: compiled.append(told["fn"].name))
    assert run(client, [draw_request("first", num_prompt, 1)])["first"].finish is Finish.LENGTH
    assert compiled == []


def test_a_large_step_with_single_tokens_waits_for_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_kernels()
    client = start(tmp_path, kv_memory=1.0, itl_target_ms=0.0)
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **told: compiled.append(told["fn"].name))
    for request in (draw_request(f"short {number}", 700 + number, 64) for number in range(5)):
        client.add(request)
    for _ in range(8):
        client.step()
    # Longer than a step: not all rows of these steps are sampled, and no graph is as large.
    ends = run(client, [draw_request("long", 20_000), draw_request("middle", 3_000)])
    assert len(ends) == 7
    assert {end.finish for end in ends.values()} == {Finish.LENGTH}
    assert compiled == []
