"""Tokens without an answer: POST /tokenize (vLLM's form or TGI's), /detokenize (vLLM's), /apply-template (llama.cpp's).

What may take long is done in a thread, so that no stream stands still meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from pydantic import StrictBool, StrictInt
from starlette.responses import Response

from quire.errors import InvalidField
from quire.server.context import Context, context
from quire.server.conversation import Inquiry
from quire.server.documents import PromptText, Tokens, TokenSpan, answers
from quire.server.fields import ArrayOf, Fields
from quire.server.stream import JSON
from quire.server.tgi.tokenize import spans
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tools.definitions import parse_tool_choice, parse_tools

router = APIRouter()


class Conversation(Fields):
    """What a chat template is given."""

    model: str | None = None
    messages: ArrayOf[dict[str, Any]] | None = None
    tools: ArrayOf[dict[str, Any]] | None = None
    add_generation_prompt: StrictBool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    async def render(self, call: Context) -> str:
        """The prompt that a chat completion would make of it."""
        if self.messages is None:
            raise InvalidField("messages is missing; it is required.", "messages")
        tools = parse_tools(self.tools)
        inquiry = Inquiry(
            messages=self.messages,
            tools=tools,
            choice=parse_tool_choice(None, tools, None),
            template=self.chat_template,
            add_generation_prompt=self.add_generation_prompt is not False,
            extra=self.chat_template_kwargs,
        )
        return await (await inquiry.prepare(call.service)).render()


class TokenizeRequest(Conversation):
    """One of prompt, messages (vLLM) and inputs (TGI), and what goes with it."""

    prompt: str | None = None
    inputs: str | None = None
    add_special_tokens: StrictBool | None = None
    return_token_strs: StrictBool | None = None

    def form(self) -> str:
        """The field that says what to tokenize. Fields that belong to another one would have no effect."""
        forms = [name for name in FORMS if getattr(self, name) is not None]
        if len(forms) != 1:
            given = " and ".join(forms) if forms else "none of them"
            raise InvalidField(f"Give exactly one of {', '.join(FORMS)}; the request has {given}.", "prompt")
        for name in sorted(self.model_fields_set - FORMS[forms[0]]):
            if getattr(self, name) is not None:
                raise InvalidField(f"{name} has no effect on {forms[0]}; leave it out.", name)
        return forms[0]


class DetokenizeRequest(Fields):
    model: str | None = None
    tokens: ArrayOf[StrictInt]


FORMS: dict[str, frozenset[str]] = {
    "prompt": frozenset({"model", "prompt", "add_special_tokens", "return_token_strs"}),
    "messages": frozenset({*Conversation.model_fields, "add_special_tokens", "return_token_strs"}),
    "inputs": frozenset({"inputs", "add_special_tokens"}),
}


@router.post("/tokenize", responses=answers(Tokens | list[TokenSpan]))
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """The tokens of a text or a conversation."""
    call = context(request)
    call.check_model(body.model)
    form = body.form()
    if body.inputs is not None:
        with_special = body.add_special_tokens is not False
        return JSON(await spans(call.service.tokenizer, body.inputs, add_special_tokens=with_special))
    text = await body.render(call) if body.prompt is None else body.prompt
    with_special = form == "prompt" if body.add_special_tokens is None else body.add_special_tokens
    tokens = await call.service.encode(text, add_special_tokens=with_special)
    names = await asyncio.to_thread(spell, call.service.tokenizer, tokens) if body.return_token_strs else None
    return JSON(
        {
            "count": len(tokens),
            "max_model_len": call.service.ready.max_len,
            "tokens": tokens,
            "token_strs": names,
        }
    )


def spell(tokenizer: Tokenizer, tokens: list[int]) -> list[str | None]:
    return [tokenizer.id_to_token(token) for token in tokens]


@router.post("/detokenize", responses=answers(PromptText))
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """The text of tokens, special ones included."""
    call = context(request)
    call.check_model(body.model)
    text = await asyncio.to_thread(call.service.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return JSON({"prompt": text})


@router.post("/apply-template", responses=answers(PromptText))
async def apply_template(request: Request, body: Conversation) -> Response:
    """A conversation as the text that the model's chat template makes of it."""
    call = context(request)
    call.check_model(body.model)
    return JSON({"prompt": await body.render(call)})
