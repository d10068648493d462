"""Async streaming: two answers grow side by side, in one batch of one engine.

python examples/async_streaming.py
"""

import asyncio

from quire import AsyncLLM, SamplingParams


async def follow(llm: AsyncLLM, name: str, prompt: str) -> None:
    text = ""
    async for output in llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=16)):
        answer = output.outputs[0]
        print(f"{name}: {answer.text[len(text) :]!r}")
        text = answer.text
    print(f"{name} is complete: {text!r}")


async def main() -> None:
    llm = AsyncLLM("smollm2:135m", max_len=2048)
    try:
        await asyncio.gather(follow(llm, "one", "The sun is"), follow(llm, "two", "The moon is"))
    finally:
        llm.shutdown()


asyncio.run(main())
