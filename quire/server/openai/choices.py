"""Choices: the answers of one call on their way to the client, and the stream that they make together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.core.outputs import CompletionOutput
from quire.errors import EngineError, InvalidParams
from quire.server.openai.bodies import usage
from quire.server.openai.fields import StreamOptions
from quire.server.service import Service
from quire.server.stream import DONE, event
from quire.text.output_processor import OutputProcessor

Document = dict[str, Any]


@dataclass(slots=True)
class Choice:
    """One answer, and how much of it has been written into documents."""

    index: int
    exchange: OutputProcessor
    answer: CompletionOutput
    num_chars: int = 0
    num_tokens: int = 0
    ended: bool = False

    @property
    def has_news(self) -> bool:
        return not self.ended and (self.answer.finished or len(self.answer.token_ids) > self.num_tokens)

    def take_text(self) -> str:
        """The text that has not been written yet."""
        text = self.answer.text[self.num_chars :]
        self.num_chars = len(self.answer.text)
        return text

    def settle(self) -> None:
        """All that is there has been written."""
        self.num_tokens = len(self.answer.token_ids)
        self.ended = self.answer.finished


def choices_of(exchanges: Sequence[OutputProcessor]) -> list[Choice]:
    pairs = [(exchange, answer) for exchange in exchanges for answer in exchange.output.outputs]
    return [Choice(index, *pair) for index, pair in enumerate(pairs)]


def check(exchange: OutputProcessor) -> None:
    """An answer that failed ends the call with its error."""
    for answer in exchange.output.outputs:
        if answer.finish_reason == "error":
            message = answer.error or "The engine failed on this request."
            raise InvalidParams(message) if answer.refused else EngineError(message)


async def stream_choices(
    service: Service,
    exchanges: Sequence[OutputProcessor],
    head: Document,
    write: Callable[[Choice], Sequence[Document]],
    options: StreamOptions | None,
) -> AsyncIterator[bytes]:
    """Events for what `write` makes of each choice that has news; what one step brought is sent in one piece."""
    of: dict[OutputProcessor, list[Choice]] = {}
    for choice in choices_of(exchanges):
        of.setdefault(choice.exchange, []).append(choice)
    with_usage = options is not None and bool(options.include_usage)
    always = options is not None and bool(options.continuous_usage_stats)
    async for grown in service.answer(exchanges):
        parts = []
        for exchange in grown:
            check(exchange)
            for choice in of[exchange]:
                for written in write(choice) if choice.has_news else ():
                    document = {**head, "choices": [written]}
                    if with_usage or always:
                        document["usage"] = usage(exchanges) if always else None
                    parts.append(event(document))
        if parts:
            yield b"".join(parts)
    if with_usage:
        yield event({**head, "choices": [], "usage": usage(exchanges)})
    yield DONE
