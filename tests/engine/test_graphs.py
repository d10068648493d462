"""Which steps are captured, and when. A made-up CUDA stands in for the GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine import gpu_graphs
from quire.engine.gpu_graphs import FIRST_TOKENS, Graphs, Key, decode_sizes

pytestmark = pytest.mark.cpu

MIB = 1 << 20
KINDS = ("mixed", "prompts", "crowded")


class FakeGpu:
    """Every graph takes memory, and capturing one takes time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, graph_mib: int = 1) -> None:
        self.free, self.now, self.graph_mib = 1000 * MIB, 0.0, graph_mib
        self.run: list[Key] = []
        self.replayed = 0
        self.fails = False
        cuda = SimpleNamespace(
            graph_pool_handle=lambda: 0, Stream=lambda: 0, stream=self.stream, CUDAGraph=lambda: self,
            mem_get_info=lambda: (self.free, 1000 * MIB), synchronize=lambda: None,
        )  # fmt: skip
        monkeypatch.setattr(gpu_graphs, "torch", SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(gpu_graphs, "time", SimpleNamespace(monotonic=lambda: self.now))

    @contextmanager
    def stream(self, _: Any) -> Iterator[None]:
        yield

    def capture_begin(self, **_: Any) -> None:
        self.free -= self.graph_mib * MIB
        self.now += 0.012

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        self.replayed += 1

    def body(self, key: Key) -> Any:
        if self.fails:
            raise RuntimeError("no")
        self.run.append(key)
        return key


def make(gpu: FakeGpu, max_mib: int = 1000) -> Graphs:
    return Graphs(gpu.body, 256, 8192, max_mib * MIB)


def test_at_start_all_steps_of_single_tokens_are_captured_and_some_with_prompts(monkeypatch) -> None:
    graphs = make(FakeGpu(monkeypatch))
    graphs.warm_up(KINDS)
    for size in decode_sizes(256):
        assert graphs.find("decode", size) == Key("decode", size)
    for kind in KINDS:
        sizes = FIRST_TOKENS[kind]
        assert [graphs.find(kind, size) for size in sizes] == [Key(kind, size) for size in sizes]
    assert graphs.find("decode", 257) is None
    assert graphs.find("mixed", 4000) is None


@pytest.mark.parametrize("max_rows", [1, 2, 15, 16, 17, 31, 40, 63, 64, 100, 512])
def test_what_makes_a_workspace_is_run_before_it_is_captured(monkeypatch, max_rows: int) -> None:
    """Steps of 2 to 64 single tokens have a kernel of their own, and each kind with prompts may have."""
    gpu = FakeGpu(monkeypatch)
    captured = list[bool]()
    monkeypatch.setattr(gpu, "capture_begin", lambda **_: captured.append(True))
    monkeypatch.setattr(gpu, "capture_end", lambda: captured.clear())
    seen = dict[str, bool]()

    def body(key: Key) -> Any:
        family = ("few" if key.size <= 64 else "many") if key.kind == "decode" and key.size > 1 else key.kind
        seen.setdefault(family, bool(captured))
        return key

    Graphs(body, max_rows, 8192, 1000 * MIB).warm_up(KINDS)
    assert not any(seen.values()), seen


@pytest.mark.parametrize("max_mib", [1, 3, 20])
def test_a_start_survives_graphs_that_use_up_their_memory(monkeypatch, max_mib: int) -> None:
    graphs = make(FakeGpu(monkeypatch), max_mib)
    graphs.warm_up(KINDS)
    assert graphs.find("decode", 256) == Key("decode", 256), "any step of single tokens can run"
    assert not graphs.capture_next(math.inf)


def test_what_steps_ask_for_is_captured_when_there_is_time(monkeypatch) -> None:
    graphs = make(FakeGpu(monkeypatch))
    graphs.warm_up(KINDS)
    assert graphs.find("prompts", 700) == Key("prompts", 1024), "a larger one serves until then"
    assert not graphs.capture_next(0.055), "it takes 12 ms, and may take more"
    assert not graphs.capture_next(-math.inf)
    assert graphs.capture_next(0.065)
    assert graphs.find("prompts", 700) == Key("prompts", 768)
    while graphs.capture_next(math.inf):
        pass
    assert graphs.find("prompts", 33) == Key("prompts", 64)


def test_after_a_capture_that_failed_none_is_tried(monkeypatch, caplog) -> None:
    gpu = FakeGpu(monkeypatch)
    graphs = make(gpu)
    graphs.warm_up(KINDS)
    gpu.fails = True
    assert graphs.capture_next(math.inf)
    assert "No more steps are captured: a capture failed: no." in caplog.text
    assert not graphs.capture_next(math.inf)
    assert graphs.find("prompts", 700) == Key("prompts", 1024)


def test_steps_of_drafts_are_captured_at_start_if_there_will_be_any(monkeypatch) -> None:
    """For the most drafts of a row: these graphs serve fewer, until a better one is captured."""
    gpu = FakeGpu(monkeypatch)
    graphs = make(gpu)
    graphs.warm_up(KINDS, ("verify", "trees"), (2, 4, 16))
    for kind in ("verify", "trees"):
        assert graphs.find(kind, 30, 4) == Key(kind, 32, 16)
        assert {key.max_queries for key in gpu.run if key.kind == kind} == {2, 4, 16}, "every kernel was run"
    while graphs.capture_next(math.inf):
        pass
    assert graphs.find("trees", 30, 4) == Key("trees", 32, 4)
    assert graphs.find("verify", 1025, 2) is None


def test_without_speculation_no_step_of_drafts_is_run_at_start(monkeypatch) -> None:
    gpu = FakeGpu(monkeypatch)
    make(gpu).warm_up(KINDS)
    assert not {"verify", "trees"} & {key.kind for key in gpu.run}


def draft(key: Key) -> list[Key]:
    return [key._replace(depth=depth) for depth in (1, 3)] if key.kind == "decode" else []


def test_what_comes_behind_a_step_is_captured_with_it(monkeypatch) -> None:
    """No step waits for that, and the longest is run before: it may allocate workspaces."""
    gpu = FakeGpu(monkeypatch)
    graphs = Graphs(gpu.body, 256, 8192, 1000 * MIB, draft)
    graphs.warm_up(KINDS)
    first, last = (gpu.run.index(Key("decode", 256, depth=depth)) for depth in (1, 3))
    assert last < first, "it is run before anything is captured"
    gpu.run.clear()
    for size in decode_sizes(256):
        graphs.run(Key("decode", size, depth=3))
    assert not gpu.run
    assert gpu.replayed == len(decode_sizes(256))
    assert graphs.find("decode", 16) == Key("decode", 16), "it is no step"


def test_what_could_not_be_captured_is_run(monkeypatch) -> None:
    gpu = FakeGpu(monkeypatch)
    graphs = Graphs(gpu.body, 256, 8192, MIB, draft)
    graphs.warm_up(KINDS)
    gpu.run.clear()
    assert graphs.run(Key("decode", 16, depth=3)) == Key("decode", 16, depth=3)
    assert gpu.run == [Key("decode", 16, depth=3)]
