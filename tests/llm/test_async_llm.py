"""AsyncLLM: many coroutines, one engine in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from quire import AsyncLLM, SamplingParams
from quire.errors import EngineClosed, InvalidParams, PromptTooLong

pytestmark = pytest.mark.model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def async_llm(default_model) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(max_len=512, num_blocks=200)
    yield llm
    llm.shutdown()


async def collect(
    llm: AsyncLLM, prompt: str, params: SamplingParams = GREEDY, request_id: str | None = None
) -> list[str]:
    return [out.outputs[0].text async for out in llm.generate(prompt, params, request_id)]


def pool_is_whole(llm: AsyncLLM) -> bool:
    pool = llm._client._engine.scheduler.kv.pool
    return pool.num_free == pool.num_blocks


def test_streams_grow_and_share_a_batch(async_llm: AsyncLLM) -> None:
    async def run() -> list[list[str]]:
        prompts = ["One, two, three,", "The sky is", "The capital of France is", "Water boils at"]
        return await asyncio.gather(*(collect(async_llm, prompt) for prompt in prompts))

    streams = asyncio.run(run())
    assert all(len(stream) > 3 for stream in streams)
    assert "four" in streams[0][-1]
    assert "Paris" in streams[2][-1]
    assert streams[0][-1] == asyncio.run(collect(async_llm, "One, two, three,"))[-1]


def test_samples_of_one_prompt(async_llm: AsyncLLM) -> None:
    async def run() -> list[str]:
        params = SamplingParams(n=3, seed=3, max_tokens=8)
        async for out in async_llm.generate("I like", params):
            last = out
        assert last.finished
        return [answer.text for answer in last.outputs]

    assert len(set(asyncio.run(run()))) == 3


def test_leaving_early_frees_the_blocks(async_llm: AsyncLLM) -> None:
    async def run() -> None:
        stream = async_llm.generate("Once upon a time", SamplingParams(max_tokens=300, ignore_eos=True))
        async for _ in stream:
            break
        await stream.aclose()
        await collect(async_llm, "hi")

    asyncio.run(run())
    assert pool_is_whole(async_llm)


def test_a_cancelled_task_frees_its_blocks(async_llm: AsyncLLM) -> None:
    async def run() -> None:
        long = SamplingParams(max_tokens=300, ignore_eos=True)
        task = asyncio.create_task(collect(async_llm, "Once upon a time", long))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await collect(async_llm, "hi")

    asyncio.run(run())
    assert pool_is_whole(async_llm)


def test_abort_by_id(async_llm: AsyncLLM) -> None:
    async def run() -> str | None:
        reason = None
        async for out in async_llm.generate("Once", SamplingParams(max_tokens=300, ignore_eos=True), "mine"):
            reason = out.outputs[0].finish_reason
            await async_llm.abort("mine")
        return reason

    assert asyncio.run(run()) == "abort"


def test_abort_ends_all_samples_of_a_request(async_llm: AsyncLLM) -> None:
    async def run() -> set[str | None]:
        params = SamplingParams(n=3, max_tokens=300, ignore_eos=True)
        async for out in async_llm.generate("Once", params, "a#b"):
            last = out
            await async_llm.abort("a#b")
        assert last.request_id == "a#b"
        return {answer.finish_reason for answer in last.outputs}

    assert asyncio.run(run()) == {"abort"}


def test_a_stop_string(async_llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, stop=[" six"])
    texts = asyncio.run(collect(async_llm, "One, two, three,", params))
    assert texts[-1].endswith("five,")
    assert all(" six" not in text for text in texts)


def test_refusals_reach_the_caller_and_nobody_else(async_llm: AsyncLLM) -> None:
    async def run() -> list[object]:
        return await asyncio.gather(
            collect(async_llm, "One, two, three,"),
            collect(async_llm, "word " * 600),
            collect(async_llm, "good", request_id="same"),
            collect(async_llm, "good", request_id="same"),
            return_exceptions=True,
        )

    good, long, first, second = asyncio.run(run())
    assert isinstance(good, list)
    assert isinstance(long, PromptTooLong)
    assert isinstance(first, list)
    assert isinstance(second, InvalidParams)


def test_an_id_that_is_taken_leaves_the_first_request_alone(async_llm: AsyncLLM) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)

    async def run(params: SamplingParams) -> tuple[int, str | None]:
        num_tokens, reason = 0, None
        async for out in async_llm.generate("Once", long, "taken"):
            num_tokens, reason = len(out.outputs[0].token_ids), out.outputs[0].finish_reason
            if num_tokens == 3:
                with pytest.raises(InvalidParams, match=r"'taken' is running already"):
                    await collect(async_llm, "Twice", params, "taken")
        return num_tokens, reason

    for params in (long, SamplingParams(n=2)):
        assert asyncio.run(run(params)) == (60, "length")


def test_the_id_of_a_sample_that_is_taken_leaves_it_alone(async_llm: AsyncLLM) -> None:
    """Here the engine finds out: the samples of "a" are "a#0" and "a#1"."""
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)

    async def run() -> tuple[int, str | None]:
        async for out in async_llm.generate("Once", long, "a#1"):
            last = out.outputs[0]
            if len(last.token_ids) == 3:
                with pytest.raises(InvalidParams, match="'a#1' is running already"):
                    await collect(async_llm, "Twice", SamplingParams(n=2), "a")
        return len(last.token_ids), last.finish_reason

    assert asyncio.run(run()) == (60, "length")


def test_a_number_as_an_id_does_not_stand_in_the_way(async_llm: AsyncLLM) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)

    async def run() -> None:
        taken = str(next(async_llm._input_processor.request_counter) + 2)
        async for _ in async_llm.generate("Once", long, taken):
            await collect(async_llm, "Twice", SamplingParams(max_tokens=1))

    asyncio.run(run())


def test_shutdown_ends_what_is_open(default_model) -> None:
    llm = AsyncLLM(max_len=256, num_blocks=32)

    async def run() -> None:
        task = asyncio.create_task(collect(llm, "Once", SamplingParams(max_tokens=200, ignore_eos=True)))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineClosed):
            await task
        with pytest.raises(EngineClosed):
            await collect(llm, "hi")

    asyncio.run(run())
    assert not llm.health()
