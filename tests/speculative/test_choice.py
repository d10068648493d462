"""Which drafts are verified, by expected tokens a second and by what each request may lose."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quire.speculative import choice
from quire.speculative.choice import Node, StepCosts
from quire.speculative.ledger import Ledger

pytestmark = pytest.mark.core

PLAIN_S = 0.01
COSTS = StepCosts(PLAIN_S, [1.0 + 0.25 * count for count in range(9)])


def ledger(balance_s: float) -> Ledger:
    return Ledger(0.012, 2.0, balance_s)


def nodes(*survivals: tuple[int, float]) -> list[Node]:
    return sorted(Node(-survival, 0.0, row, number) for number, (row, survival) in enumerate(survivals))


def choose_nodes(
    nodes: Sequence[Node], ledgers: Sequence[Ledger | None], costs: StepCosts, is_gaining: bool = True
) -> Sequence[Node]:
    return choice.choose_nodes(nodes, ledgers, costs, is_gaining)


def test_as_many_as_give_the_most_tokens_a_second() -> None:
    found = choose_nodes(nodes((0, 0.9), (0, 0.8), (0, 0.1)), [ledger(0.0)], COSTS)
    assert [node.number for node in found] == [0, 1]


def test_drafts_that_are_not_worth_the_step_are_not_verified() -> None:
    assert not choose_nodes(nodes((0, 0.2)), [ledger(0.0)], COSTS)


def test_a_gap_before_a_plain_step_makes_drafts_worth_more() -> None:
    costs = StepCosts(PLAIN_S, COSTS.ratios, gap=0.3)
    assert len(choose_nodes(nodes((0, 0.2)), [ledger(0.0)], costs)) == 1


def test_time_spent_on_asking_makes_drafts_worth_less() -> None:
    costs = StepCosts(PLAIN_S, COSTS.ratios, asking=0.8)
    assert not choose_nodes(nodes((0, 0.6)), [ledger(0.0)], costs)


def test_a_row_without_drafts_is_slowed_down_only_as_far_as_its_ledger_allows() -> None:
    drafts = nodes((0, 0.95), (0, 0.95), (0, 0.9))
    assert choose_nodes(drafts, [ledger(0.0), ledger(0.0)], COSTS)
    assert not choose_nodes(drafts, [ledger(0.0), ledger(-0.0195)], COSTS)
    assert choose_nodes(drafts, [ledger(0.0), None], COSTS)  # nothing is known about it


def test_a_request_in_debt_goes_along_if_its_own_drafts_gain_clearly_more_than_the_step_costs() -> None:
    drafts = nodes((0, 0.95), (0, 0.9), (1, 0.95), (1, 0.9))
    assert len(choose_nodes(drafts, [ledger(0.0), ledger(-0.02)], COSTS)) == 4
    overdrawn = ledger(-0.5)
    assert len(choose_nodes(drafts, [ledger(0.0), overdrawn], COSTS)) == 4
    assert not choose_nodes(drafts, [ledger(0.0), overdrawn], COSTS, is_gaining=False)


def test_a_request_in_debt_pays_it_back_with_its_own_drafts() -> None:
    drafts = nodes((0, 0.95), (0, 0.94), (0, 0.93), (0, 0.92), (1, 0.7))
    found = choose_nodes(drafts, [ledger(0.0), ledger(-0.02)], COSTS)
    assert [node.row for node in found] == [1]


def test_a_request_in_debt_without_drafts_stops_all() -> None:
    assert not choose_nodes(nodes((0, 0.95), (0, 0.9)), [ledger(0.0), ledger(-0.02)], COSTS)
