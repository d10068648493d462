"""Controller: chooses before each step which drafts it verifies, none included. The engine calls it.

Proposers give drafts with odds. The calibration turns odds into chances, and measured durations say what a step with so
many drafts takes. The drafts that give the most tokens a second are chosen, over all rows and proposers at once. The
ledgers bound what wrong guesses may cost, for the engine and for each request.

A GPU's engine launches plain steps one behind the other. A step with drafts needs the last tokens on the host, so the
device is idle before it: a gap. `promises_gain` says before each plain step whether drafts are worth one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from quire.core.drafts import ROOT, Drafts
from quire.core.plan import Plan, Sampled
from quire.core.request import Request
from quire.speculative.asking import Asked, DraftTimes, choose_depth
from quire.speculative.calibration import Calibration
from quire.speculative.choice import Node, StepCosts, choose_nodes
from quire.speculative.draft_tree import UNKNOWN_ODDS, keep_allowed, merge, reach, trunk_first
from quire.speculative.drafting import Drafting
from quire.speculative.eligibility import has_prompt, is_forced, may_be_drafted, may_draft, may_draft_next
from quire.speculative.grammar_drafts import fit_to_grammar
from quire.speculative.guard import Guard
from quire.speculative.ledger import Ledger
from quire.speculative.proposer import ModelProposer, Proposer
from quire.speculative.record import Record
from quire.speculative.step_times import StepTimes

MIN_SURVIVAL = 0.02  # drafts that are less likely to be reached and right are not considered
MAX_LOSS, GRACE = 0.008, 8.0  # of the engine's ledger
GAP_WEIGHT, PEEK_WEIGHT = 0.2, 0.2  # of a measurement
DEVICE_FORGETTING = 0.1  # a step, of what is known about a row's drafts on the device that are not verified
DELAY_LOSS, DELAY_GRACE = 0.003, 0.5  # of plain steps, by asking for drafts behind tokens in flight
IDLE_LOSS, IDLE_GRACE = 0.005, 1.0  # of the engine's time, by asking for drafts of which none is verified
MAX_CHARGE = 3.0  # of a step in a pipeline, in the duration that is expected of it


class Observed(NamedTuple):
    """A step that has ended. `on_device`: the drafts that were there for it, by request. `charged`: see `_charge`."""

    plan: Plan
    sampled: Sampled
    on_device: Mapping[str, int]
    charged: tuple[float, float] | None


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
        self.times = StepTimes(free_drafts)
        self.calibration = Calibration()
        self.ledger = Ledger(MAX_LOSS, GRACE)
        self.drafted: Counter[str] = Counter()  # since the start, by proposer
        self.accepted: Counter[str] = Counter()
        self._guard = Guard(proposers, plugins, models, vocab_size)
        self._max_drafts = max_drafts
        self._max_tokens = max_tokens_per_step
        self._vocab_size = vocab_size
        self._draft_times = {model.name: DraftTimes() for model in models}
        self._records: dict[str, Record] = {}
        self._is_pipelined = is_pipelined
        self._has_gap = False  # before the next step that is observed
        self._num_disturbed = 0  # steps in flight while the host did other work
        self._drafting = drafting
        self._unlearned: list[Observed] = []
        self._on_device: dict[str, int] = {}  # drafts that the device has made behind the last step, by request
        self._propose_s = 0.0  # of the step being planned
        self._gap_s = 0.0  # by which a plain step takes longer after a gap
        self._peek_s = 0.0  # of `promises_gain`, for each request
        self._delays = Ledger(DELAY_LOSS, DELAY_GRACE)  # of plain steps, by that
        self._idle = Ledger(IDLE_LOSS, IDLE_GRACE)  # of such calls, while nothing has been gained that pays for them
        self._asked_s = 0.0  # of `propose`, in models and plug-ins
        self._begin_s = self._end_s = 0.0
        self._clock = time.perf_counter

    @property
    def proposers(self) -> list[Proposer]:
        """Those that are called."""
        return self._guard.proposers

    @property
    def models(self) -> list[ModelProposer]:
        return self._guard.models

    def propose(self, running: Sequence[Request], may_admit: bool) -> None:
        """Set `Request.drafts` for the next step. `running` are all rows of it, unless it admits a waiting request.

        A step that computes prompts has no drafts: its duration grows with every token.
        """
        self._begin_s, self._propose_s, self._asked_s = self._clock(), 0.0, 0.0
        self._has_gap = self._is_pipelined
        step_s = self._plain_s(running, may_admit)
        if step_s is None:
            return
        if self.ledger.may_lose(0.0, step_s) and self._may_ask(running, step_s):
            self._choose(running, step_s)
            self._propose_s = self._clock() - self._begin_s

    def _may_ask(self, running: Sequence[Request], step_s: float) -> bool:
        """While speculation gains nothing, calls of which no draft is verified take little of the engine's time."""
        return self.ledger.balance_s > 0.0 or self._idle.may_lose(0.0, step_s) or any(map(is_forced, running))

    def _plain_s(self, running: Sequence[Request], may_admit: bool) -> float | None:
        """The duration of the next step without drafts, if it may have some."""
        if may_admit or any(map(has_prompt, running)) or self.times.is_plain_due(len(running)):
            return None
        return self.times.plain_s(len(running))

    def plan_drafting(self, plan: Plan, reserve: Callable[[Sequence[tuple[Request, int]]], object]) -> None:
        """Set `Plan.drafted`: how many drafts the device makes behind this step. `reserve` allocates blocks for them
        (`Scheduler.reserve_all`)."""
        drafting, num_rows = self._drafting, len(plan)
        if drafting is None or plan.counts != plan.yields:
            return
        step_s = self._plain_s(plan.requests, may_admit=False)
        if step_s is None or not self.ledger.may_lose(0.0, step_s):
            return
        rows = [row for row, request in enumerate(plan.requests) if may_be_drafted(request)]
        rates = []
        for row in rows:
            record = self._record_of(plan.requests[row])
            if (asked := record.asked.get(drafting.name)) is None:
                asked = record.asked[drafting.name] = Asked()
            rate = asked.rate
            shift = record.shifts.get(drafting.name, 0.0)
            rates.append(min(rate, *self.calibration.chances(drafting.name, [rate], shift)))
        most = min(drafting.max_depth * len(rows), self._max_tokens - num_rows)
        if rows and (depth := drafting.choose_depth(rates, num_rows, self.times.ratios(num_rows, max(0, most)))):
            requests = [plan.requests[row] for row in rows]
            reserve([(each, max(0, min(depth, each.max_len - each.num_planned - 1))) for each in requests])
            plan.drafted.update(dict.fromkeys(rows, depth))

    def promises_gain(self, running: Sequence[Request], may_admit: bool, hidden_s: float) -> bool:
        """Whether drafts behind the tokens in flight are worth a gap. Called while a plain step runs, for `hidden_s`
        longer than it takes to launch the next one. What this call takes beyond that is lost.

        The first drafts are guesses of the tokens in flight. Those behind them are what the next step could verify.
        """
        step_s = self._plain_s(running, may_admit)
        if step_s is None or not self.ledger.may_lose(0.0, step_s):
            return False
        rows = [row for row, request in enumerate(running) if may_draft_next(request) and not self._pauses(request)]
        if not rows or not self._delays.may_lose(max(0.0, self._peek_s * len(rows) - hidden_s), step_s):
            return False
        begin_s = self._clock()
        trees, _ = self._ask([running[row] for row in rows])
        nodes: list[Node] = []
        for row, tree in zip(rows, trees, strict=True):
            if tree is not None:
                depths = tree.depths()
                nodes += [node for node in self._nodes(row, running[row], tree) if depths[node.number] > 1]
        seconds = self._clock() - begin_s
        self._peek_s += PEEK_WEIGHT * (seconds / len(rows) - self._peek_s) if self._peek_s else seconds / len(rows)
        self._delays.add(max(0.0, seconds - hidden_s), 0.0)
        if not self._choose_nodes(sorted(nodes), running, step_s, asking_s=seconds):
            return False
        for row in rows:
            self._records[running[row].id].pause = 0  # they are asked again when the tokens are known
        return True

    def ignore_durations(self, num_steps: int) -> None:
        """The steps that are observed next were held up by work for later steps, or ended behind it: their durations
        say nothing."""
        self._num_disturbed = num_steps

    def observe(self, plan: Plan, sampled: Sampled) -> None:
        """Note a step that has ended. Called after its commit."""
        self._unlearned.append(Observed(plan, sampled, self._on_device, self._charge(plan, sampled)))
        self._on_device = {plan.requests[row].id: count for row, count in plan.drafted.items()}
        if not self._is_pipelined:
            self.learn()

    def learn(self) -> None:
        """Learn about the requests of the steps that were observed. A pipelined engine calls it when it has launched
        the next step: a device that waits for the host costs more than a choice that lags by a step."""
        for plan, sampled, on_device, charged in self._unlearned:
            for row, drafts in plan.drafts.items():
                self._learn_odds(plan.requests[row], drafts, sampled.accepted.get(row, []))
            self._learn_unused(plan, on_device)
            if charged is not None:
                seconds, step_s = charged
                for row, request in enumerate(plan.requests):
                    if (record := self._records.get(request.id)) is not None:
                        record.ledger.add(seconds, step_s * (1 + len(sampled.accepted.get(row, []))))
        self._unlearned.clear()

    def _charge(self, plan: Plan, sampled: Sampled) -> tuple[float, float] | None:
        """Learn the duration of a step, and add it to the engine's ledger. Returns the seconds that its requests are
        charged with, and those of a plain step, if that is known."""
        end_s = self._clock()
        is_disturbed = self._num_disturbed > 0
        self._num_disturbed -= is_disturbed
        has_gap, self._has_gap = self._has_gap, False
        seconds, self._end_s = end_s - max(self._begin_s, self._end_s), end_s
        num_drafts, num_rows = sum(map(len, plan.drafts.values())), len(plan)
        propose_s, self._propose_s = self._propose_s, 0.0
        asked_s, self._asked_s = self._asked_s, 0.0
        if is_disturbed or plan.num_tokens - num_drafts != num_rows or not all(plan.yields) or sampled.exited:
            return None  # work for later steps, prompts, or rows that skipped layers
        has_gap = has_gap or bool(self._on_device)  # the device was busy with drafts that were not verified
        if num_drafts or not has_gap:
            self.times.learn(num_rows, num_drafts, seconds - propose_s)  # both ways have the rest of the host's work
        step_s = self.times.plain_s(num_rows)
        if step_s is None:
            return None
        num_accepted = sum(map(len, sampled.accepted.values()))
        if not num_drafts and has_gap:
            self._gap_s += GAP_WEIGHT * (min(max(0.0, seconds - propose_s - step_s), step_s) - self._gap_s)
        elif not num_drafts:
            seconds = step_s + asked_s  # nothing else is gained or lost
            self._delays.add(step_s, step_s)
        if self._is_pipelined:  # whatever takes so long, it is not the drafts
            seconds = min(seconds, asked_s + MAX_CHARGE * step_s * self.times.ratios(num_rows, num_drafts)[num_drafts])
        plain_s = step_s * (1 + num_accepted / num_rows)
        idle_s = 0.0 if num_drafts else propose_s - asked_s
        is_gaining = self.ledger.balance_s > 0.0
        self.ledger.add(seconds + (idle_s if is_gaining else 0.0), plain_s)
        self._idle.add(step_s + (0.0 if is_gaining else idle_s), step_s)
        return seconds, step_s

    def _learn_unused(self, plan: Plan, on_device: Mapping[str, int]) -> None:
        """Of drafts that the device has made and no row verified, each row's count as one that was wrong. If other rows
        verified theirs, what is known about a row's is forgotten little by little, so that they are tried again."""
        drafting = self._drafting
        if drafting is None or not on_device:
            return
        is_used = any(drafts.on_device for drafts in plan.drafts.values())
        for row, request in enumerate(plan.requests):
            drafts, record = plan.drafts.get(row), self._records.get(request.id)
            if request.id not in on_device or record is None or (drafts is not None and drafts.on_device):
                continue
            asked, name = record.asked[drafting.name], drafting.name
            if not is_used:
                asked.learn(False)
                continue
            asked.rate += DEVICE_FORGETTING * (UNKNOWN_ODDS - asked.rate)
            record.shifts[name] = (1.0 - DEVICE_FORGETTING) * record.shifts.get(name, 0.0)

    def finish(self, request_id: str) -> None:
        """A request has ended. Another one may have its id."""
        self._on_device.pop(request_id, None)
        self._guard.finish(request_id, self._records.pop(request_id, None) is not None)

    def reset(self) -> None:
        """All plans were dropped. Requests go on from the tokens they have."""
        self._on_device = {}
        self._unlearned.clear()
        self._num_disturbed = 0
        self._guard.reset()

    def _choose(self, running: Sequence[Request], step_s: float) -> None:
        """Choose among the proposed drafts of all rows."""
        rows = [
            row
            for row, request in enumerate(running)
            if may_draft(request) and (request.id in self._on_device or not self._pauses(request))
        ]
        requests = [running[row] for row in rows]
        trees, self._asked_s = self._ask(requests)
        if self._drafting is not None:
            trees = [self._prefer_device(request, tree) for request, tree in zip(requests, trees, strict=True)]
        asked = [
            (index, model.name)
            for model in list(self.models)
            for index in self._ask_model(model, requests, trees, step_s)
        ]
        nodes: list[Node] = []
        for row, tree in zip(rows, trees, strict=True):
            if tree is not None:
                nodes += self._nodes(row, running[row], tree)
        if not nodes and not asked:
            return
        chosen: dict[int, list[int]] = {}
        for node in self._choose_nodes(sorted(nodes), running, step_s, gap_s=self._gap_s):
            chosen.setdefault(node.row, []).append(node.number)
        for row, tree in zip(rows, trees, strict=True):
            if tree is not None and row in chosen:
                running[row].drafts = trunk_first(tree, chosen[row])
                self._records[running[row].id].num_idle = 0
        for index, name in asked:
            tree = trees[index]
            if tree is not None and not any(tree.source_of(node) == name for node in chosen.get(rows[index], [])):
                self._records[requests[index].id].asked[name].learn(False)  # none of its drafts was worth verifying

    def _choose_nodes(
        self,
        nodes: Sequence[Node],
        running: Sequence[Request],
        step_s: float,
        *,
        gap_s: float = 0.0,
        asking_s: float = 0.0,
    ) -> Sequence[Node]:
        num_rows = len(running)
        most = max(0, min(len(nodes), self._max_tokens - num_rows, self.times.max_drafts(num_rows)))
        ratios = self.times.ratios(num_rows, most)[: most + 1]
        records = [self._records.get(request.id) for request in running]
        ledgers = [None if record is None else record.ledger for record in records]
        costs = StepCosts(step_s, ratios, gap_s / step_s, asking_s / step_s)
        return choose_nodes(nodes, ledgers, costs, is_gaining=self.ledger.balance_s > 0.0)

    def _nodes(self, row: int, request: Request, tree: Drafts) -> list[Node]:
        """The best drafts of a request, parents before their children."""
        record = self._records[request.id]
        survivals, balance_s = self._survivals(tree, record.shifts), record.ledger.balance_s
        nodes = [Node(-each, balance_s, row, nth) for nth, each in enumerate(survivals) if each >= MIN_SURVIVAL]
        return sorted(nodes)[: self._limit(request)]

    def _prefer_device(self, request: Request, tree: Drafts | None) -> Drafts | None:
        """The drafts that the device has made for a request, unless others promise more."""
        count = min(self._on_device.get(request.id, 0), self._limit(request))
        if count < 1 or self._drafting is None:
            return tree
        record, name = self._records[request.id], self._drafting.name
        rate = record.asked[name].rate if name in record.asked else UNKNOWN_ODDS
        drafts = Drafts([0] * count, None, [rate] * count, name, on_device=True)
        return self._better(request, drafts, tree)

    def _better(self, request: Request, one: Drafts, other: Drafts | None) -> Drafts:
        """The drafts of which more are expected to be right."""
        if other is None or not len(other):
            return one
        shifts = self._records[request.id].shifts
        return one if sum(self._survivals(one, shifts)) >= sum(self._survivals(other, shifts)) else other

    def _limit(self, request: Request) -> int:
        """The most drafts of a request in one step."""
        return min(self._max_drafts, request.max_len - len(request.tokens) - 1)

    def _record_of(self, request: Request) -> Record:
        if (record := self._records.get(request.id)) is None:
            record = self._records[request.id] = Record()
        return record

    def _pauses(self, request: Request) -> bool:
        return self._record_of(request).pauses(is_forced(request))

    def _ask(self, requests: Sequence[Request]) -> tuple[list[Drafts | None], float]:
        """For each request the best of the proposers' drafts, with those that its grammar forces. And the seconds that
        are charged for it."""
        if not requests:
            return [], 0.0
        limits = [self._limit(request) for request in requests]
        proposed, seconds = self._guard.propose(requests, limits, self._clock)
        trees: list[Drafts | None] = []
        for request, own, limit in zip(requests, proposed, limits, strict=True):
            best: Drafts | None = None
            for drafts in own:
                best = self._better(request, drafts, best) if best is None else self._better(request, best, drafts)
            if request.constraint is not None:
                best = fit_to_grammar(best, request.constraint, request.tokens, limit)
            trees.append(best)
        return trees, seconds

    def _ask_model(
        self, model: ModelProposer, requests: Sequence[Request], trees: list[Drafts | None], step_s: float
    ) -> list[int]:
        """Ask a model for the drafts of requests for which that promises more than the drafts there are. Returns the
        indices of those that got some."""
        num_rows, times = len(requests), self._draft_times[model.name]
        ratios = self.times.ratios(num_rows, self._max_drafts)
        share = times.expect(num_rows) / step_s
        limits: list[int] = []  # of drafts
        for request, tree in zip(requests, trees, strict=True):
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
            model.catch_up([request for request, limit in zip(requests, limits, strict=True) if limit])
            self._begin_s += self._clock() - begin_s  # as the prompt's own time, it is not charged to drafts
            begin_s = self._clock()
            found = model.propose_requests(requests, limits)
        except Exception:
            self._guard.drop_model(model)
            return []
        seconds = self._clock() - begin_s
        self._asked_s += seconds
        times.learn(num_rows, 1 if model.is_parallel else -(-max(limits) // model.drafts_per_pass), seconds)
        for index, drafts in enumerate(found):
            if drafts is not None and len(drafts):
                known = (nth for nth, token in enumerate(drafts.tokens) if token >= self._vocab_size)
                drafts.truncate(next(known, len(drafts)))  # a vocabulary may be padded to another size
                if (constraint := requests[index].constraint) is not None:
                    drafts = keep_allowed(drafts, constraint)
                if len(drafts):
                    tree = trees[index]
                    trees[index] = merge(tree, drafts) if tree is not None and len(tree) else drafts
        return [index for index, drafts in enumerate(found) if drafts is not None]

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
        if drafts.sources is None:
            self.drafted[drafts.source] += len(drafts)
            self.accepted[drafts.source] += len(path)
        else:
            self.drafted.update(drafts.sources)
            self.accepted.update(drafts.sources[node] for node in path)
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
