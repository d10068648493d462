"""RequestOutput and its fields, as returned to the user. Names follow vLLM's.

`text/output_processor.py` fills them from the engine's Updates. A stream yields the same object as it grows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Logprob(NamedTuple):
    """A token's log probability, its rank from 1, and its text."""

    logprob: float
    rank: int
    decoded_token: str


PositionLogprobs = dict[int, Logprob]  # token id -> Logprob; the token at the position comes first


@dataclass(slots=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop token or the stop string that ended it
    error: str | None = None  # the message, if finish_reason is "error"
    refused: bool = False  # with an error: the request's own parameters caused it

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0  # guessed tokens that were verified, of all answers
    num_accepted_tokens: int = 0  # those that were right
    num_exited_tokens: int = 0  # tokens of the answers that an exit has chosen

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)


@dataclass(frozen=True, slots=True)
class Score:
    """The log probability of each token of a text, after its first token or after the prompt."""

    token_ids: list[int]
    logprobs: list[float]

    @property
    def total(self) -> float:
        return sum(self.logprobs)
