"""Tokens without generation: POST /tokenize (vLLM's and TGI's form), /detokenize (vLLM), /apply-template (llama.cpp)
and /chat_tokenize (TGI).

Work that may take long runs in a thread, so that it does not block streams.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import StrictBool, StrictInt
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidField
from quire.server.chat import ChatInput
from quire.server.openai.chat import chat_input
from quire.server.openai.protocol import ChatCompletionRequest
from quire.server.request_model import ArrayOf, RequestModel
from quire.server.router import Router
from quire.server.schemas import PromptText, TemplatedTokens, TGIError, Tokens, TokenSpan, response_schemas
from quire.server.service import RequestContext, request_context
from quire.server.streaming import JSONResponse
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tools.definitions import parse_tool_choice, parse_tools

router = Router()


class TemplateRequest(RequestModel):
    """The input of a chat template."""

    model: str | None = None
    messages: ArrayOf[dict[str, Any]] | None = None
    tools: ArrayOf[dict[str, Any]] | None = None
    add_generation_prompt: StrictBool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    async def render(self, context: RequestContext) -> str:
        """The prompt of a chat completion with the same fields."""
        if self.messages is None:
            raise InvalidField("messages is missing; it is required.", "messages")
        tools = parse_tools(self.tools)
        chat = ChatInput(
            messages=self.messages,
            tools=tools,
            tool_choice=parse_tool_choice(None, tools, None),
            chat_template=self.chat_template,
            add_generation_prompt=self.add_generation_prompt is not False,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        return (await context.service.templates.prepare(chat)).text


class TokenizeRequest(TemplateRequest):
    """One of prompt, messages (vLLM) and inputs (TGI), with the fields of that form."""

    prompt: str | None = None
    inputs: str | None = None
    add_special_tokens: StrictBool | None = None
    return_token_strs: StrictBool | None = None

    def form(self) -> str:
        """The field that says what to tokenize. Fields that belong to another form are refused."""
        forms = [name for name in FORMS if getattr(self, name) is not None]
        if len(forms) != 1:
            given = " and ".join(forms) if forms else "none of them"
            raise InvalidField(f"Give exactly one of {', '.join(FORMS)}; the request has {given}.", "prompt")
        for name in sorted(self.model_fields_set - FORMS[forms[0]]):
            if getattr(self, name) is not None:
                raise InvalidField(f"{name} has no effect on {forms[0]}; leave it out.", name)
        return forms[0]


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: ArrayOf[StrictInt]


FORMS: dict[str, frozenset[str]] = {
    "prompt": frozenset({"model", "prompt", "add_special_tokens", "return_token_strs"}),
    "messages": frozenset({*TemplateRequest.model_fields, "add_special_tokens", "return_token_strs"}),
    "inputs": frozenset({"inputs", "add_special_tokens"}),
}


@router.post("/tokenize", responses=response_schemas(Tokens | list[TokenSpan]))
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """The tokens of a text or a conversation."""
    context = request_context(request, body.model)
    form = body.form()
    if body.inputs is not None:
        with_special = body.add_special_tokens is not False
        return JSONResponse(await token_spans(context.service.tokenizer, body.inputs, add_special_tokens=with_special))
    text = await body.render(context) if body.prompt is None else body.prompt
    with_special = form == "prompt" if body.add_special_tokens is None else body.add_special_tokens
    tokens = await context.service.encode(text, add_special_tokens=with_special)
    names = (
        await asyncio.to_thread(token_strings, context.service.tokenizer, tokens) if body.return_token_strs else None
    )
    return JSONResponse(
        {
            "count": len(tokens),
            "max_model_len": context.service.ready.max_len,
            "tokens": tokens,
            "token_strs": names,
        }
    )


def token_strings(tokenizer: Tokenizer, tokens: list[int]) -> list[str | None]:
    return [tokenizer.id_to_token(token) for token in tokens]


@router.post("/detokenize", responses=response_schemas(PromptText))
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """The text of tokens, special ones included."""
    context = request_context(request, body.model)
    text = await asyncio.to_thread(context.service.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return JSONResponse({"prompt": text})


@router.post("/apply-template", responses=response_schemas(PromptText))
async def apply_template(request: Request, body: TemplateRequest) -> Response:
    """Render a conversation with the chat template."""
    context = request_context(request, body.model)
    return JSONResponse({"prompt": await body.render(context)})


@router.post("/chat_tokenize", responses=response_schemas(TemplatedTokens, error=TGIError))
async def chat_tokenize(request: Request, body: ChatCompletionRequest) -> Response:
    """The text and tokens of the prompt of a chat completion."""
    context = request_context(request, body.model)
    prompt = await context.service.templates.prepare(chat_input(body))
    tokens = await token_spans(context.service.tokenizer, prompt.text, add_special_tokens=False)
    return JSONResponse({"tokenize_response": tokens, "templated_text": prompt.text})


async def token_spans(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[dict[str, Any]]:
    """Each token with its characters of the text. A special token that the tokenizer adds has none."""

    def work() -> list[dict[str, Any]]:
        return [
            {"id": token, "text": text[start:stop], "start": start, "stop": stop}
            for token, start, stop in tokenizer.encode_offsets(text, add_special_tokens)
        ]

    return await asyncio.to_thread(work)
