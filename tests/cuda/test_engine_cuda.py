"""The engine on a GPU: the same answers as with the reference ops, whatever the traffic; in float32, where rounding
does not decide between two tokens. Random weights in a small model's shapes, so no file is needed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.cuda import gpu  # skips this module where there is no GPU

from quire.core.params import SamplingParams  # isort: skip
from quire.core.drafts import Drafts
from quire.core.plan import TokenLogprobs
from quire.core.request import Request
from quire.engine.client import InProcess

pytestmark = pytest.mark.cuda

Answers = dict[str, list[int]]


DEFAULTS = {"dtype": "float32", "max_requests": 32, "kv_memory": 1.0, "max_len": 2048}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def start(model: Path, **options: Any) -> InProcess:
    return gpu.start(model, **DEFAULTS | options)


def draw_requests(seed: int, count: int, *, greedy: bool = False) -> list[Request]:
    rng, requests = random.Random(seed), []
    for number in range(count):
        params = SamplingParams(
            temperature=0.0 if greedy or rng.random() < 0.8 else 0.8,
            repetition_penalty=1.0 if greedy or rng.random() < 0.9 else 1.1,
            max_tokens=rng.randrange(1, 40),
            ignore_eos=True,
        )
        length = rng.choice([1, 3, 17, 60, 200, 700, 1200])
        tokens = [rng.randrange(2, 2000) for _ in range(length)]
        requests.append(Request(str(number), tokens, params, max_tokens=params.max_tokens, seed=number))
    return requests


@pytest.mark.parametrize("captures", [False, True])
def test_drafts_change_nothing(model, captures):
    """Right and wrong guesses, in random numbers, next to requests without any."""
    rng, client = random.Random(5), start(model)
    answers = answer(client, draw_requests(3, 20), 0)
    again, num_accepted = draw_requests(3, 20), 0
    client.engine.runner.depth = 1  # a request with a token in flight has no drafts
    for request in again:
        client.add(request)
    while client.engine.has_work:
        for request in client.engine.scheduler.running:
            ahead = answers[request.id][request.num_output :][: rng.choice([0, 0, 2, 4, 8, 16])]
            request.drafts = Drafts([token if rng.random() < 0.9 else 3 for token in ahead[:-1]])
        num_accepted += sum(max(0, len(update.tokens) - 1) for update in client.step())
        while captures and client.engine.runner.idle(1e9):
            pass
    assert num_accepted > 20
    assert {request.id: request.tokens[request.num_prompt :] for request in again} == answers
    kinds = {key.kind for key in client.engine.runner.graphs._captured}
    assert ("verify" in kinds) == captures


def draw_sampled_requests(seed: int, count: int) -> list[Request]:
    """Requests that draw their tokens, and greedy ones among them."""
    rng, requests = random.Random(seed), []
    for number in range(count):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.6, 1.0, 1.3]),
            top_k=rng.choice([0, 0, 5, 40]),
            top_p=rng.choice([1.0, 0.91, 0.5]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            max_tokens=rng.randrange(1, 24),
            ignore_eos=True,
        )
        tokens = [rng.randrange(2, 2000) for _ in range(rng.choice([1, 17, 200, 700]))]
        requests.append(Request(str(number), tokens, params, max_tokens=params.max_tokens, seed=1000 + number))
    return requests


def answer(client: InProcess, requests: list[Request], seed: int) -> Answers:
    """Requests arrive at random steps."""
    rng, waiting, answers = random.Random(seed), list(requests), {request.id: [] for request in requests}
    while waiting or client.engine.has_work:
        while waiting and rng.random() < 0.3:
            client.add(waiting.pop())
        for update in client.step():
            answers[update.id] += update.tokens
            assert update.finish is None or update.finish.value == "length", update
    return answers


@pytest.fixture(scope="module")
def expected(model: Path) -> Answers:
    return answer(start(model, kernels="torch"), draw_requests(5, 40), 1)


@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": 260}, {"max_tokens_per_step": 96}, {"max_requests": 3}, {"prefix_cache": False}],
    ids=lambda options: next(iter(options), "default"),
)  # fmt: skip
def test_the_same_answers_as_the_reference(model, expected, options):
    assert answer(start(model, **options), draw_requests(5, 40), 2) == expected


def test_the_same_answers_when_asked_again(model):
    """The second time every step is a replay of a captured one."""
    client = start(model, prefix_cache=False)
    first = answer(client, draw_requests(9, 30, greedy=True), 3)
    assert answer(client, draw_requests(9, 30, greedy=True), 4) == first


def test_drawn_answers_are_the_same_alone_in_a_batch_and_by_the_reference(model):
    expected = answer(start(model, kernels="torch"), draw_sampled_requests(7, 24), 1)
    client = start(model)
    assert answer(client, draw_sampled_requests(7, 24), 2) == expected
    alone: Answers = {}
    for request in draw_sampled_requests(7, 24):
        alone |= answer(client, [request], 3)
    assert alone == expected


def test_drawn_answers_are_the_same_beside_requests_that_need_the_host(model):
    """These come and go, so that drawn tokens are in flight when a step is sampled on the host."""
    expected = answer(start(model, kernels="torch"), draw_sampled_requests(8, 24), 1)
    penalized = SamplingParams(temperature=0.9, repetition_penalty=1.2, max_tokens=2, ignore_eos=True)
    others = [Request(f"host {number}", [5, 6, 7], penalized, max_tokens=2, seed=number) for number in range(24)]
    requests = [request for pair in zip(draw_sampled_requests(8, 24), others, strict=True) for request in pair]
    answers = answer(start(model), requests, 2)
    assert {id: tokens for id, tokens in answers.items() if id in expected} == expected


ASKING_MORE: list[dict[str, Any]] = [
    {"logprobs": 0}, {"logprobs": 5}, {"logprobs": 3, "temperature": 0.9, "top_p": 0.8}, {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.5, "temperature": 0.8, "logprobs": 2}, {"logit_bias": {7: 5.0, 9: -3.0}}, {"min_tokens": 5},
    {"allowed_token_ids": [5, 6, 7, 8, 9], "temperature": 1.0}, {"prompt_logprobs": 2},
    {"prompt_logprobs": 0, "logprobs": 1}, {"temperature": 0.7}, {}, {},
    {"allowed_token_ids": [5, 6, 7], "temperature": 1.0, "top_k": 40, "logprobs": 9},
    {"presence_penalty": 1.5, "temperature": 1.0, "top_p": 0.7, "min_p": 0.01}, {"logit_bias": {7: -100.0}, "top_k": 3},
]  # fmt: skip


def draw_asking_requests(count: int) -> list[Request]:
    rng, requests = random.Random(4), []
    for number in range(count):
        asked = {"temperature": 0.0} | rng.choice(ASKING_MORE)
        params = SamplingParams(**asked, max_tokens=rng.randrange(1, 20), ignore_eos=True)
        tokens = [rng.randrange(2, 2000) for _ in range(rng.choice([1, 17, 60, 300]))]
        requests.append(Request(str(number), tokens, params, max_tokens=params.max_tokens, seed=number))
    return requests


def answer_fully(client: InProcess, requests: list[Request]) -> dict[str, tuple[list[int], list[TokenLogprobs]]]:
    """Tokens, and all that is told about them and the prompt's."""
    answers: dict[str, tuple[list[int], list[TokenLogprobs]]] = {request.id: ([], []) for request in requests}
    for request in requests:
        client.add(request)
    while client.engine.has_work:
        for update in client.step():
            answers[update.id][0].extend(update.tokens)
            if update.detail is not None:
                answers[update.id][1].extend([*(update.detail.prompt_logprobs or []), *(update.detail.logprobs or [])])
    return answers


def test_what_is_asked_beside_tokens_is_what_the_reference_says(model):
    expected = answer_fully(start(model, kernels="torch"), draw_asking_requests(60))
    client = start(model)
    got = answer_fully(client, draw_asking_requests(60))
    assert {name: tokens for name, (tokens, _) in got.items()} == {
        name: tokens for name, (tokens, _) in expected.items()
    }
    for name, (_, told) in got.items():
        assert len(told) == len(expected[name][1])
        for mine, wanted in zip(told, expected[name][1], strict=True):
            assert [token for token, _, _ in mine.top] == [token for token, _, _ in wanted.top]
            assert mine.chosen[0] == wanted.chosen[0]
            # Far down, neighbours are closer than rounding: of 2,000 tokens, a few may change places.
            assert mine.chosen[2] == pytest.approx(wanted.chosen[2], rel=0.02)
            values = [value for _, value, _ in (mine.chosen, *mine.top)]
            assert values == pytest.approx([value for _, value, _ in (wanted.chosen, *wanted.top)], abs=1e-4)


def test_a_prompt_is_scored_while_tokens_of_others_are_on_their_way(model):
    """Those are drawn, and told about, by their places: the host need not know what stands before them."""
    asks = {"logprobs": 2, "max_tokens": 12, "ignore_eos": True}
    first = [SamplingParams(temperature=0.0, **asks), SamplingParams(temperature=0.9, **asks)]
    second = SamplingParams(temperature=0.0, prompt_logprobs=1, max_tokens=3, ignore_eos=True)

    def ask(client: InProcess) -> dict[str, list[int]]:
        got: dict[str, list[int]] = {"0": [], "1": [], "late": []}
        for number, params in enumerate(first):
            client.add(Request(str(number), [5, 6, 7], params, max_tokens=12, seed=number))
        for step in range(60):
            if step == 5:
                client.add(Request("late", [*range(9, 40)], second, max_tokens=3))
            if client.engine.has_work:
                for update in client.step():
                    got[update.id] += update.tokens
        return got

    expected = ask(start(model, kernels="torch"))
    assert [len(tokens) for tokens in expected.values()] == [12, 12, 3]
    assert ask(start(model)) == expected


class OtherParity:
    """A constraint that allows tokens of the other parity than the last one's."""

    error = ""

    def __init__(self) -> None:
        self._last = 0

    def allowed(self) -> bytes:
        return (b"\x55" if self._last % 2 else b"\xaa") * 400

    def advance(self, token: int) -> None:
        assert (token + self._last) % 2
        self._last = token

    def forced(self) -> Sequence[int]:
        return ()

    def num_allowed(self, tokens: Sequence[int]) -> int:
        pairs = enumerate(pairwise([self._last, *tokens]))
        return next((nth for nth, (before, token) in pairs if (before + token) % 2 == 0), len(tokens))

    def copy(self) -> OtherParity:
        other = OtherParity()
        other._last = self._last
        return other


ASKED: dict[str, dict[str, Any]] = {
    "log probabilities": {"logprobs": 2}, "penalties": {"frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "prompt log probabilities": {"prompt_logprobs": 1}, "bias": {"logit_bias": {3: 2.0}}, "constraint": {},
    "draw": {"temperature": 0.9, "top_p": 0.8},
}  # fmt: skip


def ask(name: str, kind: str | None, max_tokens: int = 9) -> Request:
    params = SamplingParams(
        **{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | ASKED.get(kind or "", {})
    )
    constraint = OtherParity() if kind == "constraint" else None
    return Request(name, [5, 6, 7, 8], params, max_tokens=max_tokens, seed=4, constraint=constraint)


@pytest.mark.parametrize("kind", ASKED)
def test_no_request_keeps_its_neighbours_waiting(model, kind):
    client = start(model)
    client.add(ask("asks", kind))
    client.add(ask("plain", None))
    for _ in range(4):
        client.step()
    assert len(client.engine._launched) == 1, "the next step is under way"


@pytest.mark.parametrize("kind", ASKED)
def test_what_is_asked_for_is_what_the_reference_gives(model, kind):
    def answers(client: InProcess) -> Any:
        return answer(client, [ask("asks", kind, 20), ask("plain", None, 20), ask("late", kind, 5)], 6)

    assert answers(start(model)) == answers(start(model, kernels="torch"))


@pytest.mark.parametrize("seed", range(4))
def test_aborts_in_a_tiny_cache_leave_nothing_behind(model, seed):
    client, rng = start(model, num_blocks=140, block_size=16), random.Random(seed)
    waiting, ended = draw_requests(seed, 60), set()
    unfinished_ids = {request.id for request in waiting}
    while waiting or client.engine.has_work:
        while waiting and rng.random() < 0.4:
            client.add(waiting.pop())
        updates = client.step()
        if rng.random() < 0.2 and (running := client.engine.scheduler.running):
            updates = [*updates, client.abort(rng.choice(running).id)]
        ended |= {update.id for update in updates if update is not None and update.finish}
    assert ended == unfinished_ids
    assert client.engine.scheduler.kv.pool.num_free == 140
