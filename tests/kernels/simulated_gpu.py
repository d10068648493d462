"""A GPU that is simulated on the CPU: the GPU's runner and its kernels, by Triton's interpreter, without CUDA.

Scripts that `test_interpreted.py` runs call `install` first. Kernels run when they are launched, events are over when
they are recorded, and the replay of a graph runs the captured step again on the same buffers. So what is checked is the
host's code and the kernels' results, not their order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from quire.core.scheduler import Scheduler
from quire.core.swap import SwapCosts
from quire.engine import gpu_graphs
from quire.engine.batch import BufferShape
from quire.engine.build import build_runner
from quire.engine.cache import CacheTensors, lay_out, shape_blocks
from quire.engine.engine import Engine
from quire.engine.gpu_runner import GpuRunner
from quire.engine.memory import CacheSize
from quire.kernels import Kernels, select_torch
from quire.kernels.cuda.attention import split_kv
from quire.kernels.cuda.sampling import argmax
from quire.kernels.torch_arrays import TorchArrays
from quire.models.config import ModelConfig, Rope
from quire.models.decoder import Decoder
from quire.models.registry import MODELS
from quire.speculative.controller import Controller
from quire.weights.eagle import LoadedEagle
from quire.weights.random_tensors import RandomTensors

DEVICE = "cpu:0"  # another name than the host's, so that buffers have a copy on each side
LLAMA = ModelConfig(
    family="llama", vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, max_len=512, rope=Rope(16), windows=(None,) * 2,
)  # fmt: skip


class Event:
    """Over as soon as it is recorded."""

    def __init__(self, **_: Any) -> None:
        self._at_s = 0.0

    def record(self, *_: Any) -> None:
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other._at_s - self._at_s)


class Stream:
    device = torch.device("cpu")

    def __init__(self, *_: Any) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        pass


class Graph:
    """Runs a step again."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self.run = run


@contextmanager
def use_stream(_: Stream) -> Iterator[None]:
    yield


def capture(self: gpu_graphs.Graphs, key: gpu_graphs.Key) -> None:
    """Takes the place of `Graphs._capture`."""
    for each in (key, *self._behind(key)):
        graph: Any = Graph(partial(self._body, each))
        self._captured[each] = gpu_graphs.Captured(graph, torch.empty(0))
    if key in self._pending:
        self._pending.remove(key)


def replay(self: gpu_graphs.Graphs, key: gpu_graphs.Key) -> torch.Tensor:
    return self._captured[key].graph.run()  # type: ignore[attr-defined]


def without_pin(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make_unpinned(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*args, **options)

    return make_unpinned


patch_tensor = interpreter._patch_lang_tensor


def patch_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 asks numpy for the only number of an array in a way that numpy 2.4 has dropped."""
    patch_tensor(tensor, scope)
    tensor.__index__ = lambda self: self.handle.data.item()


def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """A product whose bits do not depend on its number of rows and columns, as a GPU's: numpy's do."""
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def install() -> None:
    interpreter._patch_lang_tensor = patch_index
    interpreter.InterpreterBuilder.create_dot = dot
    cuda: Any = torch.cuda
    cuda.Event, cuda.Stream, cuda.stream, cuda.current_stream = Event, Stream, use_stream, Stream
    cuda.synchronize, cuda.graph_pool_handle = lambda: None, lambda: 0
    torch.zeros, torch.empty = without_pin(torch.zeros), without_pin(torch.empty)
    graphs: Any = gpu_graphs.Graphs
    graphs._capture, graphs.replay = capture, replay
    split_kv.PROGRAMS, split_kv.ROW_PROGRAMS, argmax.PROGRAMS = 8, 4, 8  # fewer: each takes a millisecond here


class SimulatedArrays(TorchArrays):
    def __init__(self) -> None:
        super().__init__(DEVICE)


def simulated_ops(*, exact: bool = False) -> Kernels:
    return replace(select_torch("cuda", exact=exact), arrays=SimulatedArrays())


def build_model(config: ModelConfig, ops: Kernels, seed: int = 0, quantize: str | None = None) -> Decoder:
    """In float32, or with matrices of codes in float16, as kernels for codes need 16 bits."""
    assert ops.linear is not None
    source = RandomTensors(seed, torch.float32, "cpu", ops.linear)
    if quantize is not None:
        from quire.weights.random_tiles import RandomTiles

        source = RandomTiles(seed, torch.float16, "cpu", ops.linear, quantize, exact=ops.exact)
    return MODELS[config.family](config, source, ops)


def build_engine(
    config: ModelConfig = LLAMA,
    *,
    exact: bool = False,
    num_blocks: int = 200,
    block_size: int = 8,
    max_tokens: int = 128,
    max_requests: int = 8,
    num_host_blocks: int = 0,
    controller: Controller | None = None,
    prefix_cache: bool = True,
    load_head: Callable[[Decoder, Kernels], LoadedEagle] | None = None,
    quantize: str | None = None,
) -> Engine:
    """An engine on a tiny model with random weights, and with `load_head` a drafter."""
    ops = simulated_ops(exact=exact)
    model, dtype = build_model(config, ops, quantize=quantize), "float16" if quantize else "float32"
    loaded = None if load_head is None else load_head(model, ops)
    specs = [*model.cache_specs(), *([] if loaded is None else [loaded.head.cache_spec])]
    layout = lay_out(specs, shape_blocks(specs, ops, dtype, block_size))
    scheduler = Scheduler(
        num_blocks, block_size, max_tokens, max_requests, windows=layout.windows, prefix_cache=prefix_cache,
        num_host_blocks=num_host_blocks, costs=SwapCosts(copy_s=0.0, compute_s=1.0),
    )  # fmt: skip
    cache = CacheTensors(
        layout, CacheSize(num_blocks, block_size, 0, config.max_len, 1), ops.arrays, num_host_blocks, ops.move_kv
    )
    shape = BufferShape(
        max_tokens, max_requests, config.max_len, layout.windows, block_size, config.vocab_size, ops.arrays
    )
    drafter = None if loaded is None else (loaded, cache.layers.pop())
    decoder = ops.record(model, cache.layers, max_tokens, ())
    runner = build_runner(decoder, cache, ops, shape, config, dtype, 1 << 40, drafter=drafter)
    assert isinstance(runner, GpuRunner)
    info: Any = SimpleNamespace(device="cpu")
    return Engine(scheduler, runner, info, controller)


def capture_all(engine: Engine) -> None:
    """Capture the decode steps, without the warm-up of all kernels."""
    runner: Any = engine.runner
    for key in [key for key in runner.graphs._pending if key.kind == "decode"]:
        runner.graphs._capture(key)
