"""A FastAPI app of your own around AsyncLLM: each line it sends is the answer so far. All requests share one batch.

uvicorn --app-dir examples fastapi_app:app --port 8001 &
curl -N 'http://127.0.0.1:8001/continue?text=Once+upon+a+time'
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from quire import AsyncLLM, SamplingParams


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.llm = AsyncLLM("smollm2:135m", max_len=2048)
    yield
    app.state.llm.shutdown()


app = FastAPI(lifespan=lifespan)


@app.get("/continue")
async def go_on(text: str, max_tokens: int = 32) -> StreamingResponse:
    answers = app.state.llm.generate(text, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    return StreamingResponse((answer.outputs[0].text + "\n" async for answer in answers), media_type="text/plain")
