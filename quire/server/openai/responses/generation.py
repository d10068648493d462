"""ResponseGeneration: runs one response, as a stream, to its end, or in the background. `routes.py` chooses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from quire.core.outputs import PositionLogprobs
from quire.errors import QuireError
from quire.server.chat import ChatParser
from quire.server.openai.output import chat_logprobs
from quire.server.openai.responses.store import StoredResponse, TenantResponses
from quire.server.service import Service, stream_chat
from quire.text.output_processor import OutputProcessor

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ResponseGeneration:
    """Generates one response. It is stored if `responses` is given."""

    service: Service
    output_processor: OutputProcessor
    parser: ChatParser
    stored: StoredResponse
    responses: TenantResponses | None
    num_top: int = 0  # log probabilities beside that of the chosen token

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events of the response. Closing the iterator cancels it."""
        with self._storing():
            async with aclosing(self._events()) as events:
                async for written in events:
                    yield b"".join(written)

    async def run(self) -> None:
        """Run to the end. Clients may read the events from `stored`."""
        with self._storing():
            async with aclosing(self._events()) as events:
                async for written in events:
                    self.stored.append(written)

    def run_in_background(self) -> None:
        self.stored.task = asyncio.create_task(self.run(), name=self.stored.id)

    async def _events(self) -> AsyncGenerator[list[bytes], None]:
        """All events. An error becomes the last event."""
        builder, answer, num_scored = self.stored.builder, self.output_processor.output.outputs[0], 0
        try:
            yield builder.begin()
            async with aclosing(stream_chat(self.service, self.output_processor, self.parser)) as stream:
                async for pieces in stream:
                    scored = (answer.logprobs or [])[num_scored:]
                    num_scored += len(scored)
                    if written := builder.write(pieces, self._logprobs(scored)):
                        yield written
            reasoning = self.parser.count_reasoning_tokens(answer.token_ids, self.service.tokenizer)
            yield builder.end(answer, usage(self.output_processor, reasoning))
        except QuireError as error:
            yield builder.fail(error)

    @contextmanager
    def _storing(self) -> Iterator[None]:
        """Store the response while it is generated. A response that is left before its end is cancelled."""
        stored, responses = self.stored, self.responses
        if responses is not None:
            responses.add(stored)
        try:
            yield
        finally:
            if not stored.builder.ended:
                stored.append(stored.builder.cancel())
            if responses is not None:
                responses.update_size(stored)

    def _logprobs(self, positions: Sequence[PositionLogprobs]) -> list[Document]:
        return chat_logprobs(positions, self.num_top, self.service.tokenizer)["content"] if positions else []


async def cancel(stored: StoredResponse) -> None:
    """Cancel a response that runs in the background, if it still runs."""
    if stored.task is not None and not stored.task.done():
        stored.task.cancel()
        await asyncio.gather(stored.task, return_exceptions=True)


def usage(output_processor: OutputProcessor, reasoning_tokens: int) -> Document:
    output = output_processor.output
    num_input, num_output = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": num_input + num_output,
    }
