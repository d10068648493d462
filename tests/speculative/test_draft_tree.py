"""Trees grown from candidates, and trees of two proposers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from quire.core.drafts import ROOT, Drafts
from quire.core.request import Request
from quire.speculative.controller import Controller
from quire.speculative.draft_tree import CONFIDENT, Candidates, grow_tree, keep_allowed, merge

pytestmark = pytest.mark.core


def place(chances: dict[int, float], rest: float = 0.0) -> Candidates:
    values = np.array(list(chances.values()), np.float32)
    return Candidates(np.array(list(chances)), np.log(values), rest)


def test_the_likeliest_nodes_come_first() -> None:
    tree = grow_tree([place({1: 0.6, 2: 0.4}), place({3: 0.9, 4: 0.1})], 4)
    assert tree.tokens == [1, 3, 2, 3]  # 0.6, 0.54, 0.4, 0.36
    assert tree.parents == [ROOT, 0, ROOT, 2]
    assert tree.odds == pytest.approx([CONFIDENT * chance for chance in (0.6, 0.9, 0.4, 0.9)])


def test_tokens_that_are_no_candidates_have_their_share() -> None:
    tree = grow_tree([place({1: 0.3, 2: 0.2}, rest=0.5)], 4)
    assert tree.odds == pytest.approx([CONFIDENT * 0.3, CONFIDENT * 0.2])


def test_a_bias_depends_on_the_token_before() -> None:
    def bias(tokens: np.ndarray) -> Callable[[int], np.ndarray]:
        return lambda token: np.where(tokens == 4, np.float32(9.0 if token == 2 else 0.0), np.float32(0.0))

    tree = grow_tree([place({1: 0.5, 2: 0.5}), place({3: 0.8, 4: 0.2})], 4, bias)
    assert tree.tokens == [1, 2, 4, 3]
    assert tree.parents == [ROOT, ROOT, 1, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_scores_that_are_no_numbers_end_the_tree(value: float) -> None:
    broken = Candidates(np.array([3, 4]), np.array([value, value], np.float32), 0.0)
    assert grow_tree([place({1: 1.0}), broken, place({5: 1.0})], 8).tokens == [1]
    assert not len(grow_tree([broken], 8))
    assert not len(grow_tree([], 8))


def test_two_trees_share_their_common_path() -> None:
    one = Drafts([1, 2, 3], None, [0.9, 0.5, 0.4], "suffix")
    other = Drafts([1, 7, 2, 8], [ROOT, ROOT, 0, 1], [0.6, 0.3, 0.8, 0.2], "block")
    tree = merge(one, other)
    assert tree.tokens == [1, 2, 3, 7, 8]
    assert tree.parents == [ROOT, 0, 1, ROOT, 3]
    assert tree.odds == [0.9, 0.8, 0.4, 0.3, 0.2]
    assert tree.sources == ["block", "block", "suffix", "block", "block"]
    assert tree.keep([0, 3]).sources == ["block", "block"]
    assert one.tokens == [1, 2, 3]


def test_drafts_without_odds_can_be_merged() -> None:
    tree = merge(Drafts([1, 2], source="plugin"), Drafts([3], None, [0.7], "block"))
    assert tree.odds == [0.5, 0.5, 0.7]
    assert tree.parents == [ROOT, 0, ROOT]


class Even:
    """Allows even tokens."""

    error = ""

    def num_allowed(self, tokens: list[int]) -> int:
        return next((nth for nth, token in enumerate(tokens) if token % 2), len(tokens))


def test_nodes_that_a_grammar_refuses_are_left_out() -> None:
    tree = Drafts([2, 3, 4, 6, 5, 8], [ROOT, 0, 0, ROOT, 3, 4], [0.5] * 6, "block")
    kept = keep_allowed(tree, Even())  # type: ignore[arg-type]
    assert kept.tokens == [2, 4, 6]
    assert kept.parents == [ROOT, 0, ROOT]
    assert keep_allowed(Drafts([2, 4, 5, 6]), Even()).tokens == [2, 4]  # type: ignore[arg-type]


class Model:
    """A model that always has the same tree."""

    def __init__(self, drafts: Drafts, name: str = "block", is_parallel: bool = True, drafts_per_pass: int = 1) -> None:
        self.name = name
        self.is_parallel = is_parallel
        self.drafts_per_pass = drafts_per_pass
        self.drafts = drafts
        self.asked: list[int] = []
        self.finished: list[str] = []

    def catch_up(self, requests: list[Request]) -> None:
        pass

    def propose_requests(self, requests: list[Request], max_drafts: list[int]) -> list[Drafts | None]:
        self.asked += max_drafts
        return [self.drafts.keep(range(len(self.drafts))) for _ in requests]

    def finish(self, request_id: str) -> None:
        self.finished.append(request_id)

    def reset(self) -> None:
        pass


def make_controller(models: list[Model]) -> tuple[Controller, Request]:
    """A controller that knows how long a step takes, and a request that may have drafts."""
    controller = Controller([], 64, 97, 12.0, models, max_drafts=10)
    request = Request("a", [5, 6, 7], max_tokens=40)
    request.num_planned = 2
    controller._clock = lambda: 0.0
    controller.times.learn(1, 0, 0.01)
    while controller.times.plain_s(1) is None:
        controller.times.learn(1, 0, 0.01)
    return controller, request


def test_a_model_that_grows_trees_is_asked_for_nodes_and_timed_by_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.speculative.controller.choose_depth", lambda *arguments: 3)
    model = Model(Drafts([1], None, [0.9], "eagle"), "eagle", is_parallel=False, drafts_per_pass=2)
    controller, request = make_controller([model])
    now = [0.0]
    controller._clock = lambda: now[0]
    propose = model.propose_requests

    def take_time(requests: list[Request], max_drafts: list[int]) -> list[Drafts | None]:
        now[0] += 0.006
        return propose(requests, max_drafts)

    model.propose_requests = take_time  # type: ignore[method-assign]
    controller.propose([request], may_admit=False)
    assert model.asked == [6]
    assert controller._draft_times["eagle"].expect(1) == pytest.approx(0.002)


def test_a_second_model_is_asked_after_a_large_merged_tree() -> None:
    wide = Drafts(list(range(1, 11)), [ROOT] * 10, [0.09] * 10, "block")
    other = Drafts(list(range(20, 30)), [ROOT] * 10, [0.09] * 10, "medusa")
    models = [Model(wide), Model(other, "medusa"), Model(Drafts([3], None, [0.5], "eagle"), "eagle")]
    controller, request = make_controller(models)
    controller.propose([request], may_admit=False)
    assert controller.models == models
    assert models[2].asked


def test_a_parallel_model_is_asked_for_a_whole_tree_and_learns_by_level() -> None:
    tree = Drafts([1, 2, 3, 4], [ROOT, ROOT, 0, 0], [0.5, 0.4, 0.5, 0.4], "block")
    model = Model(tree)
    controller, request = make_controller([model])
    controller.propose([request], may_admit=False)
    assert model.asked == [10]
    drafts = request.drafts
    assert drafts is not None
    assert drafts.tokens[0] == 1
    asked = controller._records["a"].asked["block"]
    before = asked.rate
    controller._learn_odds(request, tree, [1])  # of two children one is right, and it has none
    assert asked.rate > before
    controller._learn_odds(request, tree, [])
    assert asked.rate < before + 0.03
    assert controller.drafted["block"] == 8
    assert controller.accepted["block"] == 1
    controller.finish("a")
    controller.finish("never proposed for")
    assert model.finished == ["a", "never proposed for"]
