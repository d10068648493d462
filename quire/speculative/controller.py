"""Controller: chooses before each step which drafts it verifies, none included. The engine calls it.

Proposers give drafts with odds. The calibration turns odds into chances, and measured durations say what a step with so
many drafts takes. The drafts that give the most tokens a second are chosen, over all rows and proposers at once. The
ledgers bound what wrong guesses may cost, for the engine and for each request.

A GPU's engine launches plain steps one behind the other. A step with drafts needs the last tokens on the host, so the
device is idle before it: a gap. `promises_gain` says before each plain step whether drafts are worth one.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from quire.core.drafts import ROOT, Drafts
from quire.core.plan import Plan, Sampled
from quire.core.request import Request
from quire.speculative.asking import Asked, DraftTimes, choose_depth
from quire.speculative.calibration import Calibration
from quire.speculative.draft_tree import UNKNOWN_ODDS, keep_allowed, merge, reach, trunk_first
from quire.speculative.drafting import Drafting
from quire.speculative.grammar_drafts import fit_to_grammar
from quire.speculative.ledger import Ledger
from quire.speculative.proposer import Context, ModelProposer, Proposer
from quire.speculative.step_times import StepTimes

log = logging.getLogger("quire.speculative")

MIN_GAIN = 1.01  # expected tokens a second, relative to a plain step
MIN_SURVIVAL = 0.02  # drafts that are less likely to be reached and right are not considered
ENGINE_LOSS, REQUEST_LOSS = 0.008, 0.012  # shares of the time that speculation may lose
ENGINE_GRACE, REQUEST_GRACE = 8.0, 2.0  # plain steps that it may lose at first
MAX_DEBT_STEP = 0.3  # by how much a step that pays back may take longer, relative to a plain one
PATIENCE, MAX_PAUSE = 12, 3  # a request whose drafts are not verified is skipped for a step more every so many calls
FORGETTING = 0.98  # of a request's shifts while nothing is verified, for which nothing would ever be again
MAX_FAILURES = 3  # of a proposer, until it is no longer called
GAP_WEIGHT, PEEK_WEIGHT = 0.2, 0.2  # of a measurement
DEVICE_FORGETTING = 0.1  # a step, of what is known about a row's drafts on the device that are not verified
DELAY_LOSS, DELAY_GRACE = 0.003, 0.5  # of plain steps, by asking for drafts behind tokens in flight


class Node(NamedTuple):
    """A draft that may be verified. Survival is the chance that it is reached and right. Nodes are sorted by it, and of
    equal ones those of the poorest request come first."""

    negative_survival: float
    balance_s: float
    row: int
    number: int  # in the row's tree


@dataclass(slots=True)
class Record:
    """What the controller knows about a running request."""

    ledger: Ledger = field(default_factory=lambda: Ledger(REQUEST_LOSS, REQUEST_GRACE))
    shifts: dict[str, float] = field(default_factory=dict)  # by proposer, see Calibration
    asked: dict[str, Asked] = field(default_factory=dict)  # by model
    num_idle: int = 0  # calls of the proposers since drafts were last verified
    pause: int = 0  # steps until they are called again


class Controller:
    def __init__(
        self,
        proposers: Sequence[Proposer],
        max_tokens_per_step: int,
        vocab_size: int,
        free_drafts: float,
        models: Sequence[ModelProposer] = (),
        plugins: Sequence[Proposer] = (),
        max_drafts: int = 16,
        is_pipelined: bool = False,
        drafting: Drafting | None = None,
    ) -> None:
        """`free_drafts` drafts double the duration of a small step, until that is measured. What plug-ins return is
        checked. `is_pipelined`: plain steps are launched one behind the other, and `propose` is called after a gap.
        `drafting`: of a device that drafts behind steps.
        """
        self.proposers = [*proposers, *plugins]
        self.plugins = list(plugins)
        self.models = list(models)
        self._max_drafts = max_drafts
        self._draft_times = {model.name: DraftTimes() for model in models}
        self.times = StepTimes(free_drafts)
        self.calibration = Calibration()
        self.ledger = Ledger(ENGINE_LOSS, ENGINE_GRACE)
        self.drafted: Counter[str] = Counter()  # since the start, by proposer
        self.accepted: Counter[str] = Counter()
        self._max_tokens = max_tokens_per_step
        self._vocab_size = vocab_size
        self._records: dict[str, Record] = {}
        self._failures: Counter[str] = Counter()
        self._is_pipelined = is_pipelined
        self._has_gap = False  # before the next step that is observed
        self._drafting = drafting
        self._on_device: dict[str, int] = {}  # drafts that the device has made behind the last step, by request
        self._propose_s = 0.0  # of the step being planned
        self._gap_s = 0.0  # by which a plain step takes longer after a gap
        self._peek_s = 0.0  # of `promises_gain`, for each request
        self._delays = Ledger(DELAY_LOSS, DELAY_GRACE)  # of plain steps, by that
        self._asked_s = 0.0  # of it, in models
        self._begin_s = self._end_s = 0.0
        self._clock = time.perf_counter

    def propose(self, running: Sequence[Request], may_admit: bool) -> None:
        """Set `Request.drafts` for the next step. `running` are all rows of it, unless it admits a waiting request.

        A step that computes prompts has no drafts: its duration grows with every token.
        """
        self._begin_s, self._asked_s = self._clock(), 0.0
        self._has_gap = self._is_pipelined
        step_s = self.times.plain_s(len(running))
        if step_s is None or may_admit or any(map(has_prompt, running)):
            return
        if self.ledger.may_lose(0.0, step_s):
            self._choose(running, step_s)
        self._propose_s = self._clock() - self._begin_s

    def plan_drafting(self, plan: Plan, reserve: Callable[[Request, int], int]) -> None:
        """Set `Plan.drafted`: how many drafts the device makes behind this step. `reserve` allocates blocks for them
        (`Scheduler.reserve`)."""
        drafting, num_rows = self._drafting, len(plan)
        step_s = self.times.plain_s(num_rows)
        if drafting is None or step_s is None or plan.counts != plan.yields or not self.ledger.may_lose(0.0, step_s):
            return
        rows = [row for row, request in enumerate(plan.requests) if may_be_drafted(request)]
        rates = []
        for row in rows:
            record = self._records.setdefault(plan.requests[row].id, Record())
            rate = record.asked.setdefault(drafting.name, Asked()).rate
            shift = record.shifts.get(drafting.name, 0.0)
            rates.append(min(rate, *self.calibration.chances(drafting.name, [rate], shift)))
        most = min(drafting.max_depth * len(rows), self._max_tokens - num_rows)
        if rows and (depth := drafting.choose_depth(rates, num_rows, self.times.ratios(num_rows, max(0, most)))):
            for row in rows:
                request = plan.requests[row]
                reserve(request, max(0, min(depth, request.max_len - request.num_planned - 1)))
                plan.drafted[row] = depth

    def promises_gain(self, running: Sequence[Request], may_admit: bool, hidden_s: float) -> bool:
        """Whether drafts behind the tokens in flight are worth a gap. Called while a plain step runs, for `hidden_s`
        longer than it takes to launch the next one. What this call takes beyond that is lost.

        The first drafts are guesses of the tokens in flight. Those behind them are what the next step could verify.
        """
        step_s = self.times.plain_s(len(running))
        if step_s is None or may_admit or any(map(has_prompt, running)):
            return False
        rows = [request for request in running if may_draft_next(request) and not self._pauses(request)]
        expected_s = self._peek_s * len(rows)
        if not rows or not self.ledger.may_lose(0.0, step_s):
            return False
        if not self._delays.may_lose(max(0.0, expected_s - hidden_s), step_s):
            return False
        begin_s = self._clock()
        nodes: list[Node] = []
        for index, (request, tree) in enumerate(zip(rows, self._ask(rows), strict=True)):
            if tree is not None:
                record = self._records[request.id]
                survivals, balance_s = self._survivals(tree, record.shifts), record.ledger.balance_s
                for nth, (depth, survival) in enumerate(zip(tree.depths(), survivals, strict=True)):
                    if depth > 1 and survival >= MIN_SURVIVAL:
                        nodes.append(Node(-survival, balance_s, index, nth))
        nodes.sort()
        seconds = self._clock() - begin_s
        self._peek_s += PEEK_WEIGHT * (seconds / len(rows) - self._peek_s) if self._peek_s else seconds / len(rows)
        self._delays.add(max(0.0, seconds - hidden_s), 0.0)
        promises = bool(self._best_nodes(nodes, rows, running, step_s, asking_s=seconds))
        if promises:
            for request in rows:
                self._records[request.id].pause = 0  # they are asked again when the tokens are known
        return promises

    def observe(self, plan: Plan, sampled: Sampled) -> None:
        """Learn from a step that has ended. Called after its commit."""
        end_s = self._clock()
        has_gap, self._has_gap = self._has_gap, False
        seconds, self._end_s = end_s - max(self._begin_s, self._end_s), end_s
        for row, drafts in plan.drafts.items():
            self._learn_odds(plan.requests[row], drafts, sampled.accepted.get(row, []))
        num_drafts = sum(map(len, plan.drafts.values()))
        num_rows, was_drafted = len(plan), bool(self._on_device)
        self._learn_unused(plan)
        self._on_device = {plan.requests[row].id: count for row, count in plan.drafted.items()}
        if plan.num_tokens - num_drafts != num_rows or not all(plan.yields) or sampled.exited:
            return  # prompts, or rows that skipped layers
        propose_s, self._propose_s = self._propose_s, 0.0
        has_gap = has_gap or was_drafted  # the device was busy with drafts that were not verified
        if num_drafts or not has_gap:
            self.times.learn(num_rows, num_drafts, seconds - propose_s)  # both ways have the rest of the host's work
        step_s = self.times.plain_s(num_rows)
        if step_s is None:
            return
        num_accepted = sum(map(len, sampled.accepted.values()))
        asked_s, self._asked_s = self._asked_s, 0.0
        if not num_drafts and has_gap:
            self._gap_s += GAP_WEIGHT * (min(max(0.0, seconds - propose_s - step_s), step_s) - self._gap_s)
        elif not num_drafts:
            seconds = step_s + asked_s  # nothing else is gained or lost
            self._delays.add(step_s, step_s)
        self.ledger.add(seconds, step_s * (1 + num_accepted / num_rows))
        for row, request in enumerate(plan.requests):
            if (record := self._records.get(request.id)) is not None:
                record.ledger.add(seconds, step_s * (1 + len(sampled.accepted.get(row, []))))

    def _learn_unused(self, plan: Plan) -> None:
        """Of drafts that the device has made and no row verified, each row's count as one that was wrong. If other rows
        verified theirs, what is known about a row's is forgotten little by little, so that they are tried again."""
        drafting = self._drafting
        if drafting is None or not self._on_device:
            return
        is_used = any(drafts.on_device for drafts in plan.drafts.values())
        for row, request in enumerate(plan.requests):
            drafts, record = plan.drafts.get(row), self._records.get(request.id)
            if request.id not in self._on_device or record is None or (drafts is not None and drafts.on_device):
                continue
            asked, name = record.asked[drafting.name], drafting.name
            if not is_used:
                asked.learn(False)
                continue
            asked.rate += DEVICE_FORGETTING * (UNKNOWN_ODDS - asked.rate)
            record.shifts[name] = (1.0 - DEVICE_FORGETTING) * record.shifts.get(name, 0.0)

    def finish(self, request_id: str) -> None:
        """A request has ended."""
        if self._records.pop(request_id, None) is not None:
            for proposer in list(self.proposers):
                with self._guard(proposer):
                    proposer.finish(request_id)
        for model in list(self.models):
            with self._guard(model):
                model.finish(request_id)

    def reset(self) -> None:
        """All plans were dropped. Requests go on from the tokens they have."""
        self._on_device.clear()
        everyone: list[Proposer | ModelProposer] = [*self.proposers, *self.models]
        for proposer in everyone:
            with self._guard(proposer):
                proposer.reset()

    @contextmanager
    def _guard(self, proposer: Proposer | ModelProposer) -> Iterator[None]:
        """A proposer that fails while it forgets requests is no longer called: it may mix them up."""
        try:
            yield
        except Exception:
            log.exception("the proposer %r failed and is no longer called", proposer.name)
            self.proposers = [each for each in self.proposers if each is not proposer]
            self.models = [each for each in self.models if each is not proposer]

    def _choose(self, running: Sequence[Request], step_s: float) -> None:
        """Choose among the proposed drafts of all rows. Survival: the chance that a draft is reached and right."""
        rows = [
            request
            for request in running
            if may_draft(request) and (request.id in self._on_device or not self._pauses(request))
        ]
        trees = self._ask(rows)
        if self._drafting is not None:
            trees = [self._prefer_device(request, tree) for request, tree in zip(rows, trees, strict=True)]
        asked = [
            (index, model.name) for model in list(self.models) for index in self._ask_model(model, rows, trees, step_s)
        ]
        if not trees:
            return
        nodes: list[Node] = []  # sorted, parents precede their children
        for index, tree in enumerate(trees):
            if tree is not None:
                record = self._records[rows[index].id]
                survivals, balance_s = self._survivals(tree, record.shifts), record.ledger.balance_s
                own = [Node(-each, balance_s, index, nth) for nth, each in enumerate(survivals) if each >= MIN_SURVIVAL]
                nodes += sorted(own)[: self._limit(rows[index])]
        nodes.sort()
        best = self._best_nodes(nodes, rows, running, step_s, gap_s=self._gap_s)
        chosen: dict[int, list[int]] = {}
        for node in best:
            chosen.setdefault(node.row, []).append(node.number)
        for index, its_nodes in chosen.items():
            tree = trees[index]
            assert tree is not None
            rows[index].drafts = trunk_first(tree, its_nodes)
            self._records[rows[index].id].num_idle = 0
        for index, name in asked:
            tree = trees[index]
            if tree is not None and not any(tree.source_of(node) == name for node in chosen.get(index, [])):
                self._records[rows[index].id].asked[name].learn(False)  # none of its drafts was worth verifying

    def _prefer_device(self, request: Request, tree: Drafts | None) -> Drafts | None:
        """The drafts that the device has made for a request, unless others promise more."""
        count = min(self._on_device.get(request.id, 0), self._limit(request))
        if count < 1 or self._drafting is None:
            return tree
        record, name = self._records[request.id], self._drafting.name
        rate = record.asked[name].rate if name in record.asked else UNKNOWN_ODDS
        drafts = Drafts([0] * count, None, [rate] * count, name, on_device=True)
        if tree is None or not len(tree):
            return drafts
        promised = [sum(self._survivals(each, record.shifts)) for each in (drafts, tree)]
        return drafts if promised[0] >= promised[1] else tree

    def _limit(self, request: Request) -> int:
        """The most drafts of a request in one step."""
        return min(self._max_drafts, request.max_len - len(request.tokens) - 1)

    def _pauses(self, request: Request) -> bool:
        """Whether to skip the request in this step: asking takes time too, and its last drafts were not worth it."""
        record = self._records.get(request.id)
        if record is None:
            self._records[request.id] = Record()
            return False
        if record.pause and not (request.constraint is not None and request.constraint.forced()):
            record.pause -= 1
            return True
        record.num_idle += 1
        for source in record.shifts:
            record.shifts[source] *= FORGETTING
        record.pause = min(MAX_PAUSE, record.num_idle // PATIENCE)
        return False

    def _best_nodes(
        self,
        nodes: Sequence[Node],
        rows: Sequence[Request],
        running: Sequence[Request],
        step_s: float,
        *,
        gap_s: float = 0.0,
        asking_s: float = 0.0,
    ) -> Sequence[Node]:
        """The drafts to verify, so that tokens a second are most and no ledger is overdrawn. `nodes` are sorted.

        A plain step takes `gap_s` longer too, and one with drafts `asking_s` longer than was measured.
        A request in debt has lost more than others should make it lose. Then only its own drafts are verified, if a few
        of them are likely to pay the debt back, and else none.
        """
        indebted = {row.id for row in running if self._is_in_debt(row, step_s)}
        if indebted:
            nodes = [node for node in nodes if rows[node.row].id in indebted]
        num_rows = len(running)
        most = max(0, min(len(nodes), self._max_tokens - num_rows, self.times.max_drafts(num_rows)))
        ratios, asking = self.times.ratios(num_rows, most), asking_s / step_s
        best, best_rate, expected = 0, MIN_GAIN * num_rows / (1.0 + gap_s / step_s), float(num_rows)
        for count, node in enumerate(nodes[:most], 1):
            expected -= node.negative_survival
            rate = expected / (ratios[count] + asking)
            if rate > best_rate or (indebted and ratios[count] - 1.0 < MAX_DEBT_STEP):
                best, best_rate = count, rate
        if not best or not self.ledger.may_lose(0.0, step_s):
            return ()
        extra = ratios[best] - 1.0
        gains = dict.fromkeys((row.id for row in running), 0.0)  # expected tokens of each request beside one
        for node in nodes[:best]:
            gains[rows[node.row].id] -= node.negative_survival
        for name, gain in gains.items():
            if (record := self._records.get(name)) is not None:
                if name in indebted and gain < extra:
                    return ()
                if not record.ledger.may_lose(max(0.0, extra - gain) * step_s, step_s):
                    return ()
        return nodes[:best]

    def _is_in_debt(self, request: Request, step_s: float) -> bool:
        record = self._records.get(request.id)
        return record is not None and record.ledger.is_in_debt(step_s)

    def _ask(self, rows: Sequence[Request]) -> list[Drafts | None]:
        """The drafts of each request: those of all proposers, merged into one tree."""
        if not rows:
            return []
        contexts = [
            Context(request.id, request.tokens, request.num_prompt, request.salt, request.prediction)
            for request in rows
        ]  # fmt: skip
        limits = [self._limit(request) for request in rows]
        trees: list[Drafts | None] = [None] * len(rows)
        for proposer in list(self.proposers):
            found = self._call(proposer, contexts, limits)
            for index, drafts in enumerate(found):
                if drafts is not None and len(drafts):
                    drafts.source = proposer.name
                    trees[index] = longer(trees[index], drafts)
        for index, request in enumerate(rows):
            if request.constraint is not None:
                trees[index] = fit_to_grammar(trees[index], request.constraint, request.tokens, limits[index])
        return trees

    def _ask_model(
        self, model: ModelProposer, rows: Sequence[Request], trees: list[Drafts | None], step_s: float
    ) -> list[int]:
        """Ask a model for the drafts of requests for which that promises more than the drafts there are. Returns the
        requests that got some."""
        num_rows, times = len(rows), self._draft_times[model.name]
        ratios = self.times.ratios(num_rows, self._max_drafts)
        share = times.expect(num_rows) / step_s
        limits: list[int] = []  # of drafts
        for request, tree in zip(rows, trees, strict=True):
            record = self._records[request.id]
            others = 1.0
            if tree is not None:
                survivals = self._survivals(tree, record.shifts)
                most = min(len(tree), self._max_drafts)  # a merged tree may have more
                rates = [(1 + sum(survivals[:count])) / ratios[count] for count in range(1, most + 1)]
                others = max(rates, default=1.0)
            asked = record.asked.setdefault(model.name, Asked())
            limit = self._limit(request)
            depth = choose_depth(asked, ratios, share, num_rows, others, model.is_parallel)
            limits.append(limit if depth and model.is_parallel else min(limit, depth * model.drafts_per_pass))
        if not any(limits):
            return []
        begin_s = self._clock()
        try:
            model.catch_up([request for request, limit in zip(rows, limits, strict=True) if limit])
            self._begin_s += self._clock() - begin_s  # as the prompt's own time, it is not charged to drafts
            begin_s = self._clock()
            found = model.propose_requests(rows, limits)
        except Exception:
            log.exception("the model %r failed and is no longer asked for drafts", model.name)
            self.models.remove(model)
            return []
        seconds = self._clock() - begin_s
        self._asked_s += seconds
        times.learn(num_rows, 1 if model.is_parallel else -(-max(limits) // model.drafts_per_pass), seconds)
        for index, drafts in enumerate(found):
            if drafts is not None and len(drafts):
                known = (nth for nth, token in enumerate(drafts.tokens) if token >= self._vocab_size)
                drafts.truncate(next(known, len(drafts)))  # a vocabulary may be padded to another size
                if (constraint := rows[index].constraint) is not None:
                    drafts = keep_allowed(drafts, constraint)
                if len(drafts):
                    tree = trees[index]
                    trees[index] = merge(tree, drafts) if tree is not None and len(tree) else drafts
        return [index for index, drafts in enumerate(found) if drafts is not None]

    def _call(self, proposer: Proposer, contexts: Sequence[Context], limits: Sequence[int]) -> list[Drafts | None]:
        """Call a proposer. One that fails repeatedly, or breaks the rules, is no longer called."""
        try:
            found = proposer.propose(contexts, limits)
            if proposer in self.plugins:
                check(found, limits, self._vocab_size)
            return found
        except Exception as error:
            self._failures[proposer.name] += 1
            failures = self._failures[proposer.name]
            log.error("the proposer %r failed: %s", proposer.name, error, exc_info=failures == 1)
            if failures >= MAX_FAILURES:
                log.error("the proposer %r has failed %d times and is no longer called", proposer.name, failures)
                self.proposers.remove(proposer)
            return []

    def _survivals(self, tree: Drafts, shifts: dict[str, float]) -> list[float]:
        odds = tree.odds or [UNKNOWN_ODDS] * len(tree)
        if tree.sources is not None:
            return reach(tree, self._merged_chances(tree, shifts))
        chances = self.calibration.chances(tree.source, odds, shifts.get(tree.source, 0.0))
        if tree.parents is None:
            return list(accumulate(chances, mul))
        return reach(tree, chances)

    def _merged_chances(self, tree: Drafts, shifts: dict[str, float]) -> list[float]:
        """The chances in a tree of several proposers. Those of one node's children add up to 1 at most."""
        chances: list[float] = []
        for node, odds in enumerate(tree.odds):
            source = tree.source_of(node)
            chances += self.calibration.chances(source, [odds], shifts.get(source, 0.0))
        totals: dict[int, float] = {}
        for node, chance in enumerate(chances):
            totals[tree.parent(node)] = totals.get(tree.parent(node), 0.0) + chance
        return [chance / max(1.0, totals[tree.parent(node)]) for node, chance in enumerate(chances)]

    def _learn_odds(self, request: Request, drafts: Drafts, path: Sequence[int]) -> None:
        """Each draft whose parent was right is one more observation."""
        record = self._records.get(request.id)
        right = {ROOT, *path}
        self.drafted.update(map(drafts.source_of, range(len(drafts))))
        self.accepted.update(map(drafts.source_of, path))
        if record is None:
            return
        levels: dict[tuple[str, int], bool] = {}  # by model and parent: whether one of its drafts was right
        for node in range(len(drafts)):
            source, parent, is_right = drafts.source_of(node), drafts.parent(node), node in right
            if parent in right:
                odds = drafts.odds[node] if drafts.odds else UNKNOWN_ODDS
                shift = record.shifts.get(source, 0.0)
                record.shifts[source] = self.calibration.learn(source, odds, is_right, shift)
                levels[source, parent] = levels.get((source, parent), False) or is_right
        for (source, _), is_right in levels.items():
            if (asked := record.asked.get(source)) is not None:
                asked.learn(is_right)


def may_draft(request: Request) -> bool:
    """Whether drafts can follow the request's last token: it is on the host, and the next token is not the last."""
    return (
        not request.num_in_flight
        and request.beam is None
        and request.params.early_exit is None  # the exit guesses its tokens already
        and request.max_len - len(request.tokens) > 1
        and request.num_planned == len(request.tokens) - 1
    )


def may_be_drafted(request: Request) -> bool:
    """Whether the device may draft behind a step of a request that was planned: nothing of the host is needed to sample
    its tokens, and several are left, unless drafts of that step are right."""
    left = request.max_len - len(request.tokens) - request.num_expected
    return not request.processes_logits and request.beam is None and left > 1


def may_draft_next(request: Request) -> bool:
    """Whether drafts could follow the token in flight, once it is on the host."""
    return (
        request.num_in_flight == request.num_expected == 1
        and request.beam is None
        and request.max_len - len(request.tokens) > 2
        and request.num_planned == len(request.tokens)
    )


def has_prompt(request: Request) -> bool:
    """Whether a running request has more tokens to compute than its last one. Then the step is not free for drafts."""
    return len(request.tokens) + request.num_expected - request.num_planned > 1


def longer(one: Drafts | None, other: Drafts) -> Drafts:
    """The drafts that promise more tokens. Forced tokens come first."""
    if one is None or not len(one):
        return other
    return one if sum(one.odds) >= sum(other.odds) else other


def check(found: Sequence[Drafts | None], limits: Sequence[int], vocab_size: int) -> None:
    """Raise if a proposer's answer is malformed."""
    if len(found) != len(limits):
        raise ValueError(f"It returned {len(found)} drafts for {len(limits)} requests.")
    for drafts, limit in zip(found, limits, strict=True):
        if drafts is None:
            continue
        count = len(drafts.tokens)
        drafts.sources, drafts.on_device = None, False  # the controller's own
        if drafts.odds and len(drafts.odds) != count:
            raise ValueError(f"It returned {len(drafts.odds)} odds for {count} tokens.")
        if not all(type(token) is int for token in [*drafts.tokens, *(drafts.parents or ())]):
            raise ValueError("Tokens and parents must be of type int.")
        drafts.odds = [float(each) for each in drafts.odds]
        if drafts.parents is not None:
            if len(drafts.parents) != count or any(not ROOT <= each < node for node, each in enumerate(drafts.parents)):
                raise ValueError("A parent must be ROOT or an earlier node, one for each token.")
            if len(set(zip(drafts.parents, drafts.tokens, strict=True))) != count:
                raise ValueError("Two children of a node have the same token.")
        drafts.truncate(max(0, limit))
        if not all(0 <= token < vocab_size for token in drafts.tokens):
            raise ValueError(f"A token is not in the vocabulary of {vocab_size}.")
