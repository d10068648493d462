"""Choice: which drafts a step verifies, so that the expected tokens a second are most and nobody pays too much for it.

`choose_nodes` gets the drafts of all rows, likeliest first, and what steps take. The controller calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.speculative.ledger import Ledger

MIN_GAIN = 1.01  # expected tokens a second, relative to a plain step
MAX_DEBT_STEP = 0.3  # by how much a step that pays back may take longer, relative to a plain one
DEBT_MARGIN = 1.5  # expected gain over cost, with which a request in debt takes part in a step like any other


class Node(NamedTuple):
    """A draft that may be verified. Survival is the chance that it is reached and right. Nodes are sorted by it, and of
    equal ones those of the poorest request come first."""

    negative_survival: float
    balance_s: float
    row: int  # of the step
    number: int  # in the row's tree


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What the next step takes.

    plain_s  seconds without drafts
    ratios   for 0, 1, ... drafts: its duration relative to that
    gap      by how much a plain step takes longer because nothing was launched before, relative to `plain_s`
    asking   by how much a step with drafts takes longer than was measured, relative to `plain_s`
    """

    plain_s: float
    ratios: Sequence[float]
    gap: float = 0.0
    asking: float = 0.0


def choose_nodes(
    nodes: Sequence[Node], ledgers: Sequence[Ledger | None], costs: StepCosts, is_gaining: bool
) -> Sequence[Node]:
    """The nodes to verify: the first of `nodes`, or of some rows' nodes. `ledgers` are those of the step's rows.

    A request in debt has lost more than others should make it lose. It takes part if its own drafts are expected to
    gain clearly more than the step costs. Else only drafts of those in debt are verified, if a few of them are likely
    to pay the debt back, and else none. A request that has lost all that it may is trusted to gain only if speculation
    `is_gaining` time for the engine: before that, expectations are guesses.
    """
    indebted = {row for row, ledger in enumerate(ledgers) if ledger is not None and ledger.is_in_debt(costs.plain_s)}
    best = nodes[: best_count(nodes, len(ledgers), costs)]
    if indebted:
        extra, gains = costs.ratios[len(best)] - 1.0, expected_gains(best)
        if not best or any(gains.get(row, 0.0) < DEBT_MARGIN * extra for row in indebted):
            nodes = [node for node in nodes if node.row in indebted]
            best = nodes[: best_count(nodes, len(ledgers), costs, pays_back=True)]
    return best if is_fair(best, ledgers, indebted, costs, is_gaining) else ()


def best_count(nodes: Sequence[Node], num_rows: int, costs: StepCosts, *, pays_back: bool = False) -> int:
    """How many of the nodes give the most tokens a second. To pay a debt back, as many as the step may take longer."""
    best, best_rate, expected = 0, MIN_GAIN * num_rows / (1.0 + costs.gap), float(num_rows)
    for count, node in enumerate(nodes[: len(costs.ratios) - 1], 1):
        expected -= node.negative_survival
        rate = expected / (costs.ratios[count] + costs.asking)
        if rate > best_rate or (pays_back and costs.ratios[count] - 1.0 < MAX_DEBT_STEP):
            best, best_rate = count, rate
    return best


def is_fair(
    nodes: Sequence[Node], ledgers: Sequence[Ledger | None], indebted: set[int], costs: StepCosts, is_gaining: bool
) -> bool:
    """Whether no request is expected to lose more than its ledger allows, and none in debt to lose anything."""
    extra, gains = costs.ratios[len(nodes)] - 1.0, expected_gains(nodes)
    for row, ledger in enumerate(ledgers):
        loss = extra - gains.get(row, 0.0)
        if ledger is None or (loss <= 0.0 and is_gaining):
            continue
        if (row in indebted and loss > 0.0) or not ledger.may_lose(max(0.0, loss) * costs.plain_s, costs.plain_s):
            return False
    return True


def expected_gains(nodes: Sequence[Node]) -> dict[int, float]:
    """By row: the expected tokens beside the one that a plain step gives."""
    gains: dict[int, float] = {}
    for node in nodes:
        gains[node.row] = gains.get(node.row, 0.0) - node.negative_survival
    return gains
