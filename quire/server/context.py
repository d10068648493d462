"""Context: one call as its route sees it: who asks, under which id, of which service. Middleware makes it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from fastapi import Request

from quire.core.params import SamplingParams
from quire.errors import ModelNotFound, QuireError
from quire.server.keys import Caller
from quire.server.problems import openai_problem
from quire.server.service import Service
from quire.server.stream import event

NO_NAMES = frozenset({"tgi", "dummy"})  # what Hugging Face's clients send where no name is needed


@dataclass(slots=True)
class Context:
    """What belongs to one HTTP request."""

    service: Service
    caller: Caller
    request_id: str
    created_s: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, model: str | None) -> None:
        """There is one model; asking for another by name is a mistake."""
        if model is not None and model != self.service.model and model not in NO_NAMES:
            raise ModelNotFound(f"There is no model {model!r} here; this server has {self.service.model!r}.")

    def new_id(self) -> str:
        """An id for one prompt of the call. Ids that clients choose may repeat; what the engine sees must not."""
        return f"{self.request_id}-{next(self.service.numbers)}"

    def headers(self) -> dict[str, str]:
        return {"x-request-id": self.request_id}

    async def prepare(self, params: SamplingParams) -> None:
        """What parameters need before a request is made of them: a grammar is tried out where it can do no harm."""
        if params.structured_outputs is not None:
            await self.service.check_grammar(params.structured_outputs)

    async def guard(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The events, and if one of them fails a last one that says why: the status line is long gone by then."""
        try:
            async for data in events:
                yield data
        except QuireError as error:
            yield event(openai_problem(error))
        finally:
            await events.aclose()  # type: ignore[attr-defined]


def context(request: Request) -> Context:
    made: Context = request.scope["quire"]
    return made
