"""What an engine decides at its start: sizes for the device, memory for the cache, and the step it tries first.

A GPU is stood in for by its figures; `tests/cuda/test_start_cuda.py` has the real one.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.engine.backend import (
    choose_dtype,
    choose_max_requests,
    choose_ops,
    choose_step_tokens,
)
from quire.engine.batch import BatchBuffers, BufferShape
from quire.engine.batching import choose_batching
from quire.engine.cache import CacheLayout, CacheTensors, lay_out, shape_blocks
from quire.engine.memory import (
    CUDA_SHARE,
    GRAPH_BYTES,
    CacheSize,
    MemoryBudget,
    check_tables,
    check_weights,
    find_memory_budget,
)
from quire.engine.profile_run import ProfileRun, largest_plan, read_libraries, run_step
from quire.errors import EngineError, InvalidParams, NotEnoughMemory, UnsupportedModel
from quire.kernels import select_torch
from quire.kernels.torch_arrays import TorchArrays
from quire.layers.attention import Attention
from quire.models.registry import MODELS
from quire.weights.loader import count_weights
from quire.weights.random_tensors import RandomTensors
from tests.tools.tiny import FAMILIES, LLAMA, tiny_model

pytestmark = pytest.mark.cpu

CPU, CUDA = "cpu", "cuda"
GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU by its figures: 80 GiB, 60 of them free, compute capability 9.0."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


# ── sizes that fit the device ─────────────────────────────────────────────────────────────────────────────────────


def test_requests_at_once_are_chosen_by_device() -> None:
    assert choose_max_requests(EngineConfig(), CPU) == 64
    assert choose_max_requests(EngineConfig(), CUDA) == 512
    assert choose_max_requests(EngineConfig(max_requests=700), CPU) == 700
    assert choose_max_requests(EngineConfig(max_tokens_per_step=17), CUDA) == 17


def test_a_batch_is_as_large_as_the_requests_that_run() -> None:
    static = choose_batching(EngineConfig(batching="static"), 300)
    assert static.quota(1000, 0, lambda: 0.0) == 300


def test_tokens_of_a_step_are_chosen_by_ops() -> None:
    plain, own = (replace(select_torch(CPU), arrays=TorchArrays(CUDA), fused=store) for store in (None, lambda: None))
    assert choose_step_tokens(None, 64, select_torch(CPU)) == 192
    assert choose_step_tokens(None, 512, own) == 8192
    assert choose_step_tokens(None, 512, plain) == 1024
    assert choose_step_tokens(None, 9000, own) == 9000
    assert choose_step_tokens(600, 512, own) == 600


def test_a_config_checks_requests_only_where_they_are_given() -> None:
    assert EngineConfig(max_tokens_per_step=3).max_requests is None
    with pytest.raises(InvalidParams, match=r"max_tokens_per_step is 3, below max_requests \(4\)"):
        EngineConfig(max_tokens_per_step=3, max_requests=4)
    with pytest.raises(InvalidParams, match="max_requests is 0; give a whole number of at least 1"):
        EngineConfig(max_requests=0)


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "float16"), ((8, 0), "bfloat16")])
def test_the_dtype_is_one_that_the_gpu_multiplies(monkeypatch, capability, expected) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert choose_dtype("auto", CUDA) == expected
    assert choose_dtype("float32", CUDA) == "float32"
    assert choose_dtype("auto", CPU) == "float32"


# ── what the GPU's kernels cannot serve ───────────────────────────────────────────────────────────────────────────


def ops_for(head_dim: int = 64, **options: Any) -> Any:
    return choose_ops(EngineConfig(**options), replace(LLAMA, head_dim=head_dim), "bfloat16", CUDA)


@pytest.mark.parametrize("head_dim", [8, 257, 512])
def test_heads_that_do_not_fit_are_refused_with_the_limits(gpu, head_dim) -> None:
    with pytest.raises(UnsupportedModel, match=f"heads of 16 to 256 dimensions, .* have {head_dim}. Set kernels to"):
        ops_for(head_dim)
    assert ops_for(head_dim, kernels="torch").fused is None


def test_a_gpu_that_is_too_old_is_refused_with_the_limit(gpu, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    with pytest.raises(UnsupportedModel, match=r"compute capability of 8\.0, and this GPU has 7\.5\. Set kernels to"):
        ops_for()
    assert ops_for(kernels="torch").fused is None


def test_without_triton_its_name_and_the_way_out_are_said(gpu, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("quire.kernels.cuda")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(EngineError, match=r"need the package triton, .* or set kernels to 'torch'"):
        ops_for()
    assert ops_for(kernels="torch").fused is None


def test_the_cpu_s_kernels_are_refused_on_a_gpu(gpu) -> None:
    with pytest.raises(UnsupportedModel, match=r"kernels is 'native', but .* do not run on cuda\. Use 'auto'"):
        ops_for(kernels="native")


# ── memory for weights and cache ───────────────────────────────────────────────────────────────────────────────────


def test_a_gpu_s_room_is_what_two_steps_and_the_graphs_leave(gpu) -> None:
    budget = find_memory_budget(CUDA, 5 * GIB)
    assert budget.max_bytes == 60 * GIB - 10 * GIB - GRAPH_BYTES
    assert budget.default_bytes == int(CUDA_SHARE * 60 * GIB) - 10 * GIB - GRAPH_BYTES
    assert budget.reserved_bytes == 10 * GIB + GRAPH_BYTES
    assert find_memory_budget(CUDA, 5 * GIB, kept_bytes=GIB).max_bytes == budget.max_bytes - GIB
    assert find_memory_budget(CUDA, 40 * GIB) == MemoryBudget(0, 0, 80 * GIB + GRAPH_BYTES, is_gpu=True)


def test_a_cpu_s_room_is_a_share_of_what_is_free(monkeypatch) -> None:
    monkeypatch.setattr("quire.engine.memory.free_bytes", lambda device: 8 * GIB)
    assert find_memory_budget(CPU, 0) == MemoryBudget(2 * GIB, 8 * GIB)


def test_a_context_whose_tables_do_not_fit_is_refused(monkeypatch) -> None:
    """A file may claim any length."""
    monkeypatch.setattr("quire.engine.memory.free_bytes", lambda device: GIB)
    model = FAMILIES["gemma3"]
    check_tables(replace(model, max_len=1000), "cpu")
    with pytest.raises(NotEnoughMemory, match=r"2,147,483,647 tokens needs tables of .* Lower max_len"):
        check_tables(replace(model, max_len=2**31 - 1), "cpu")


def test_threads_are_refused_on_a_gpu(gpu) -> None:
    with pytest.raises(InvalidParams, match=r"^threads is 4, but the model runs on a GPU, .* leave it out"):
        choose_ops(EngineConfig(threads=4), LLAMA, torch.bfloat16, CUDA)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(gpu) -> None:
    expected = r"take 61\.00 GiB, more than the GPU has: 60\.00 GiB of its 80\.00 GiB are free\. End other"
    with pytest.raises(NotEnoughMemory, match=expected):
        check_weights(61 * GIB, CUDA)
    check_weights(60 * GIB, CUDA)
    check_weights(1 << 60, CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_counted_without_being_made(family) -> None:
    source, config = RandomTensors(0, torch.float32, CPU), FAMILIES[family]
    MODELS[family](config, source, select_torch(CPU))
    assert count_weights(config, select_torch(CPU)) * torch.float32.itemsize == source.nbytes


# ── the step that is tried ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("max_tokens", "max_requests", "max_len", "counts"),
    [
        (20, 4, 100, [17, 1, 1, 1]),
        (20, 4, 8, [8, 8, 3, 1]),
        (4, 4, 8, [1, 1, 1, 1]),
        (20, 1, 100, [20]),
        (20, 2, 7, [7, 7]),
    ],
)
def test_the_largest_step_has_all_rows_and_all_tokens(max_tokens, max_requests, max_len, counts) -> None:
    plan = largest_plan(max_tokens, max_requests, max_len, 4, 2)
    assert plan.counts == counts
    assert [len(request.tokens) for request in plan.requests] == counts
    assert [[len(table) for table in request.tables] for request in plan.requests] == [[-(-n // 4)] * 2 for n in counts]


def layout_of(config: Any) -> CacheLayout:
    specs = tiny_model(config).cache_specs()
    return lay_out(specs, shape_blocks(specs, select_torch(CPU), "float32", 4))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_tried(family, monkeypatch) -> None:
    """In a cache of one block, whatever the windows, with logits for every row."""
    config = FAMILIES[family]
    layout = layout_of(config)
    model, shown = tiny_model(config), []
    head = model.head
    monkeypatch.setattr(model, "head", lambda hidden: shown.append(hidden.shape) or head(hidden))
    buffers = BatchBuffers(BufferShape(70, 9, config.max_len, layout.windows, 4, config.vocab_size, TorchArrays(CPU)))
    cache = CacheTensors(layout, CacheSize(1, 4, layout.block_bytes, config.max_len, 1), TorchArrays(CPU))
    run_step(model, buffers.fill(largest_plan(70, 9, config.max_len, 4, len(layout.windows))), cache)
    assert shown == [(9, config.hidden_size)]


def test_what_a_step_takes_is_its_peak_above_what_was_there(gpu, monkeypatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 1700)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    profile_run = ProfileRun(tiny_model(LLAMA), select_torch(CPU), layout_of(LLAMA), 40, 8, LLAMA.max_len, 4)
    assert profile_run.measure(read_libraries(CPU, "float32")) == 700
    assert calls[-4:] == ["empty", "reset", "wait", "empty"]
    assert calls.count("wait") == 3  # the libraries, the small step and the large one


def test_kernels_are_tried_on_a_token_before_the_largest_step(gpu, monkeypatch) -> None:
    config, seen = FAMILIES["gemma3"], []
    attend = Attention.__call__
    monkeypatch.setattr(
        Attention, "__call__", lambda *given: seen.append((given[0].window, len(given[1]))) or attend(*given)
    )
    for name in ("reset_peak_memory_stats", "memory_reserved", "max_memory_reserved", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    profile_run = ProfileRun(tiny_model(config), select_torch(CPU), layout_of(config), 40, 8, config.max_len, 4)
    profile_run.measure(read_libraries(CPU, "float32"))
    assert seen == [(9, 1), (9, 1), (None, 1), (9, 40), (9, 40), (None, 40)]


def test_libraries_that_cannot_be_used_are_not_told_of_twice(monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED")

    monkeypatch.setattr(torch, "mm", fail)
    thread = read_libraries(CPU, "bfloat16")
    thread.join()
    assert not thread.is_alive()
