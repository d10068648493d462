"""What a GPU's failures become: errors that say what to do, for the requests of one step or for the whole engine."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.plan import Plan, Sampled, Update
from quire.core.request import Finish, Request
from quire.engine import process
from quire.engine.async_client import AsyncClient
from quire.engine.engine import Engine
from quire.engine.faults import explain_kernel_errors, explain_out_of_memory, is_out_of_memory
from quire.engine.messages import AddingRequests, EngineRequest, Refused, Start
from quire.engine.observer import Observer
from quire.errors import DeviceLost, EngineError, NotEnoughMemory, UnsupportedModel
from quire.kernels import select_torch
from quire.kernels.torch_arrays import TorchArrays
from tests.tools.tiny import TinyEngine

pytestmark = pytest.mark.cpu

CPU, CUDA = "cpu", "cuda"
GIB = 1 << 30
LOST = "CUDA error: an illegal memory access was encountered"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU that works until `lost` is set."""
    state = SimpleNamespace(lost=False, num_emptied=0)

    def synchronize(device: object = None) -> None:
        if state.lost:
            raise torch.AcceleratorError(f"{LOST}\nadvice on debugging")

    def empty_cache() -> None:
        state.num_emptied += 1

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (2 * GIB, 80 * GIB))
    return state


# ── at start ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=str,
)
def test_too_little_memory_says_how_much_there_is(gpu, error) -> None:
    expected = r"^The GPU's memory is too small for the cache; 2\.00 GiB of its 80\.00 GiB are free\. Ask for less\.$"
    with pytest.raises(NotEnoughMemory, match=expected), explain_out_of_memory("the cache", "Ask for less.", CUDA):
        raise error


def test_other_failures_at_start_stay_what_they_are(gpu) -> None:
    with pytest.raises(RuntimeError, match=r"^sizes differ$"), explain_out_of_memory("it", "Do.", CUDA):
        raise RuntimeError("sizes differ")
    with pytest.raises(torch.OutOfMemoryError), explain_out_of_memory("it", "Do.", CPU):
        raise torch.OutOfMemoryError("no GPU is meant here")


def test_a_gpu_lost_at_start_is_said(gpu) -> None:
    gpu.lost = True
    with pytest.raises(DeviceLost, match=f"^The GPU failed: {LOST}\\. "), explain_out_of_memory("it", "Do.", CUDA):
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")


class TritonError(Exception):
    """As Triton's own, where Triton is not installed."""


@pytest.mark.parametrize("kind", [TritonError, RuntimeError])
def test_kernels_that_cannot_be_built_are_told_with_the_way_out(gpu, monkeypatch, kind) -> None:
    triton = ModuleType("triton")
    triton.TritonError = TritonError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    ops = replace(select_torch(CPU), arrays=TorchArrays(CUDA), fused=lambda: None)
    expected = r"cannot run this model on this GPU: out of shared memory\. Set kernels to 'torch', .* another dtype"
    with pytest.raises(UnsupportedModel, match=expected), explain_kernel_errors(ops):
        raise kind("at 3:4:\nout of shared memory")
    with pytest.raises(torch.OutOfMemoryError), explain_kernel_errors(ops):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(kind), explain_kernel_errors(replace(ops, fused=None)):
        raise kind("torch's ops are not Triton's")


def test_an_error_that_only_reads_like_it_is_not_out_of_memory() -> None:
    assert not is_out_of_memory(ValueError("out of memory"))
    assert not is_out_of_memory(RuntimeError("out of luck"))


# ── in a step ─────────────────────────────────────────────────────────────────────────────────────────────────────


class LateFailure:
    """A step that fails while it runs."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    must_commit_first = False

    def sample(self) -> None:
        pass

    def is_done(self) -> bool:
        return False

    def wait(self) -> Sampled:
        raise self.error


class FailingRunner:
    """Works ahead by `depth` plans, and fails to launch, or to bring home, the plans it is told to."""

    def __init__(self, runner: Any, depth: int, at_launch: dict[int, Exception], at_end: dict[int, Exception]) -> None:
        self.runner, self.depth = runner, depth
        self.at_launch, self.at_end = at_launch, at_end
        self.launched: list[int] = []

    def idle(self, seconds: float) -> bool:
        return False

    def finish(self, request_id: str) -> None:
        self.runner.finish(request_id)

    def reset(self) -> None:
        self.runner.reset()

    def launch(self, plan: Plan, is_behind: bool = False) -> Any:
        self.launched.append(plan.step)
        if error := self.at_launch.get(len(self.launched)):
            raise error
        running, late = self.runner.launch(plan, is_behind), self.at_end.get(len(self.launched))
        return running if late is None else LateFailure(late)


def engine_with(
    depth: int = 1, at_launch: dict[int, Exception] | None = None, at_end: dict[int, Exception] | None = None
) -> Engine:
    tiny = TinyEngine()
    runner = FailingRunner(tiny.runner, depth, at_launch or {}, at_end or {})
    return Engine(tiny.scheduler, runner, SimpleNamespace(device="cuda"))  # type: ignore[arg-type]


def request(name: str, max_tokens: int = 4) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(name, [1, 2, 3], params, max_tokens=max_tokens)


def run(engine: Engine) -> list[Update]:
    updates = []
    while engine.has_work:
        updates += engine.step()
    return updates


def ends(updates: list[Update]) -> dict[str, Finish]:
    return {update.id: update.finish for update in updates if update.finish}


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")


@pytest.mark.parametrize("where", ["at_launch", "at_end"])
def test_out_of_memory_ends_the_requests_of_its_step_and_no_others(gpu, where) -> None:
    engine = engine_with(**{where: {2: out_of_memory()}})
    engine.add(request("a"))
    first = engine.step()
    failed = engine.step()
    engine.add(request("b"))
    rest = run(engine)
    assert [len(update.tokens) for update in first] == [1]
    assert ends(failed) == {"a": Finish.ERROR}
    message = failed[0].detail.message if failed[0].detail else ""
    assert message.startswith("The GPU ran out of memory in a step of 1 tokens for 1 requests. Send this one again;")
    assert ends(rest) == {"b": Finish.LENGTH}
    assert gpu.num_emptied == 1
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_blocks


def test_nothing_is_launched_behind_a_plan_that_failed(gpu) -> None:
    """The next plan would count on its tokens, and fail with whoever has joined meanwhile."""
    engine = engine_with(depth=2, at_launch={1: out_of_memory()})
    engine.add(request("a"))
    assert ends(engine.step()) == {"a": Finish.ERROR}
    assert len(engine.runner.launched) == 1  # type: ignore[attr-defined]
    engine.runner.depth = 1  # type: ignore[misc]  # the CPU's runner, which is asked from here on, knows no other
    engine.add(request("b"))
    assert ends(run(engine)) == {"b": Finish.LENGTH}


def test_a_failure_that_leaves_the_gpu_alive_is_the_step_s_alone(gpu) -> None:
    engine = engine_with(at_launch={1: torch.AcceleratorError("CUDA error: invalid argument")})
    engine.add(request("a"))
    (update,) = engine.step()
    assert update.finish is Finish.ERROR
    engine.add(request("b"))
    assert ends(run(engine)) == {"b": Finish.LENGTH}


def test_a_step_whose_event_fails_is_done_and_says_so_when_it_is_waited_for() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from quire.engine.batch import Samples
    from quire.engine.gpu_runner import GpuStep
    from quire.engine.sampler import SamplerOutput

    def fail() -> bool:
        raise torch.AcceleratorError(LOST)

    host_outputs: Any = SimpleNamespace(done_event=SimpleNamespace(query=fail))
    runner: Any = None
    output = SamplerOutput(torch.zeros(0), torch.zeros(0))
    step = GpuStep(runner, Plan(1), Samples(), torch.zeros(0), host_outputs, output=output)
    assert step.is_done()


@pytest.mark.parametrize("where", ["at_launch", "at_end"])
@pytest.mark.parametrize(
    "error", [torch.AcceleratorError(LOST), RuntimeError("Triton Error [CUDA]: misaligned")], ids=repr
)
def test_a_lost_gpu_ends_the_engine(gpu, where, error) -> None:
    gpu.lost = True
    engine = engine_with(depth=2, **{where: {1: error}})
    engine.add(request("a"))
    with pytest.raises(
        DeviceLost, match=f"^The GPU failed: {LOST}\\. This process cannot use it any more; start a new"
    ):
        engine.step()


def test_the_engine_s_process_ends_with_its_gpu(monkeypatch) -> None:
    """And so is started again by the supervisor; its teardown is not waited for."""

    class Loop:
        def run(self) -> None:
            raise DeviceLost("gone")

    codes: list[int] = []
    monkeypatch.setattr(process, "load", lambda link: Loop())
    monkeypatch.setattr(process, "Connection", lambda connection: None)
    monkeypatch.setattr(process.socket, "socket", lambda fileno: None)
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(process.logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(process.os, "_exit", codes.append)
    monkeypatch.setattr(sys, "argv", ["process", "7"])
    process.main()
    assert codes == [process.EXIT_DEVICE_LOST]


def test_an_engine_in_a_thread_tells_its_callers(gpu) -> None:
    gpu.lost = True
    client = threaded(engine_with(at_launch={1: torch.AcceleratorError(LOST)}))

    async def ask() -> None:
        async for _ in client.submit([request("a")]):
            raise AssertionError("no update was expected")

    with pytest.raises(DeviceLost):
        asyncio.run(ask())
    client._thread.join(10.0)
    assert not client.health()


def threaded(engine: Engine) -> AsyncClient:
    """A client around an engine that is there already."""
    client = AsyncClient.__new__(AsyncClient)
    client._work, client._mailboxes, client._engine = queue.SimpleQueue(), {}, engine
    client._work_lock, client._ended = threading.Lock(), None
    client._thread = threading.Thread(target=client._run, daemon=True)
    client._thread.start()
    return client


def test_a_submit_while_the_thread_dies_is_told(gpu) -> None:
    """It is put into the queue when the engine has failed already and the thread has not ended yet."""
    gpu.lost = True
    engine = engine_with(at_launch={1: torch.AcceleratorError(LOST)})
    client, late = threaded(engine), list[asyncio.Task[None]]()

    async def ask(name: str) -> None:
        async for _ in client.submit([request(name)]):
            raise AssertionError("no update was expected")

    async def main() -> list[object]:
        loop, fail = asyncio.get_running_loop(), engine._fail

        async def submit_late() -> None:
            late.append(asyncio.create_task(ask("late")))
            while client._work.empty():
                await asyncio.sleep(0)

        def fail_slowly(*args: Any) -> list[Update]:
            asyncio.run_coroutine_threadsafe(submit_late(), loop).result(30)
            return fail(*args)

        engine._fail = fail_slowly  # type: ignore[method-assign]
        first = asyncio.create_task(ask("first"))
        done = await asyncio.wait_for(asyncio.gather(first, return_exceptions=True), 60)
        return [*done, *await asyncio.wait_for(asyncio.gather(*late, return_exceptions=True), 60)]

    assert [type(error) for error in asyncio.run(main())] == [DeviceLost, DeviceLost]


def test_an_engine_s_thread_that_fails_says_why(monkeypatch) -> None:
    engine = engine_with()
    monkeypatch.setattr(engine, "step", lambda: (_ for _ in ()).throw(RuntimeError("a bug")))
    client = threaded(engine)

    async def ask() -> None:
        async for _ in client.submit([request("a")]):
            raise AssertionError("no update was expected")

    for _ in range(2):
        with pytest.raises(EngineError, match=r"^The engine failed: a bug"):
            asyncio.run(asyncio.wait_for(ask(), 60))
    assert not client.health()


# ── in planning ───────────────────────────────────────────────────────────────────────────────────────────────────


def failing_once(monkeypatch: pytest.MonkeyPatch, engine: Engine, name: str, error: BaseException) -> None:
    """One of the scheduler's methods fails when it has done half of its work, and works again from then on."""
    scheduler, original, errors = engine.scheduler, getattr(engine.scheduler, name), [error]

    def failing(*args: Any) -> Any:
        result = original(*args)
        if errors:
            raise errors.pop()
        return result

    monkeypatch.setattr(scheduler, name, failing)


@pytest.mark.parametrize("name", ["_admit", "_publish_chunks", "_details", "_advance"])
def test_an_error_in_planning_ends_one_request_and_the_others_are_served(name, monkeypatch) -> None:
    engine = engine_with()
    engine.info.device = "cpu"  # type: ignore[misc]
    for each in "abc":
        engine.add(request(each))
    failing_once(monkeypatch, engine, name, RuntimeError("a bug"))
    updates = run(engine)
    assert sorted(ends(updates).values()) == [Finish.ERROR, Finish.LENGTH, Finish.LENGTH]
    (ended,) = (update for update in updates if update.finish is Finish.ERROR)
    assert ended.detail is not None
    assert ended.detail.message == "The engine failed on this request: a bug"
    assert sum(len(update.tokens) for update in updates if update.id != ended.id) == 8
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_blocks


def test_plans_in_flight_are_dropped_when_planning_fails(gpu, monkeypatch) -> None:
    """And what they computed is computed again: the tokens are the same."""
    expected = run_alone("a")
    engine = engine_with(depth=1)
    engine.add(request("a"))
    engine.step()
    engine._launch()
    engine.add(request("b"))
    engine.runner.depth = 2  # type: ignore[misc]
    failing_once(monkeypatch, engine, "_admit", RuntimeError("a bug"))
    failed = engine.step()
    engine.runner.depth = 1  # type: ignore[misc]
    updates = [*failed, *run(engine)]
    assert ends(updates) == {"a": Finish.LENGTH, "b": Finish.ERROR}
    assert [token for update in updates if update.id == "a" for token in update.tokens] == expected[1:]


def run_alone(name: str) -> list[int]:
    engine = engine_with()
    engine.add(request(name))
    return [token for update in run(engine) for token in update.tokens]


@pytest.mark.parametrize("name", ["_admit", "_advance"])
def test_ctrl_c_in_planning_leaves_the_pool_whole(name, monkeypatch) -> None:
    engine = engine_with()
    for each in "ab":
        engine.add(request(each))
    failing_once(monkeypatch, engine, name, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    for each in "ab":
        engine.abort(each)
    assert not engine.has_work
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_blocks
    engine.add(request("c"))
    assert ends(run(engine)) == {"c": Finish.LENGTH}


def test_an_order_that_cannot_be_added_is_refused_and_the_process_goes_on(monkeypatch) -> None:
    sent: list[Any] = []
    link = SimpleNamespace(send=sent.append, closed=False)
    engine = engine_with()
    monkeypatch.setattr(process, "make_meter", lambda engine, config: Observer())
    loop = process.EngineLoop(engine, link, Start(EngineConfig(), "none"))  # type: ignore[arg-type]
    good, bad, other = (EngineRequest.of(request(name), name, None, [], 0, 0.0) for name in ("good", "bad", "other"))
    loop._submit([good])
    failing_once(monkeypatch, engine, "_enqueue", RuntimeError("a bug"))
    loop._submit([bad, other])
    assert sent == [
        AddingRequests(["good"]),
        AddingRequests(["bad", "other"]),
        Refused(["bad", "other"], "EngineError", "The engine failed on this request: a bug"),
    ]
    assert ends(run(engine)) == {"good": Finish.LENGTH}
