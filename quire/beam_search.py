"""Parameters and results of `LLM.beam_search`. The search is in `core/beam_group.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quire.core.params import MAX_BEAM_WIDTH, SamplingParams
from quire.errors import InvalidParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """A beam's score is its log probability divided by its length to the power of `length_penalty`. Above 0 it favours
    long answers. `early_stopping` says when a search with `beam_width` answers ends: see `SamplingParams`."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise InvalidParams(
                f"beam_width is {self.beam_width}; give a whole number from 1 to {MAX_BEAM_WIDTH}.", "beam_width"
            )
        if self.max_tokens < 1:
            raise InvalidParams(f"max_tokens is {self.max_tokens}; give a whole number of at least 1.", "max_tokens")

    @property
    def sampling(self) -> SamplingParams:
        """The same as SamplingParams."""
        return SamplingParams(
            use_beam_search=True,
            n=self.beam_width,
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        )


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam: its tokens (without the prompt), the sum of their log probabilities, and their text."""

    tokens: list[int]
    cum_logprob: float = 0.0
    text: str = ""
    finished: bool = False


@dataclass(slots=True)
class BeamSearchOutput:
    """A prompt's beams, the best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)
