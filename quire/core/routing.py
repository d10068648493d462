"""Router: which of several engines (replicas) computes a request. It ends soonest where the least is left to do.

Everything is in seconds, from measurements: what waits before the request, the prompt tokens that a replica's cache
lacks, and the tokens of the answer. Replicas report the digests of the blocks in their prefix trees
(`PrefixTree.report_changes`). `engine/fleet.py` calls this; so may a simulator.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice, takewhile

from quire.core.prefix_tree import DIGEST_BYTES, root_digest

DECAY = 0.9  # of the averages of measured times, at each measurement
GUESSED_TOKEN_S = 1e-3  # until a replica has computed a prompt
GUESSED_STEP_S = 2e-2
GUESSED_OUTPUT = 128.0  # tokens of an answer, until one has ended
TIE_S = 1e-4  # choices that differ by less are equal
MAX_RECEIPTS = 4096


class Average:
    """A moving average, or the first guess until there is a value."""

    def __init__(self, guess: float) -> None:
        self.value = guess
        self._is_guess = True

    def add(self, value: float) -> None:
        self.value = value if self._is_guess else DECAY * self.value + (1 - DECAY) * value
        self._is_guess = False


@dataclass(slots=True)
class RoutedRequest:
    """A request that a replica has, and what of it is still to be computed."""

    replica: int
    missing_tokens: int  # of the prompt; 0 once the first token has come
    num_answers: int
    expected: list[bytes]  # blocks that the replica has once it has computed the prompt; empty then


class ReplicaState:
    """What is known of one replica. One that keeps no prefixes has 0 blocks."""

    def __init__(self, max_requests: int, num_blocks: int) -> None:
        self.max_requests = max_requests
        self.num_blocks = num_blocks
        self.ready = True
        self.draining = False  # it gets no requests
        self.prefixes: set[bytes] = set()  # blocks in its prefix tree
        self.expected: dict[bytes, None] = {}  # blocks of requests that it has, which it will publish; oldest first
        self.missing_tokens = 0  # prompt tokens that it has and has not computed
        self.num_answers = 0  # that run or wait
        self.token_s = Average(GUESSED_TOKEN_S)  # of a prompt
        self.step_s: dict[int, Average] = {}  # of a step without prompts, by the bit length of its rows

    def forget(self) -> None:
        """The replica has died: its cache is empty."""
        self.prefixes.clear()
        self.expected.clear()

    def count_leading(self, digests: Sequence[bytes]) -> int:
        """How many of the first blocks it has, or will have."""
        prefixes, expected = self.prefixes, self.expected
        count = sum(1 for _ in takewhile(prefixes.__contains__, digests))
        for digest in islice(digests, count, None):
            if digest not in prefixes and digest not in expected:
                break
            count += 1
        return count

    def expect(self, digests: Iterable[bytes]) -> list[bytes]:
        """The replica will have these blocks. Returns those that are new to it."""
        prefixes, expected = self.prefixes, self.expected
        missing = [digest for digest in digests if digest not in prefixes]
        new = [digest for digest in missing if expected.pop(digest, self) is self]
        expected.update(dict.fromkeys(missing))
        while len(self.expected) > self.num_blocks:
            del self.expected[next(iter(self.expected))]
        return new

    def expect_no_more(self, digests: Iterable[bytes]) -> None:
        """The request that was to compute these blocks has left before that."""
        for digest in digests:
            self.expected.pop(digest, None)

    def publish(self, published: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        for digest in published:
            self.prefixes.add(digest)
            self.expected.pop(digest, None)
        self.prefixes.difference_update(evicted)

    def measure(self, num_tokens: int, num_rows: int, seconds: float) -> None:
        """A step of `num_rows` rows has computed `num_tokens` tokens. More than a token a row are of prompts."""
        step = self.step_s.get(num_rows.bit_length())
        if num_tokens <= num_rows:
            self.step_s.setdefault(num_rows.bit_length(), Average(seconds)).add(seconds)
        elif num_tokens >= 2 * num_rows:
            of_rows = step.value if step is not None else 0.0
            self.token_s.add(max(0.1 * seconds, seconds - of_rows) / (num_tokens - num_rows))

    def decode_step_s(self, num_rows: int) -> float:
        """Seconds of a step for that many rows: as measured, else that of the nearest measured size."""
        if not self.step_s:
            return GUESSED_STEP_S
        wanted = num_rows.bit_length()
        return self.step_s[min(self.step_s, key=lambda size: abs(size - wanted))].value


@dataclass(frozen=True, slots=True)
class Estimate:
    """When a request would end on a replica, in seconds from now."""

    replica: int
    cached: int  # tokens of the prompt
    seconds: float
    num_answers: int  # that the replica has


@dataclass(frozen=True, slots=True)
class Receipt:
    """Why a request went where it went."""

    num_tokens: int
    chosen: Estimate
    others: tuple[Estimate, ...]
    salt: bytes  # of the tenant

    def __str__(self) -> str:
        chosen = self.chosen
        text = f"replica {chosen.replica}: {chosen.cached:,} of {self.num_tokens:,} tokens cached, {describe(chosen)}"
        return "; ".join([text, *(f"replica {one.replica} {describe(one, self.num_tokens)}" for one in self.others)])


def describe(estimate: Estimate, num_tokens: int | None = None) -> str:
    """An estimate in words. With `num_tokens`, what is cached is said too."""
    answers = "1 answer" if estimate.num_answers == 1 else f"{estimate.num_answers:,} answers"
    words = [f"{answers} before it" if estimate.num_answers else "idle"]
    if num_tokens is not None:
        words.append(f"{estimate.cached:,} cached" if estimate.cached else "cold")
    return f"{' and '.join(words)}, {estimate.seconds:.2f} s"


class Router:
    """Chooses replicas. Its memory is bounded by their blocks and by the requests that they have."""

    def __init__(self, replicas: Sequence[ReplicaState], block_size: int) -> None:
        self.replicas = list(replicas)
        self.receipts: dict[str, Receipt] = {}  # of the last requests, by id
        self._block_size = block_size
        self._routed: dict[str, RoutedRequest] = {}
        self._output = Average(GUESSED_OUTPUT)

    def choose(
        self,
        request_id: str,
        tokens: Sequence[int],
        salt: bytes,
        max_tokens: int,
        num_answers: int = 1,
        *,
        num_computed: int = 0,
        avoid: Collection[int] = (),
        exclude: Collection[int] = (),
    ) -> int | None:
        """The replica for a request, which is noted there. None if none is ready.

        `num_computed` tokens come with their cache. `avoid`: if there is another. `exclude`: never.
        """
        ready = [i for i, state in enumerate(self.replicas) if state.ready and not state.draining and i not in exclude]
        ready = [i for i in ready if i not in avoid] or ready
        if not ready:
            return None
        digests = hash_blocks(tokens, salt, self._block_size, len(tokens) - 1)
        counts = [self.replicas[i].count_leading(digests) for i in ready]
        cached = [max(count * self._block_size, num_computed) for count in counts]
        estimates = [self._estimate(i, len(tokens), count, max_tokens) for i, count in zip(ready, cached, strict=True)]
        chosen = self._best(estimates, digests[0] if digests else array("Q", tokens[: self._block_size]).tobytes())
        self._keep(request_id, Receipt(len(tokens), chosen, tuple(one for one in estimates if one is not chosen), salt))
        missing = len(tokens) - chosen.cached
        state = self.replicas[chosen.replica]
        expected = state.expect(digests)
        state.missing_tokens += missing
        state.num_answers += num_answers
        self._routed[request_id] = RoutedRequest(chosen.replica, missing, num_answers, expected)
        return chosen.replica

    def begin(self, request_id: str) -> None:
        """The first token has come: the prompt is computed."""
        if (routed := self._routed.get(request_id)) is not None:
            self.replicas[routed.replica].missing_tokens -= routed.missing_tokens
            routed.missing_tokens, routed.expected = 0, []

    def end(self, request_id: str, num_output: int | None = None) -> None:
        """The request has left its replica, with an answer of `num_output` tokens if it has finished."""
        if (routed := self._routed.get(request_id)) is None:
            return
        if num_output is None:
            self.replicas[routed.replica].expect_no_more(routed.expected)
        else:
            self._output.add(num_output)
        self.begin(request_id)
        self.replicas[routed.replica].num_answers -= routed.num_answers
        del self._routed[request_id]

    def _estimate(self, replica: int, num_tokens: int, cached: int, max_tokens: int) -> Estimate:
        """The wait for prompts before it and for a free row, the rest of the prompt, and the answer."""
        state = self.replicas[replica]
        output = min(float(max_tokens), self._output.value)
        rows = min(state.num_answers + 1, state.max_requests)
        answer_s = output * state.decode_step_s(rows)
        before = max(0, state.num_answers + 1 - state.max_requests) / state.max_requests
        prompt_s = (state.missing_tokens + num_tokens - cached) * state.token_s.value
        return Estimate(replica, cached, prompt_s + (1 + before) * answer_s, state.num_answers)

    def _best(self, estimates: Sequence[Estimate], first: bytes) -> Estimate:
        """The earliest end. Of equal ones rendezvous hashing takes one, so that a new prefix has one home.

        `first` is the prompt's first block: its digest, or the tokens of a shorter prompt.
        """
        least = min(one.seconds for one in estimates)
        tied = [one for one in estimates if one.seconds - least < TIE_S]
        return max(tied, key=lambda one: blake2b(first + bytes([one.replica % 256]), digest_size=8).digest())

    def _keep(self, request_id: str, receipt: Receipt) -> None:
        self.receipts[request_id] = receipt
        if len(self.receipts) > MAX_RECEIPTS:
            del self.receipts[next(iter(self.receipts))]


def hash_blocks(tokens: Sequence[int], salt: bytes, block_size: int, stop: int | None = None) -> list[bytes]:
    """The digests of the full blocks of tokens[:stop], as `PrefixTree` has them."""
    data = array("Q", tokens[:stop]).tobytes()
    size, digests, digest = block_size * 8, list[bytes](), root_digest(salt)
    for first in range(0, len(data) - size + 1, size):
        digest = blake2b(digest + data[first : first + size], digest_size=DIGEST_BYTES).digest()
        digests.append(digest)
    return digests
