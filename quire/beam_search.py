"""Beam search on top of `generate`: each round asks for one more token of every live beam.

Beams of a prompt share their beginning, so the prefix cache makes a round cost little more than its new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.core.outputs import RequestOutput
from quire.core.params import SamplingParams
from quire.errors import InvalidParams

Generate = Callable[[list[dict[str, list[int]]], SamplingParams], list[RequestOutput]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """`length_penalty` divides a beam's log probability by its length to that power: above 0 favours long answers."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.beam_width <= 64:
            raise InvalidParams(f"beam_width is {self.beam_width}; give a whole number from 1 to 64.")
        if self.max_tokens < 1:
            raise InvalidParams(f"max_tokens is {self.max_tokens}; give a whole number of at least 1.")


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


class BeamSearch:
    def __init__(
        self, params: BeamSearchParams, end_token_ids: frozenset[int], decode: Callable[[list[int]], str]
    ) -> None:
        self.params = params
        self.ends = frozenset() if params.ignore_eos else end_token_ids
        self.decode = decode

    def run(self, prompts: Sequence[list[int]], generate: Generate) -> list[BeamSearchOutput]:
        """Search for all prompts side by side."""
        beams = [[BeamSearchSequence([])] for _ in prompts]
        ended: list[list[BeamSearchSequence]] = [[] for _ in prompts]
        one_token = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=2 * self.params.beam_width,
            ignore_eos=True,
            skip_special_tokens=False,
        )
        for _ in range(self.params.max_tokens):
            live = [(index, beam) for index, some in enumerate(beams) for beam in some]
            if not live:
                break
            asked = [{"prompt_token_ids": [*prompts[index], *beam.tokens]} for index, beam in live]
            grown: list[list[BeamSearchSequence]] = [[] for _ in prompts]
            for (index, beam), output in zip(live, generate(asked, one_token), strict=True):
                grown[index] += self._extend(beam, output)
            for index, candidates in enumerate(grown):
                beams[index] = self._keep(candidates, ended[index])
        return [self._rank([*done, *some]) for done, some in zip(ended, beams, strict=True)]

    def _extend(self, beam: BeamSearchSequence, output: RequestOutput) -> list[BeamSearchSequence]:
        logprobs = output.outputs[0].logprobs
        assert logprobs
        return [
            BeamSearchSequence([*beam.tokens, token], beam.cum_logprob + entry.logprob, finished=token in self.ends)
            for token, entry in logprobs[0].items()
        ]

    def _keep(self, candidates: list[BeamSearchSequence], ended: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        """The best `beam_width` live ones; those that have come to an end before them are put aside."""
        live: list[BeamSearchSequence] = []
        for beam in sorted(candidates, key=lambda beam: -beam.cum_logprob):
            if len(live) == self.params.beam_width:
                break
            (ended if beam.finished else live).append(beam)
        return [] if len(ended) >= self.params.beam_width else live

    def _rank(self, beams: list[BeamSearchSequence]) -> BeamSearchOutput:
        power = self.params.length_penalty
        beams.sort(key=lambda beam: -beam.cum_logprob / len(beam.tokens) ** power)
        for beam in beams:
            beam.text = self.decode([token for token in beam.tokens if token not in self.ends])
        return BeamSearchOutput(beams[: self.params.beam_width])
