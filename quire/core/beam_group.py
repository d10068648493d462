"""BeamGroup: the beams of one request, and the choice of the beams that continue.

Every live beam is a Request that the scheduler runs, with its own block table. One of them is always the submitted
request (`root`). The others are its forks and have its id. All live beams have the same length. When all of them have
candidates, `choose` ranks these as Hugging Face's beam search does:

  1. the candidates of all beams are sorted together, by the sum of their log probabilities
  2. a candidate that ends its answer (stop token, stop string, max_tokens) and is among the first `width` becomes a
     hypothesis; the best `width` hypotheses are kept, by their sums divided by length ** length_penalty
  3. the first `width` other candidates are the next live beams
  4. the search ends at max_tokens, or at `width` hypotheses if the `early_stopping` condition holds

Log probabilities are those of the model's unchanged logits. Banned tokens are not candidates. No tensors and no blocks
here.
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
    """The beam search state of a request, beside its tokens."""

    group: BeamGroup
    cum_logprob: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    candidates: Candidates | None = None  # from the step that computed its last token; None after the choice


@dataclass(frozen=True, slots=True)
class Survivor:
    """A next live beam: the tokens of its parent, which is a live beam now, followed by `tokens`."""

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
    """The beams of `root`. It exists from the root's submission to its end."""

    def __init__(self, root: Request) -> None:
        self.root = root
        self.width = root.params.beam_width
        self.beams = [root]  # the live beams, the likeliest first
        self.folded: list[
            Survivor
        ] = []  # beams of a preempted group: they fork from the root again once it is computed
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
        """The next live beams, or none when the search has ended. The group must be complete."""
        folded, self.folded = self.folded, []
        return folded or self.choose()

    def choose(self) -> list[Survivor]:
        """Rank the candidates of all beams, add hypotheses, and return the next live beams."""
        length = self.root.num_output + 1
        is_last = length == self.root.max_tokens
        live: list[tuple[Continuation, StopMatcher | None]] = []
        for rank, continuation in enumerate(self._rank()):
            ends, stop_matcher = self._check_stop(continuation, length)
            if not ends and not is_last:
                live.append((continuation, stop_matcher))
                if len(live) == self.width:
                    break
            elif rank < self.width:
                self._add_hypothesis(continuation, Finish.STOP if ends else Finish.LENGTH, length)
            elif is_last:
                break
        if not live or self._is_done(live[0][0].cum_logprob, length):
            return []
        return self._make_survivors(live)

    def fold(self) -> list[Request]:
        """Shorten the root to the common prefix of all live beams, for a preemption. Returns the other beams.

        The tokens after the prefix are kept in `folded` and recomputed when the group resumes. The root's last token
        counts as not computed.
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
        """Restart the search from the prompt. It depends on nothing else, so it finds the same answers."""
        root = self.root
        del root.tokens[root.num_prompt :]
        root.constraint = self._constraint and self._constraint.copy()
        root.stop_matcher = self._stop_matcher and self._stop_matcher.copy()
        root.beam = Beam(self)
        self.beams, self.folded, self.hypotheses = [root], [], []

    def fork(self) -> Request:
        """A new request for a beam. `assign` sets its tokens."""
        request = replace(self.root, constraint=None, stop_matcher=None)
        request.state, request.sort_key = self.root.state, self.root.sort_key
        request.queue_position = self.root.queue_position
        request.processes_logits = self.root.processes_logits
        request.arrival_s = self.root.arrival_s
        request.beam = Beam(self)
        return request

    def assign(self, request: Request, survivor: Survivor, length: int) -> None:
        """Make `request`, which shares the parent's blocks, the survivor. Parents have `length` tokens."""
        if request is survivor.parent:
            request.tokens += survivor.tokens
        else:
            request.tokens = survivor.parent.tokens[:length] + survivor.tokens
        request.constraint, request.stop_matcher = survivor.constraint, survivor.stop_matcher
        request.beam = Beam(self, survivor.cum_logprob, survivor.logprobs)

    def _rank(self) -> list[Continuation]:
        """The likeliest continuations of all beams, the best first. Ties go to the likelier beam."""
        found: list[Continuation] = []
        for request in self.beams:
            beam = beam_of(request)
            assert beam.candidates is not None
            found += [Continuation(request, token, beam.cum_logprob + token[1]) for token in beam.candidates.tokens]
        found.sort(key=lambda continuation: -continuation.cum_logprob)
        return found[: num_candidates(self.root)]

    def _check_stop(self, continuation: Continuation, length: int) -> tuple[bool, StopMatcher | None]:
        """Whether the token ends the answer, and a stop matcher that has been advanced by it."""
        token = continuation.token[0]
        if token in self.root.stop_ids and length > self.root.params.min_tokens:
            return True, None
        if continuation.parent.stop_matcher is None:
            return False, None
        stop_matcher = continuation.parent.stop_matcher.copy()
        return stop_matcher.advance(token), stop_matcher

    def _add_hypothesis(self, continuation: Continuation, finish: Finish, length: int) -> None:
        """Add a hypothesis and keep the best `width`. Ties go to the one that was found first."""
        score = continuation.cum_logprob / length**self.root.params.length_penalty
        tokens = [*continuation.parent.tokens[self.root.num_prompt :], continuation.token[0]]
        logprobs = None if self.root.params.logprobs is None else self._logprobs(continuation)
        self.hypotheses.append(Hypothesis(tokens, continuation.cum_logprob, score, finish, logprobs))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.width :]

    def _is_done(self, best: float, length: int) -> bool:
        """Whether the search ends. `best` is the cumulative log probability of the likeliest live beam."""
        if len(self.hypotheses) < self.width:
            return False
        params = self.root.params
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self.root.max_tokens
        highest: float = best / length**params.length_penalty
        return self.hypotheses[-1].score >= highest

    def _make_survivors(self, live: Sequence[tuple[Continuation, StopMatcher | None]]) -> list[Survivor]:
        """The last child of a parent gets its constraint, the others get copies."""
        num_children = Counter(id(continuation.parent) for continuation, _ in live)
        survivors: list[Survivor] = []
        for continuation, stop_matcher in live:
            parent, token = continuation.parent, continuation.token[0]
            num_children[id(parent)] -= 1
            constraint = parent.constraint
            if constraint is not None:
                constraint = constraint.copy() if num_children[id(parent)] else constraint
                constraint.advance(token)
            cum_logprob, logprobs = continuation.cum_logprob, self._logprobs(continuation)
            survivors.append(Survivor(parent, [token], cum_logprob, logprobs, constraint, stop_matcher))
        return survivors

    def _logprobs(self, continuation: Continuation) -> list[TokenLogprobs]:
        if self.root.params.logprobs is None:
            return []
        beam = beam_of(continuation.parent)
        assert beam.candidates is not None
        return [*beam.logprobs, TokenLogprobs(continuation.token, beam.candidates.top)]

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
    """How many continuations are ranked. Even if they include every beam's stop tokens, `width` others are left."""
    return request.params.beam_width * max(2, 1 + len(request.stop_ids))


def common_length(sequences: Sequence[list[int]]) -> int:
    """The length of the common prefix of all sequences."""
    first, last = min(sequences), max(sequences)
    return next((index for index, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
