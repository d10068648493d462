"""Inquiry: a conversation, the tools on offer and the shape that the answer must have, on their way to an exchange; and
`narrate`, the answer on its way back, as text and calls. What an API calls all this is its routes' own affair.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from quire.core.params import SamplingParams
from quire.errors import InvalidParams
from quire.server.context import Context
from quire.server.openai.choices import check
from quire.server.service import Service
from quire.text.chat_template import ChatTemplate
from quire.text.exchange import Exchange
from quire.text.tool_dialect import Dialect, choose_dialect
from quire.text.tool_events import Event, TextPiece
from quire.text.tool_formats import special_markers
from quire.text.tool_grammar import call_grammar
from quire.text.tool_messages import prepare_messages
from quire.text.tool_parser import ToolParser
from quire.text.tools import NO_TOOLS, Tool, ToolChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """
    messages   the conversation, as OpenAI's chat completions write it
    tools      what the prompt shows, and the choice among them
    structure  what the answer must look like, where it is not a call
    prefill    how the answer begins; the model goes on from there
    """

    messages: Sequence[Mapping[str, Any]]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = NO_TOOLS
    structure: Mapping[str, Any] | None = None
    prefill: str = ""

    def demands(self, service: Service) -> dict[str, Any]:
        """The sampling parameters that follow from tools and structure."""
        if self.choice.mode == "none":
            return {"structured_outputs": self.structure} if self.structure is not None else {}
        if self.structure is not None and not self.choice.is_forced:
            raise InvalidParams(
                "The answer is to be JSON and may be a call of a tool as well; ask for one of the two: set tool_choice "
                "so that there must be a call, or none, or leave the format out."
            )
        format = dialect_of(service.chat_template()).format
        special = special_markers(format, service.tokenizer)
        grammar = call_grammar(format, self.choice, special)
        return {} if grammar is None else {"structured_outputs": {"grammar": grammar}}

    def kept(self, service: Service) -> frozenset[int]:
        """Special tokens that mark calls: the parser has to see them."""
        if self.choice.mode == "none":
            return frozenset()
        return frozenset(special_markers(dialect_of(service.chat_template()).format, service.tokenizer).values())

    async def write(
        self,
        service: Service,
        *,
        template: str | None = None,
        open_turn: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The prompt: its text, and its tokens. The rest is for those who know their template."""
        shown = self.tools if self.choice.mode != "none" else ()
        messages = [known_role(message) for message in self.messages]
        prepared = prepare_messages(messages, shown, dialect_of(service.chat_template()))
        text = await service.render(
            prepared.messages, tools=prepared.tools, template=template, open_turn=open_turn, extra=extra
        )
        text += self.prefill
        return {"prompt": text, "prompt_token_ids": await service.encode(text, add_special_tokens=False)}

    async def open(self, call: Context, params: SamplingParams, priority: int = 0) -> Exchange:
        await call.prepare(params)
        prompt = await self.write(call.service)
        return await call.service.open(prompt, params, call.caller, call.new_id(), priority, self.kept(call.service))

    def parser(self, service: Service) -> ToolParser | None:
        if self.choice.mode == "none":
            return None
        return ToolParser(dialect_of(service.chat_template()).format, self.choice)


def known_role(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Templates know no developers: what one says counts as the system's."""
    is_developers = isinstance(message, Mapping) and message.get("role") == "developer"
    return {**message, "role": "system"} if is_developers else message


@lru_cache(maxsize=2)
def dialect_of(template: ChatTemplate) -> Dialect:
    return choose_dialect(template)


async def narrate(service: Service, exchange: Exchange, parser: ToolParser | None) -> AsyncGenerator[list[Event], None]:
    """What the one answer of an exchange says, as it grows.

    Where a single call was wanted the answer ends with it, whatever the model would have gone on to say.
    """
    answer, num_chars = exchange.output.outputs[0], 0
    async with aclosing(service.answer([exchange])) as growth:  # type: ignore[type-var]
        async for _ in growth:
            check(exchange)
            text, num_chars = answer.text[num_chars:], len(answer.text)
            events: list[Event] = [TextPiece(text)] if text else []
            if parser is not None:
                events = parser.push(text) + (parser.finish() if answer.finished else [])
            yield events
            if parser is not None and parser.finished:
                return
