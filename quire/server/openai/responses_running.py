"""Ways to run a response: for a client that reads its events, for one that waits for the whole, or for nobody in
particular, in the background. `responses.py` chooses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from quire.core.outputs import PositionLogprobs
from quire.errors import QuireError
from quire.server.conversation import narrate
from quire.server.openai.bodies import chat_logprobs
from quire.server.openai.responses_store import Record, Shelf
from quire.server.service import Service
from quire.text.output_processor import OutputProcessor
from quire.text.tools.parser import ToolParser

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answering:
    """One response being made. Its exchange runs while its events are read; without a shelf it is not stored."""

    service: Service
    exchange: OutputProcessor
    parser: ToolParser | None
    record: Record
    shelf: Shelf | None
    num_top: int = 0  # likely tokens to report beside each of the answer's

    async def send(self) -> AsyncGenerator[bytes, None]:
        """Its events as they go to a client, who cancels it by leaving."""
        with self._shelved():
            async with aclosing(self._events()) as events:
                async for written in events:
                    yield b"".join(written)

    async def drain(self) -> None:
        """Run it to its end; those who follow its record may read along."""
        with self._shelved():
            async with aclosing(self._events()) as events:
                async for written in events:
                    self.record.note(written)

    def run_aside(self) -> None:
        """Let it run on whether or not anybody waits."""
        self.record.task = asyncio.create_task(self.drain(), name=self.record.id)

    async def _events(self) -> AsyncGenerator[list[bytes], None]:
        """All events; the last says how it ended."""
        draft, answer, num_scored = self.record.draft, self.exchange.output.outputs[0], 0
        try:
            yield draft.begin()
            async with aclosing(narrate(self.service, self.exchange, self.parser)) as news:
                async for pieces in news:
                    scored = (answer.logprobs or [])[num_scored:]
                    num_scored += len(scored)
                    if written := draft.write(pieces, self._logprobs(scored)):
                        yield written
            yield draft.end(answer, usage(self.exchange))
        except QuireError as error:
            yield draft.fail(error)

    @contextmanager
    def _shelved(self) -> Iterator[None]:
        """On the shelf from its first event on. If its reader leaves it unfinished it is cancelled."""
        record, shelf = self.record, self.shelf
        if shelf is not None:
            shelf.keep(record)
        try:
            yield
        finally:
            if not record.draft.ended:
                record.note(record.draft.cancel())
            if shelf is not None:
                shelf.settle(record)

    def _logprobs(self, positions: Sequence[PositionLogprobs]) -> list[Document]:
        return chat_logprobs(positions, self.num_top, self.service.tokenizer)["content"] if positions else []


async def stop(record: Record) -> None:
    """End a response that runs in the background, if it still does."""
    if record.task is not None and not record.task.done():
        record.task.cancel()
        await asyncio.gather(record.task, return_exceptions=True)


def usage(exchange: OutputProcessor) -> Document:
    output = exchange.output
    given, made = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": given + made,
    }
