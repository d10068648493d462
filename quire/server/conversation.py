"""Chat as every API of the server has it, before an API's own names and documents.

Inquiry is a conversation, the tools on offer and the shape that the answer must have. ChatPrompt makes an exchange of
it. `narrate` reads the answer as text and calls.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from quire.core.params import SamplingParams
from quire.errors import InvalidParams
from quire.server.context import Context
from quire.server.openai.choices import check
from quire.server.service import Service
from quire.server.templates import Template
from quire.text.output_processor import OutputProcessor
from quire.text.tools.definitions import NO_TOOLS, Tool, ToolChoice
from quire.text.tools.events import Event, TextDelta
from quire.text.tools.formats import ToolFormat, special_markers
from quire.text.tools.grammar import tool_call_grammar
from quire.text.tools.parser import ToolParser


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """
    messages   the conversation, as OpenAI's chat completions write it
    tools      what the prompt shows, and the choice among them
    structure  what the answer must look like, where it is not a call
    prefill    how the answer begins; the model goes on from there
    template   the request's own chat template; None takes the model's
    add_generation_prompt, extra   what else the template is given
    """

    messages: Sequence[Mapping[str, Any]]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = NO_TOOLS
    structure: Mapping[str, Any] | None = None
    prefill: str = ""
    template: str | None = None
    add_generation_prompt: bool = True
    extra: Mapping[str, Any] | None = None

    async def prepare(self, service: Service) -> ChatPrompt:
        return ChatPrompt(self, service, await service.templates.find(self.template))


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """An inquiry together with the template that writes it."""

    inquiry: Inquiry
    service: Service
    template: Template

    @property
    def format(self) -> ToolFormat:
        return self.template.capabilities.format

    def demands(self) -> dict[str, Any]:
        """The sampling parameters that follow from tools and structure."""
        structure, choice = self.inquiry.structure, self.inquiry.choice
        if choice.mode == "none":
            return {"structured_outputs": structure} if structure is not None else {}
        if structure is not None and not choice.is_forced:
            raise InvalidParams(
                "The answer is to be JSON and may be a call of a tool as well; ask for one of the two: set tool_choice "
                "so that there must be a call, or none, or leave the format out."
            )
        grammar = tool_call_grammar(self.format, choice, special_markers(self.format, self.service.tokenizer))
        return {} if grammar is None else {"structured_outputs": {"grammar": grammar}}

    def kept(self) -> frozenset[int]:
        """Special tokens that mark calls: the parser has to see them."""
        if self.inquiry.choice.mode == "none":
            return frozenset()
        return frozenset(special_markers(self.format, self.service.tokenizer).values())

    async def render(self) -> str:
        """The prompt as text."""
        inquiry = self.inquiry
        shown = inquiry.tools if inquiry.choice.mode != "none" else ()
        text = await self.template.render(
            inquiry.messages, shown, add_generation_prompt=inquiry.add_generation_prompt, extra=inquiry.extra
        )
        return text + inquiry.prefill

    async def open(self, call: Context, params: SamplingParams, priority: int = 0) -> OutputProcessor:
        await call.prepare(params)
        text = await self.render()
        tokens = await self.service.encode_prompt(text, add_special_tokens=False)
        prompt = {"prompt": text, "prompt_token_ids": tokens}
        return await self.service.open(prompt, params, call.caller, call.new_id(), priority, self.kept())

    def parser(self) -> ToolParser | None:
        return None if self.inquiry.choice.mode == "none" else ToolParser(self.format, self.inquiry.choice)


async def narrate(
    service: Service, exchange: OutputProcessor, parser: ToolParser | None
) -> AsyncGenerator[list[Event], None]:
    """What the one answer of an exchange says, as it grows.

    Where a single call was wanted the answer ends with it, whatever the model would have gone on to say.
    """
    answer, num_chars = exchange.output.outputs[0], 0
    async with aclosing(service.answer([exchange])) as growth:  # type: ignore[type-var]
        async for _ in growth:
            check(exchange)
            text, num_chars = answer.text[num_chars:], len(answer.text)
            events: list[Event] = [TextDelta(text)] if text else []
            if parser is not None:
                events = parser.push(text) + (parser.finish() if answer.finished else [])
            yield events
            if parser is not None and parser.finished:
                return
