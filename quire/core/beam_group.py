"""BeamGroup: the beams of one request, and which of their continuations live on.

Every live beam is a Request that the scheduler runs, with its own block table; one of them is always the request that
was submitted (`root`), the others are its forks and have its id. All live beams are equally long. When all of them have
their candidates, `choose` ranks these as Hugging Face's beam search does:

  1. candidates are sorted by the sum of their log probabilities, those of all beams together
  2. one that ends its answer (stop token, stop string, max_tokens) and is among the first `width` is a hypothesis; the
     best `width` hypotheses are kept, by their sums divided by length ** length_penalty
  3. the first `width` others are the next live beams
  4. the search ends at max_tokens, or when it has `width` hypotheses and `early_stopping` says so

Log probabilities are those of the untouched logits; what a request bans is no candidate. No tensors and no blocks here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from quire.core.constraint import Constraint, StopMatcher
from quire.core.plan import Candidates, Hypothesis, TokenLogprobs
from quire.core.request import Finish, Request


@dataclass(eq=False, slots=True)
class Beam:
    """What a request is in a beam search, beside its tokens."""

    group: BeamGroup
    cum_logprob: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    candidates: Candidates | None = None  # of the step that computed its last token, until the group has chosen


@dataclass(frozen=True, slots=True)
class Survivor:
    """A beam that is to live: tokens behind those of a parent, which is a live beam now."""

    parent: Request
    tokens: list[int]
    cum_logprob: float
    logprobs: list[TokenLogprobs]
    constraint: Constraint | None
    stop_matcher: StopMatcher | None


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam and a candidate for its next token."""

    parent: Request
    token: tuple[int, float, int]
    cum_logprob: float


class BeamGroup:
    """The beams of `root`, from its submission to its end."""

    def __init__(self, root: Request) -> None:
        self.root = root
        self.width = root.params.beam_width
        self.beams = [root]  # those that live, the likeliest first
        self.folded: list[Survivor] = []  # beams that the root stands for: they follow it once it is computed
        self.hypotheses: list[Hypothesis] = []  # the best first
        self._constraint = root.constraint and root.constraint.copy()
        self._stop_matcher = root.stop_matcher and root.stop_matcher.copy()

    @property
    def is_complete(self) -> bool:
        """Whether all live beams have their candidates."""
        return all(beam_of(request).candidates is not None for request in self.beams)

    @property
    def answers(self) -> list[Hypothesis]:
        return self.hypotheses[: self.root.params.n]

    def advance(self) -> list[Survivor]:
        """The next live beams; none when the search has ended. Called when the group is complete."""
        folded, self.folded = self.folded, []
        return folded or self.choose()

    def choose(self) -> list[Survivor]:
        """Rank the candidates of all beams. What ends becomes a hypothesis; the best of the others live on."""
        length = self.root.num_output + 1
        is_last = length == self.root.max_tokens
        live: list[tuple[Continuation, StopMatcher | None]] = []
        for rank, each in enumerate(self._rank()):
            ends, stop_matcher = self._look_for_stop(each, length)
            if not ends and not is_last:
                live.append((each, stop_matcher))
                if len(live) == self.width:
                    break
            elif rank < self.width:
                self._keep(each, Finish.STOP if ends else Finish.LENGTH, length)
            elif is_last:
                break
        if not live or self._is_done(live[0][0].cum_logprob, length):
            return []
        return self._survive(live)

    def fold(self) -> list[Request]:
        """Let the root stand for all live beams, with the tokens that these have in common; the others of them.

        They are computed again behind the root, which is shorter by that. Its last token is not computed.
        """
        others = [request for request in self.beams if request is not self.root]
        if not self.folded:
            tokens = [request.tokens for request in self.beams]
            length = common_length(tokens)
            if len(tokens) > 1:
                self.folded = [self._as_survivor(request, length) for request in self.beams]
                del self.root.tokens[length:]
        self.root.num_computed = min(self.root.num_computed, len(self.root.tokens) - 1)
        self.beams = [self.root]
        beam_of(self.root).candidates = None
        return others

    def restart(self) -> None:
        """Back to the prompt. What is chosen depends on nothing else, so the search comes to the same answers."""
        root = self.root
        del root.tokens[root.num_prompt :]
        root.constraint = self._constraint and self._constraint.copy()
        root.stop_matcher = self._stop_matcher and self._stop_matcher.copy()
        root.beam = Beam(self)
        self.beams, self.folded, self.hypotheses = [root], [], []

    def fork(self) -> Request:
        """One more beam, without tokens of its own yet."""
        request = replace(self.root, constraint=None, stop_matcher=None)
        request.state, request.place, request.rank = self.root.state, self.root.place, self.root.rank
        request.processes_logits = self.root.processes_logits
        request.arrival_s = self.root.arrival_s
        request.beam = Beam(self)
        return request

    def become(self, request: Request, survivor: Survivor, length: int) -> None:
        """`request`, which shares the parent's cache, is the survivor from now on. Parents have `length` tokens."""
        if request is survivor.parent:
            request.tokens += survivor.tokens
        else:
            request.tokens = survivor.parent.tokens[:length] + survivor.tokens
        request.constraint, request.stop_matcher = survivor.constraint, survivor.stop_matcher
        request.beam = Beam(self, survivor.cum_logprob, survivor.logprobs)

    def _rank(self) -> list[Continuation]:
        """The likeliest continuations of all beams, the best first. Of equals the likelier beam's comes first."""
        found: list[Continuation] = []
        for request in self.beams:
            beam = beam_of(request)
            assert beam.candidates is not None
            found += [Continuation(request, token, beam.cum_logprob + token[1]) for token in beam.candidates.tokens]
        found.sort(key=lambda each: -each.cum_logprob)
        return found[: num_candidates(self.root)]

    def _look_for_stop(self, each: Continuation, length: int) -> tuple[bool, StopMatcher | None]:
        """Whether the token ends the answer, and the stop matcher that has been told of it."""
        token = each.token[0]
        if token in self.root.stop_ids and length > self.root.params.min_tokens:
            return True, None
        if each.parent.stop_matcher is None:
            return False, None
        stop_matcher = each.parent.stop_matcher.copy()
        return stop_matcher.advance(token), stop_matcher

    def _keep(self, each: Continuation, finish: Finish, length: int) -> None:
        """A hypothesis, if it is among the best. Of equals the one that was found first stays."""
        score = each.cum_logprob / length**self.root.params.length_penalty
        tokens = [*each.parent.tokens[self.root.num_prompt :], each.token[0]]
        logprobs = None if self.root.params.logprobs is None else self._logprobs(each)
        self.hypotheses.append(Hypothesis(tokens, each.cum_logprob, score, finish, logprobs))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.width :]

    def _is_done(self, best: float, length: int) -> bool:
        """Whether the search may end, `best` being the sum of the likeliest live beam."""
        if len(self.hypotheses) < self.width:
            return False
        params = self.root.params
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self.root.max_tokens
        highest: float = best / length**params.length_penalty
        return self.hypotheses[-1].score >= highest

    def _survive(self, live: Sequence[tuple[Continuation, StopMatcher | None]]) -> list[Survivor]:
        """The last child of a parent takes over its constraint, the others get copies."""
        num_children = Counter(id(each.parent) for each, _ in live)
        survivors: list[Survivor] = []
        for each, stop_matcher in live:
            parent, token = each.parent, each.token[0]
            num_children[id(parent)] -= 1
            constraint = parent.constraint
            if constraint is not None:
                constraint = constraint.copy() if num_children[id(parent)] else constraint
                constraint.advance(token)
            survivors.append(
                Survivor(parent, [token], each.cum_logprob, self._logprobs(each), constraint, stop_matcher)
            )
        return survivors

    def _logprobs(self, each: Continuation) -> list[TokenLogprobs]:
        if self.root.params.logprobs is None:
            return []
        beam = beam_of(each.parent)
        assert beam.candidates is not None
        return [*beam.logprobs, TokenLogprobs(each.token, beam.candidates.top)]

    def _as_survivor(self, request: Request, length: int) -> Survivor:
        beam = beam_of(request)
        return Survivor(
            self.root, request.tokens[length:], beam.cum_logprob, beam.logprobs, request.constraint,
            request.stop_matcher,
        )  # fmt: skip


def beam_of(request: Request) -> Beam:
    assert request.beam is not None
    return request.beam


def num_candidates(request: Request) -> int:
    """How many continuations are ranked: with each beam's stop tokens among them, `width` others are left."""
    return request.params.beam_width * max(2, 1 + len(request.stop_ids))


def common_length(sequences: Sequence[list[int]]) -> int:
    """How many tokens all sequences begin with."""
    first, last = min(sequences), max(sequences)
    return next((index for index, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
