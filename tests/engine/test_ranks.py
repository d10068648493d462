"""Ranks as processes: they answer as one process does, one that dies ends the engine with a clear error, a server goes
on with the same tokens, and no process is left. Bits over batches, caches and families: tests/kernels/native."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.client import start_engine
from quire.engine.engine import Engine
from quire.engine.supervisor import EngineCallbacks, Supervised
from quire.errors import InvalidParams, RankLost
from quire.kernels.numa import allowed_cores
from tests.tools.native import ISAS  # noqa: F401  skips where the kernels cannot run
from tests.tools.tiny_models import tiny_directory

pytestmark = pytest.mark.cpu

PROMPTS = [[3, 14, 15, 92, 65], [35, 8], list(range(40))]
GONE_S = 30.0


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("llama"), "llama")


def build(path: Path, size: int, **options: Any) -> Engine:
    return start_engine(EngineConfig(device="cpu", num_blocks=64, tensor_parallel_size=size, **options), path)


def requests(max_tokens: int = 12) -> list[Request]:
    return [
        Request(
            str(number), prompt, SamplingParams(temperature=number % 2, max_tokens=max_tokens, ignore_eos=True),
            seed=number, max_tokens=max_tokens,
        )
        for number, prompt in enumerate(PROMPTS)
    ]  # fmt: skip


def answer(engine: Engine) -> list[list[int]]:
    asked = requests()
    for request in asked:
        engine.add(request)
    run(engine)
    return [request.tokens[request.num_prompt :] for request in asked]


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def processes(engine: Engine) -> list[int]:
    assert engine.ranks is not None
    return engine.ranks.process_ids


def wait_until_gone(process_ids: list[int]) -> None:
    """The parent has waited for them, or their parent has ended."""
    until = time.monotonic() + GONE_S
    while any(Path(f"/proc/{each}").exists() for each in process_ids):
        assert time.monotonic() < until, process_ids
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
def test_processes_answer_as_one_and_end_with_the_engine(llama: Path) -> None:
    expected = answer(build(llama, 1))
    engine = build(llama, 2, swap_memory=0.001, threads=4)
    assert "on 4 threads of 2 ranks" in engine.info.summary
    assert engine.info.cache.block_bytes == build(llama, 1).info.cache.block_bytes
    assert answer(engine) == expected
    started = processes(engine)
    assert len(started) == 1
    engine.close()
    wait_until_gone(started)
    engine = build(llama, 3, threads=4)  # of which one rank has two; one key head is cached by two ranks
    assert answer(engine) == expected
    started = processes(engine)
    del engine
    wait_until_gone(started)


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_random_weights_are_those_of_one_process(llama: Path, quantize: str) -> None:
    """Counting them allocates no pages of rank 0 that the others do not have."""
    expected = answer(build(llama, 1, weights="random", quantize=quantize))
    engine = build(llama, 2, weights="random", quantize=quantize)
    assert answer(engine) == expected
    engine.close()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (40, "40")])  # the other has no name
def test_a_rank_that_dies_ends_the_engine_with_an_error(llama: Path, number: int, name: str) -> None:
    engine = build(llama, 2)
    engine.add(requests()[0])
    engine.step()
    os.kill(processes(engine)[0], number)
    with pytest.raises(RankLost, match=rf"^Rank 1 of 2 ended \(signal {name}\), and the engine cannot go on"):
        run(engine)
    wait_until_gone(processes(engine))
    engine.close()


@pytest.mark.skipif(len(allowed_cores()) < 2, reason="two nodes need two cores")
def test_the_callers_thread_has_all_cores_again(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next engine of the process would use one node only."""
    import quire.engine.ranks as module

    cores = allowed_cores()
    nodes = [{min(cores)}, cores - {min(cores)}]
    monkeypatch.setattr(module, "read_nodes", lambda: nodes)
    engine = build(llama, 2)
    assert allowed_cores() == nodes[0]
    engine.close()
    assert allowed_cores() == cores


def test_a_rank_that_cannot_be_built_says_why(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks read the files themselves."""
    import quire.engine.ranks as module

    spawn = module.spawn

    def spawn_elsewhere(start: Any, file: int) -> Any:
        return spawn(module.replace(start, path=str(llama / "nothing")), file)

    monkeypatch.setattr(module, "spawn", spawn_elsewhere)
    with pytest.raises(Exception, match="nothing"):
        build(llama, 2)


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (5, {}, "tensor_parallel_size is 5, but a hidden size of 64 can be shared by at most 4. Lower it."),
        (65, {}, "tensor_parallel_size is 65, but a model can be shared by at most 64. Lower it."),
        (3, {"threads": 2}, "tensor_parallel_size is 3, but the ranks have 2 threads to divide; raise threads to at"),
        (2, {"speculate": "self:1"}, "speculate names 'self', which needs the whole model in one process, and tensor_"),
        (2, {"exit_head": "somewhere"}, "exit_head is given, which needs the whole model in one process, and tensor_"),
        (2, {"kernels": "torch"}, "tensor_parallel_size is 2, which needs quire's own CPU kernels, and the model runs"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_they_start(
    llama: Path, size: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidParams) as caught:
        build(llama, size, **options)
    assert str(caught.value).startswith(message)


def test_a_server_goes_on_with_the_same_tokens_when_a_rank_dies(llama: Path) -> None:
    """The engine ends with its rank, and is started again."""

    async def collect(client: Supervised, request: Request, seen: list[int]) -> list[int]:
        tokens: list[int] = []
        async for updates in client.submit([request]):
            for update in updates:
                tokens += update.tokens
                seen += update.tokens
        return tokens

    async def main() -> tuple[list[list[int]], list[str]]:
        restarts: list[str] = []
        config = EngineConfig(device="cpu", num_blocks=64, tensor_parallel_size=2)
        client = Supervised(config, llama, callbacks=EngineCallbacks(on_restart=restarts.append))
        await client.start()
        try:
            seen: list[int] = []
            working = [asyncio.ensure_future(collect(client, request, seen)) for request in requests(60)]
            while len(seen) < 9:
                await asyncio.sleep(0.001)
            assert client.process_id is not None
            os.kill(rank_of(client.process_id), signal.SIGKILL)
            return await asyncio.gather(*working), restarts
        finally:
            await client.close()

    engine, asked = build(llama, 1), requests(60)
    for request in asked:
        engine.add(request)
    run(engine)
    found, restarts = asyncio.run(main())
    assert found == [request.tokens[request.num_prompt :] for request in asked]
    assert restarts == ["signal SIGKILL"]  # as its rank: a kill from outside is no sign against a request


def rank_of(process_id: int) -> int:
    children = Path(f"/proc/{process_id}/task").glob("*/children")
    (rank,) = (int(child) for tasks in children for child in tasks.read_text().split())
    return rank
