"""Texts and conversations as tokens, as TGI writes them: each with its id and its place in the text.

POST /chat_tokenize is here. POST /tokenize is `server/tokens.py`'s, which comes here for TGI's form of it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.context import context
from quire.server.documents import TemplatedTokens, TGIError, answers
from quire.server.openai.chat import read_inquiry
from quire.server.openai.fields import ChatRequest
from quire.server.stream import JSON
from quire.text.tokenizers.tokenizer import Tokenizer

router = APIRouter()


@router.post("/chat_tokenize", responses=answers(TemplatedTokens, error=TGIError))
async def chat_tokenize(request: Request, body: ChatRequest) -> Response:
    """The body of a chat completion as the text and the tokens that the model would see."""
    call = context(request)
    call.check_model(body.model)
    text = await (await read_inquiry(body).prepare(call.service)).render()
    tokens = await spans(call.service.tokenizer, text, add_special_tokens=False)
    return JSON({"tokenize_response": tokens, "templated_text": text})


async def spans(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[dict[str, Any]]:
    """Each token with the characters of the text that it stands for; none for one that was put in front."""

    def work() -> list[dict[str, Any]]:
        return [
            {"id": token, "text": text[start:stop], "start": start, "stop": stop}
            for token, start, stop in tokenizer.encode_offsets(text, add_special_tokens)
        ]

    return await asyncio.to_thread(work)
