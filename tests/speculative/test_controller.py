"""The controller with good and with hostile proposers: answers stay the same, and losses are bounded."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence

import pytest

from quire.core.drafts import ROOT, Drafts
from quire.core.plan import Plan, Sampled
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.observer import PlanObserver
from quire.speculative.controller import Controller
from quire.speculative.draft_tree import trunk_first
from quire.speculative.guard import checked
from quire.speculative.proposer import Context, Proposer
from tests.engine.test_same_answer import MODELS, alone, questions
from tests.tools.tiny import LLAMA, TinyEngine

pytestmark = pytest.mark.cpu

Answers = dict[str, list[int]]
Propose = Callable[[Context, int, list[int], random.Random], Drafts | None]


class Scripted:
    """A proposer that knows the answers. `propose_one` gets the tokens that come next."""

    def __init__(self, name: str, answers: Answers, propose_one: Propose) -> None:
        self.name = name
        self._answers = answers
        self._propose_one = propose_one
        self._rng = random.Random(7)
        self.finished: list[str] = []
        self.num_calls = 0

    def propose(self, contexts: Sequence[Context], max_drafts: Sequence[int]) -> list[Drafts | None]:
        self.num_calls += 1
        return [self._one(context, most) for context, most in zip(contexts, max_drafts, strict=True)]

    def _one(self, context: Context, most: int) -> Drafts | None:
        ahead = self._answers[context.request_id][len(context.tokens) - context.num_prompt :]
        return self._propose_one(context, most, ahead, self._rng)

    def finish(self, request_id: str) -> None:
        self.finished.append(request_id)

    def reset(self) -> None:
        pass


def chain(tokens: Sequence[int], odds: float = 0.9) -> Drafts:
    return Drafts(list(tokens), None, [odds] * len(tokens))


GOOD: dict[str, Propose] = {
    "right": lambda context, most, ahead, rng: chain(ahead[:most]),
    "wrong": lambda context, most, ahead, rng: chain([(token + 1) % 97 for token in ahead[:most]]),
    "random": lambda context, most, ahead, rng: chain([rng.randrange(97) for _ in range(most)]),
    "mixed": lambda context, most, ahead, rng: chain([token if rng.random() < 0.7 else 3 for token in ahead[:4]]),
    "modest": lambda context, most, ahead, rng: chain(ahead[:most], odds=0.01),
    "boastful": lambda context, most, ahead, rng: chain([5] * most, odds=17.0),
    "nan": lambda context, most, ahead, rng: chain(ahead[:most], odds=float("nan")),
    "without odds": lambda context, most, ahead, rng: Drafts(ahead[:most]),
    "many": lambda context, most, ahead, rng: chain((ahead * 10_000)[:10_000]),
    "empty": lambda context, most, ahead, rng: Drafts([]),
    "none": lambda context, most, ahead, rng: None,
}
HOSTILE: dict[str, Propose] = {
    "out of range": lambda context, most, ahead, rng: chain([97]),
    "negative": lambda context, most, ahead, rng: chain([-1]),
    "too few odds": lambda context, most, ahead, rng: Drafts(ahead[:3], None, [0.5]) if len(ahead) > 2 else None,
    "parent behind its child": lambda context, most, ahead, rng: Drafts([1, 2], [1, ROOT], [0.9, 0.9]),
    "twins": lambda context, most, ahead, rng: Drafts([1, 1], [ROOT, ROOT], [0.9, 0.9]),
    "own parent": lambda context, most, ahead, rng: Drafts([1], [0], [0.9]),
    "odds are texts": lambda context, most, ahead, rng: Drafts([1, 2], None, ["a", "b"]),  # type: ignore[list-item]
    "floats": lambda context, most, ahead, rng: chain([1.0]),  # type: ignore[list-item]
    "no number": lambda context, most, ahead, rng: chain(["a"]),  # type: ignore[list-item]
}


def run(propose: Proposer, requests: Sequence[Request]) -> tuple[list[list[int]], Controller]:
    tiny = TinyEngine(LLAMA, model=MODELS["llama"])
    controller, plans = Controller([], 64, 97, 12.0, plugins=[propose]), list[Plan]()
    controller._clock = lambda: 1e-2 * len(plans)  # on a busy machine a plug-in would seem slow, and be asked less
    engine = Engine(tiny.scheduler, tiny.runner, None, controller)  # type: ignore[arg-type]
    engine.observers.append(PlanObserver(plans.append))
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert not controller._records
    return [request.tokens[request.num_prompt :] for request in requests], controller


@pytest.fixture(scope="module", params=[False, True], ids=["greedy", "sampled"])
def known(request: pytest.FixtureRequest) -> tuple[bool, Answers]:
    requests = questions(request.param)
    return request.param, {each.id: tokens for each, tokens in zip(requests, alone("llama", requests), strict=True)}


@pytest.mark.parametrize("name", GOOD)
def test_any_proposer_gives_the_same_answers(name: str, known: tuple[bool, Answers]) -> None:
    sampled, answers = known
    proposer = Scripted(name, answers, GOOD[name])
    found, controller = run(proposer, questions(sampled))
    assert found == list(answers.values())
    assert controller.proposers == [proposer]
    assert set(proposer.finished) <= set(answers)
    if name in ("wrong", "boastful"):
        assert controller.accepted[name] <= 0.1 * max(1, controller.drafted[name])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_proposer_that_breaks_the_rules_is_no_longer_called(
    name: str, known: tuple[bool, Answers], caplog: pytest.LogCaptureFixture
) -> None:
    sampled, answers = known
    with caplog.at_level(logging.ERROR, "quire.speculative"):
        found, controller = run(Scripted(name, answers, HOSTILE[name]), questions(sampled))
    assert found == list(answers.values())
    assert controller.proposers == []
    assert "no longer called" in caplog.text


def test_a_proposer_that_raises_is_no_longer_called(known: tuple[bool, Answers]) -> None:
    sampled, answers = known

    def fail(context: Context, most: int, ahead: list[int], rng: random.Random) -> Drafts | None:
        raise RuntimeError("no drafts today")

    found, controller = run(Scripted("failing", answers, fail), questions(sampled))
    assert found == list(answers.values())
    assert controller.proposers == []


@pytest.mark.parametrize("method", ["finish", "reset"])
def test_a_proposer_that_raises_at_the_end_of_a_request_is_no_longer_called(
    method: str, known: tuple[bool, Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled, answers = known
    proposer = Scripted("failing", answers, GOOD["right"])

    def fail(*arguments: str) -> None:
        raise RuntimeError("nothing is forgotten today")

    monkeypatch.setattr(proposer, method, fail)
    found, controller = run(proposer, questions(sampled))
    assert found == list(answers.values())
    controller.reset()
    assert controller.proposers == []


def test_what_a_proposer_says_about_the_device_and_other_sources_is_ignored(known: tuple[bool, Answers]) -> None:
    sampled, answers = known

    def lie(context: Context, most: int, ahead: list[int], rng: random.Random) -> Drafts | None:
        return Drafts(ahead[:2], None, [0.9] * len(ahead[:2]), "other", ["x"], on_device=True)

    found, controller = run(Scripted("lying", answers, lie), questions(sampled))
    assert found == list(answers.values())
    assert set(controller.drafted) == {"lying"}


def test_more_requests_than_tokens_of_a_step_of_drafts() -> None:
    proposer = Scripted("right", {str(number): [5] * 9 for number in range(6)}, GOOD["right"])
    controller = Controller([], 4, 97, 12.0, plugins=[proposer])
    requests = [Request(f"{number}", [1, 2, 3], max_tokens=9) for number in range(6)]
    for request in requests:
        request.num_planned = 2
    controller.times.learn(6, 0, 0.01)
    controller.propose(requests, may_admit=False)
    assert proposer.num_calls == 1
    assert all(request.drafts is None for request in requests)


@pytest.mark.parametrize("why", ["one is admitted", "one computes its prompt", "none"])
def test_nothing_is_asked_for_a_step_that_computes_prompts(why: str) -> None:
    """Every token takes time in such a step."""
    proposer = Scripted("right", {"a": [5] * 9, "b": [5] * 9}, GOOD["right"])
    controller = Controller([], 64, 97, 12.0, plugins=[proposer])
    requests = [Request(name, [1, 2, 3], max_tokens=9) for name in "ab"]
    requests[0].num_planned, requests[1].num_planned = 2, 0 if why == "one computes its prompt" else 2
    controller.times.learn(2, 0, 0.01)
    controller.propose(requests, may_admit=why == "one is admitted")
    assert proposer.num_calls == (why == "none")


def test_plugins_cannot_change_what_they_see_or_gave(known: tuple[bool, Answers]) -> None:
    """The view of a request has no method that changes it, and an answer is copied before it is used."""
    sampled, answers = known
    kept: list[tuple[int, Drafts]] = []  # with the number of the call

    def tamper(context: Context, most: int, ahead: list[int], rng: random.Random) -> Drafts | None:
        assert not hasattr(context.tokens, "append")
        assert not hasattr(context.prediction, "append")
        context.tokens[:].clear()  # type: ignore[attr-defined]
        for call, drafts in kept:
            if call < proposer.num_calls:
                drafts.tokens[:], drafts.odds[:] = [96] * 99, [0.99]
        kept.append((proposer.num_calls, chain(ahead[:most])))
        return kept[-1][1]

    proposer = Scripted("tampering", answers, tamper)
    found, controller = run(proposer, questions(sampled))
    assert found == list(answers.values())
    assert controller.proposers == [proposer]
    assert controller.accepted["tampering"] == controller.drafted["tampering"] > 0


def test_the_time_of_a_plugin_is_charged() -> None:
    """It takes ten steps for each call and has no drafts, so it is hardly called."""

    class Slow(Scripted):
        def propose(self, contexts: Sequence[Context], max_drafts: Sequence[int]) -> list[Drafts | None]:
            now[0] += 0.1
            return super().propose(contexts, max_drafts)

    now = [0.0]
    proposer = Slow("slow", {"a": []}, GOOD["none"])
    controller = Controller([], 64, 97, 12.0, plugins=[proposer])
    controller._clock = lambda: now[0]
    request = Request("a", [1, 2, 3], max_tokens=2000)
    request.num_planned = 2
    for _ in range(1000):
        controller.propose([request], may_admit=False)
        assert request.drafts is None
        now[0] += 0.01
        controller.observe(Plan(1, [request], [request.num_planned], [1], [1], {}), Sampled([[0]]))
        request.tokens.append(1)
        request.num_planned += 1
    assert 1 <= proposer.num_calls <= 4  # 8 steps of grace, and 0.8% of the time


def test_asking_quires_own_proposers_takes_little_time_while_nothing_is_verified() -> None:
    """A call takes a twentieth of a step and has no drafts. When they come and are right, it is called in each step."""

    class Late(Scripted):
        def propose(self, contexts: Sequence[Context], max_drafts: Sequence[int]) -> list[Drafts | None]:
            now[0] += 0.0005
            return super().propose(contexts, max_drafts)

    def right_from_500_on(context: Context, most: int, ahead: list[int], rng: random.Random) -> Drafts | None:
        return chain(ahead[:most]) if len(context.tokens) > 503 else None

    now, answer = [0.0], [token % 97 for token in range(1200)]
    proposer = Late("late", {"a": answer}, right_from_500_on)
    controller = Controller([proposer], 64, 97, 12.0)
    controller._clock = lambda: now[0]
    request = Request("a", [1, 2, 3], max_tokens=1200)
    request.num_planned = 2
    num_calls, num_steps = 0, 0
    while request.num_output < 1200:
        controller.propose([request], may_admit=False)
        drafts, request.drafts = request.drafts, None
        count = 1 + (len(drafts) if drafts else 0)
        now[0] += 0.01 * (1 + (count - 1) / 12)
        plan = Plan(1, [request], [request.num_planned], [count], [count], {0: drafts} if drafts else {})
        controller.observe(plan, Sampled([[0]], accepted={0: list(range(count - 1))} if drafts else {}))
        request.tokens += answer[request.num_output : request.num_output + count]
        request.num_planned = len(request.tokens) - 1
        num_steps += 1
        if request.num_output == 500:
            num_calls = proposer.num_calls
    assert num_calls <= 20 + 0.005 * 500 * 20  # the grace of a step, and half a percent
    assert num_steps < 500 + 700 / 3


def test_the_proposer_whose_drafts_are_right_is_verified_whatever_odds_both_give() -> None:
    """Both have drafts for every step. The one that boasts is wrong."""
    answers = {"a": [token % 97 for token in range(400)]}
    boasts = Scripted("boasts", answers, lambda context, most, ahead, rng: chain([96] * most, odds=0.99))
    modest = Scripted("modest", answers, lambda context, most, ahead, rng: chain(ahead[:most], odds=0.3))
    controller = Controller([], 64, 97, 12.0, plugins=[boasts, modest])
    request = Request("a", [1, 2, 3], max_tokens=400)
    request.num_planned = 2
    while request.num_output < 400:
        decode(controller, request, answers["a"])
    assert controller.accepted["modest"] > 200
    assert controller.drafted["boasts"] < 40


def test_another_number_of_drafts_than_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="2 drafts for 1"):
        checked([None, None], [4], 97)


def test_of_too_many_drafts_the_first_are_taken() -> None:
    assert checked([chain([5] * 10_000)], [4], 97) == [chain([5] * 4)]


def test_the_likeliest_path_of_a_tree_comes_first() -> None:
    tree = Drafts([1, 2, 3, 4, 5], [ROOT, ROOT, 0, 1, 1], [0.4, 0.6, 0.1, 0.9, 0.1])
    assert trunk_first(tree, [1, 3, 0, 2]) == Drafts([2, 4, 1, 3], [ROOT, 0, ROOT, 2], [0.6, 0.9, 0.4, 0.1])
    assert trunk_first(tree, [1, 3]).is_chain


def test_right_drafts_save_steps_and_wrong_ones_cost_few() -> None:
    """With steps of equal duration, as the engine's clock sees them."""
    answers = {"a": [token % 97 for token in range(400)]}
    for name, expected in (("right", 60), ("wrong", 399)):
        controller = Controller([], 64, 97, 12.0, plugins=[Scripted(name, answers, GOOD[name])])
        request = Request("a", [1, 2, 3], max_tokens=400)
        request.num_planned = 2
        num_steps = num_verified = 0
        while request.num_output < 400:
            num_verified += decode(controller, request, answers["a"])
            num_steps += 1
        assert num_steps <= expected + 40, name
        if name == "wrong":
            assert num_verified < 100  # their steps take a twelfth longer for each


def decode(controller: Controller, request: Request, answer: Sequence[int]) -> int:
    """One step of a request. Returns the number of its drafts. Each takes a twelfth of a plain step."""
    controller.propose([request], may_admit=False)
    drafts, request.drafts = request.drafts, None
    ahead = answer[request.num_output :]
    num_right, num_drafts = 0, len(drafts) if drafts is not None else 0
    while drafts is not None and num_right < num_drafts and drafts.tokens[num_right] == ahead[num_right]:
        num_right += 1
    observe(controller, request, drafts, num_right, 0.004 * (1 + num_drafts / 12))
    request.tokens += ahead[: num_right + 1]
    request.num_planned = len(request.tokens) - 1
    return num_drafts


def observe(controller: Controller, request: Request, drafts: Drafts | None, num_right: int, seconds: float) -> None:
    """A step of that duration, by the controller's own clock."""
    count = 1 + (len(drafts) if drafts else 0)
    plan = Plan(1, [request], [request.num_planned], [count], [count], {0: drafts} if drafts else {})
    sampled = Sampled([[0]], accepted={0: list(range(num_right))} if drafts else {})
    controller._clock = lambda: controller._begin_s + seconds
    controller.observe(plan, sampled)
    controller._clock = lambda: controller._end_s
