"""A service whose one answer is written in a script: for what a real engine does only when things go wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from quire.core.outputs import CompletionOutput, RequestOutput
from quire.server.service import raise_failure


def make_output_processor(num_prompt: int = 5) -> Any:
    """The fields of an OutputProcessor that a route reads."""
    return SimpleNamespace(output=RequestOutput("0", None, [0] * num_prompt, [CompletionOutput(0)]))


@dataclass
class ScriptedService:
    """Grows an answer by the texts, a token each; then ends it, or fails."""

    texts: Sequence[str]
    finish: str = "stop"
    error: Exception | None = None
    num_closed: int = 0
    model: str = "scripted"
    tokenizer: Any = None
    output_processors: list[Any] = field(default_factory=list)

    async def generate(self, output_processors: Sequence[Any]) -> AsyncIterator[set[Any]]:
        (output_processor,) = output_processors
        answer = output_processor.output.outputs[0]
        try:
            for index, text in enumerate(self.texts):
                answer.text += text
                answer.token_ids.append(index)
                if index == len(self.texts) - 1 and self.error is None:
                    answer.finish_reason = self.finish
                raise_failure(output_processor)
                yield {index}
            if self.error is not None:
                raise self.error
        finally:
            self.num_closed += 1
