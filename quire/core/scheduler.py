"""Scheduler: decides what the next step computes, and takes in what it produced.

It knows blocks and token counts, no tensors and no model: `schedule()` gives a Plan, somebody runs it, `commit()` turns
the result into Updates. Plans may be committed one step late, as long as they are committed in order; until then the
requests of a plan keep their blocks.

An operation that an exception interrupts leaves queues and blocks half changed. The next operation then starts from
`reset`: the requests and their tokens are kept, all else is built anew. `recover` also ends the request at fault.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from traceback import walk_tb

from quire.core.beam_group import Beam, BeamGroup, Survivor, beam_of
from quire.core.kv_cache import KVCache, ceil_div
from quire.core.pace import Pace
from quire.core.params import check_priority
from quire.core.plan import Candidates, Detail, Plan, Sampled, Update, explain_no_token
from quire.core.policy import FairQueue, Policy
from quire.core.prefix_tree import Match
from quire.core.request import Finish, Request, State
from quire.core.swap import Swap, SwapCosts
from quire.errors import EmptyPrompt, InvalidParams, PromptTooLong

_rank = attrgetter("rank")
_FINISHED = State.FINISHED


@dataclass(slots=True)
class Counters:
    """Totals since the start, for metrics and tests."""

    steps: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0  # preempted requests whose blocks went to the host
    finished: int = 0


@dataclass(frozen=True, slots=True)
class Blocked:
    """A waiting request that did not fit, and what the prefix tree had of it."""

    request: Request
    match: Match


class Scheduler:
    """Waiting requests in a heap, running ones in a list, both by rank; the best-ranked one always makes progress."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_tokens_per_step: int,
        max_requests: int,
        policy: Policy | None = None,
        *,
        windows: Sequence[int | None] = (None,),
        num_encoder_groups: int = 0,
        num_state_groups: int = 0,
        prefix_cache: bool = True,
        num_host_blocks: int = 0,
        costs: SwapCosts | None = None,
        pace: Pace | None = None,
    ) -> None:
        assert max_tokens_per_step >= max_requests >= 1
        self.kv = KVCache(
            num_blocks, block_size, windows, num_encoder_groups=num_encoder_groups, num_state_groups=num_state_groups,
            prefix_cache=prefix_cache,
        )  # fmt: skip
        self.swap = Swap(num_host_blocks, costs)
        self.max_tokens_per_step = max_tokens_per_step
        self.max_requests = max_requests
        self.policy = policy or Policy()
        self.pace = pace or Pace()
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.counters = Counters()
        self._waiting: list[tuple[tuple[int, int], Request]] = []
        self._num_waiting = 0  # without those that ended while they waited and are still in the heap
        self._waiting_tokens = 0  # theirs
        self._num_arrived = 0
        self._fair_queue = FairQueue()
        self._in_flight: deque[Plan] = deque()  # plans that are neither committed nor failed, oldest first
        self._groups: list[BeamGroup] = []  # beam searches that run
        self._blocked: Blocked | None = None
        self._updates: list[Update] = []  # of the operation under way
        self._is_changing = False  # an operation is under way, or was interrupted

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, request: Request, now_s: float = 0.0) -> None:
        """Take a request in, or refuse one that could never be served."""
        self._check(request)
        self._begin()
        request.place = self._fair_queue.place(request.tenant, request.num_prompt)
        request.rank = self.policy.rank(request.place, request.priority), self._num_arrived
        request.arrival_s = now_s
        if request.params.use_beam_search:
            request.beam = Beam(BeamGroup(request))
        self._num_arrived += 1
        leader = request.leader
        is_led = leader is not None and self.requests.get(leader.id) is leader and not request.num_output
        if leader and is_led and leader.num_computed < leader.num_prompt - 1:
            request.state = State.HELD
            leader.forks.append(request)
        else:
            self._enqueue(request)
        self.requests[request.id] = request
        self._is_changing = False

    def abort(self, request_id: str, finish: Finish = Finish.ABORT, detail: Detail | None = None) -> Update | None:
        """End a request now. None if it is not there (any more): it has had its final update."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        self._begin()
        if request.state is State.HELD and request.leader is not None:
            request.leader.forks.remove(request)
        self._end(request)
        self._drop_finished()
        self._is_changing = False
        detail = detail or Detail()
        detail.num_cached = request.num_cached
        return Update(request.id, [], finish, detail)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    # ── one step ──────────────────────────────────────────────────────────────────────────────────────────────────

    def schedule(self, now_s: float = 0.0) -> Plan | None:
        """The next step, or None when there is nothing to compute yet."""
        self._begin()
        self.counters.steps += 1
        self.kv.begin_plan(self.counters.steps)
        plan = Plan(self.counters.steps)
        room = self._prompt_room()
        preempted = self._plan_running(plan, room)
        self._publish_chunks(plan)
        if not preempted:
            self._admit(plan, room - (plan.num_tokens - len(plan)), now_s)
        if not plan.requests:
            assert not plan.swap_in, "who is brought back has tokens to compute"
            self._is_changing = False
            return None  # what is to go to the host goes with the next plan
        plan.swap_out.extend(self.swap.take_swap_out())
        self.counters.computed_tokens += plan.num_tokens
        self._in_flight.append(plan)
        self._is_changing = False
        return plan

    def commit(self, plan: Plan, sampled: Sampled) -> list[Update]:
        """Take in a step's tokens, in the order the plans were made."""
        assert self._in_flight[0] is plan, "plans are committed in order"
        self._begin()
        updates = self._updates
        details = self._details(plan, sampled)
        num_finished = self.counters.finished
        columns = zip(plan.requests, plan.starts, plan.counts, plan.yields, sampled.tokens, strict=True)
        for row, (request, start, count, num_yields, tokens) in enumerate(columns):
            request.num_in_flight -= 1
            if num_yields:
                request.num_expected -= 1
            if request.beam is not None:
                self._land_beam(request, start + count, sampled.candidates.get(row), details.get(row))
            elif request.state is not _FINISHED:
                finish = None
                known = request.tokens
                known += tokens
                if request.constraint is not None:
                    for token in tokens:
                        request.constraint.advance(token)
                if len(known) >= request.max_len or not request.stop_ids.isdisjoint(tokens):
                    finish = self._cut_off(request, tokens)
                    if finish:
                        ended = details.setdefault(row, Detail())
                        ended.num_cached = request.num_cached
                        if ended.logprobs:
                            del ended.logprobs[len(tokens) :]
                detail = details.get(row) if details else None
                if tokens or detail:
                    updates.append(Update(request.id, tokens, finish, detail))
                    if detail and detail.prompt_logprobs:
                        request.num_scored += len(detail.prompt_logprobs)
                self._advance(request, start + count)
                if finish:
                    self._end(request)
            if request.release_due and not request.num_in_flight:
                self._give_back(request)
        if self.counters.finished > num_finished:
            self._drop_finished()
        self._in_flight.popleft()
        self._is_changing = False
        return updates

    def fail(self, plan: Plan, message: str) -> list[Update]:
        """End the requests of a plan that could not be run, and those that read what it was to compute.

        Requests that were to be copied to the host are computed again. A plan that was not even begun must be failed
        before another one is made.
        """
        self._begin()
        self._in_flight.remove(plan)
        for request, num_yields in zip(plan.requests, plan.yields, strict=True):
            request.num_in_flight -= 1
            request.num_expected -= bool(num_yields)
        readers, blocks = self._trace(plan)
        self.kv.unpublish(blocks)
        broken = [request for request in [*plan.requests, *readers] if not request.finished]
        lost = list(dict.fromkeys(self._owner(request) for request in broken))
        self._updates += [
            Update(request.id, [], Finish.ERROR, Detail(num_cached=request.num_cached, message=message))
            for request in lost
        ]
        for request in lost:
            self._end(request)
        for request in plan.requests:
            if request.release_due and not request.num_in_flight:
                self._give_back(request)
        self.swap.invalidate({slot for _, slot in plan.swap_out}, self.requests.values())
        self._drop_finished()
        self._is_changing = False
        return self._updates

    def recover(self, error: Exception, message: str) -> list[Update]:
        """Go on after an error in one of the operations: start anew, less the request at fault.

        That is the request that was being worked on, or the newest if none was: so the queue gets shorter with every
        error.
        """
        updates, self._updates = self._updates, []
        told = {update.id for update in updates if update.finish}
        ended = {request.id for request in self._find_fault(error)} | told
        for request in [request for request in self.requests.values() if request.id in ended]:
            request.state = State.FINISHED
            self.counters.finished += 1
            if request.id not in told:
                detail = Detail(num_cached=request.num_cached, message=message)
                updates.append(Update(request.id, [], Finish.ERROR, detail))
        self.reset()
        return updates

    def reset(self) -> None:
        """Build queues and blocks anew: every request waits, and computes its tokens again. No plan is in flight."""
        self._is_changing = True
        self._in_flight.clear()
        self._groups.clear()
        self._blocked = None
        self.kv.reset()
        self.swap.reset()
        self.requests = {name: request for name, request in self.requests.items() if not request.finished}
        self.running, self._waiting = [], []
        self._num_waiting = self._waiting_tokens = 0
        for request in self.requests.values():
            request.num_preemptions += request.state in (State.RUNNING, State.LEAVING)
            request.reset()
            if request.beam is not None:
                request.beam.group.restart()
            self._enqueue(request)
        self._is_changing = False

    def _begin(self) -> None:
        """Of an operation. If the last one was interrupted, nothing but the requests can be relied on."""
        if self._is_changing:
            self.reset()
        self._is_changing = True
        self._updates = []

    def _find_fault(self, error: Exception) -> list[Request]:
        """The request that the innermost function was working on, else the newest one, if there is any."""
        found = None
        for frame, _ in walk_tb(error.__traceback__):
            request = frame.f_locals.get("request")
            if isinstance(request, Request) and request.state is not State.NEW:
                found = request
        if found is not None:
            return [self._owner(found)]
        return sorted(self.requests.values(), key=lambda each: each.rank[1])[-1:]

    def _trace(self, plan: Plan) -> tuple[list[Request], set[int]]:
        """Which requests of later plans read what a failed plan was to write, and all blocks that are wrong by that.

        A block is shared when the plan that fills it is made, so a reader is in the same plan or in one in flight. It
        comes after the writer, so one pass in order finds readers of readers too.
        """
        size = self.kv.block_size
        readers: list[Request] = []
        blocks = plan.filled_blocks | plan.computed_blocks(range(len(plan)), size)
        for later in (each for each in self._in_flight if each.step > plan.step):
            for source, target in later.copies:
                if source in blocks:
                    blocks.add(target)
            for row, request in enumerate(later.requests):
                if request in plan.requests or request.holds_any(blocks):
                    blocks |= later.computed_blocks([row], size)
                    if request not in readers and request not in plan.requests:
                        readers.append(request)
        return readers, blocks

    # ── planning ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _prompt_room(self) -> int:
        """How many tokens the step may take beside one for each running request. Answers that run keep their pace; one
        that is computed again, after a preemption or a restart, does not run yet."""
        spare = self.max_tokens_per_step - len(self.running)
        if self.pace.target_s is None:
            return spare
        behind = [len(r.tokens) + r.num_expected - r.num_planned - 1 for r in self.running]
        if not any(n == 0 and (r.num_output or r.num_expected) for r, n in zip(self.running, behind, strict=True)):
            return spare
        return self.pace.prompt_tokens(sum(behind) + self._waiting_tokens, len(self.running), spare)

    def _plan_running(self, plan: Plan, spare: int) -> bool:
        """One token for every running request, and what is left of the step to the first that can use it.

        Returns whether somebody had to make room.
        """
        add_row, growing = self._add_row, []
        draft_blocks: int | None = None
        for request in self.running:
            known = len(request.tokens) + request.num_expected
            start = request.num_planned
            if request.drafts:
                draft_blocks = self._cut_drafts(request, known, draft_blocks)
            need = known + len(request.drafts) - start
            if need <= 0:
                continue
            if request.num_in_flight and (
                request.drafts or known >= request.max_len or (request.num_expected and request.beam is not None)
            ):
                continue  # the host must know its token first; a beam's next one may not even be behind its own
            count = 1
            if need > 1:
                count = min(need, spare + 1)
                spare -= count - 1
            if start + count <= request.capacity:
                add_row(plan, request, start, count, start + count - known + 1)
            else:
                growing.append((request, count))
        return self._grow_rows(plan, growing) if growing else False

    def _cut_drafts(self, request: Request, known: int, free: int | None) -> int:
        """Keep the drafts that the request's length and the free blocks leave room for; the free blocks after that.

        Drafts take blocks that no running request needs for its tokens and for its next one. So they preempt nobody.
        A beam has none: its next token is not the likeliest one but may be any of several.
        """
        size, num_groups = self.kv.block_size, len(self.kv.windows)
        if self.kv.num_state_groups:
            request.drafts.clear()  # a state that has taken in a refused draft cannot be had back
            return 0
        if free is None:
            promised = sum(self.kv.missing(each, self.max_tokens_per_step) + num_groups for each in self.running)
            free = max(0, self.kv.pool.num_free - promised)
        num_blocks = ceil_div(known, size)
        room = min(request.max_len - known - 1, (num_blocks + free // num_groups) * size - known)
        if request.beam is not None:
            room = 0
        del request.drafts[max(0, room) :]
        return free - (ceil_div(known + len(request.drafts), size) - num_blocks) * num_groups

    def _publish_chunks(self, plan: Plan) -> None:
        """Blocks that prompts fill in this plan can be shared from now on. A single token's wait for its commit: a step
        of single tokens only may read a row's keys before another row has stored its own."""
        if self.kv.prefix_cache:
            for request, count in zip(plan.requests, plan.counts, strict=True):
                if count > 1:
                    self.kv.publish_planned(request)

    def _grow_rows(self, plan: Plan, growing: list[tuple[Request, int]]) -> bool:
        """Rows that need new blocks, in order; the last in rank make room for the first."""
        preempted = False
        for request, count in growing:
            if request.state is not State.RUNNING:
                continue
            while not self._add_grown_row(plan, request, count):
                victims = self._beams_of(self.running[-1])
                num_in_flight = sum(victim.num_in_flight - (victim in plan.requests) for victim in victims)
                if request in victims and num_in_flight:
                    return preempted  # what it waits for is in flight: its own blocks behind the window
                for victim in victims:
                    self._unplan(plan, victim)
                self._preempt(victims[0])
                preempted = True
                if num_in_flight:
                    return preempted  # its blocks come back when the plan in flight is committed
                if request in victims:
                    break
        return preempted

    def _admit(self, plan: Plan, room: int, now_s: float) -> None:
        """Let waiting requests join, strictly in order: one that does not fit yet is not overtaken.

        A request joins only a step that has room for its next tokens, so its look-up is as fresh as what it computes.
        """
        quota = self.policy.batching.quota(self._num_waiting, len(self.running), lambda: self._oldest_wait(now_s))
        if not quota:
            return
        num_rows = self.max_requests - len(self.running) - sum(each.width - len(each.beams) for each in self._groups)
        budget = min(room, self.max_tokens_per_step - plan.num_tokens)
        promised = sum(self.kv.missing(request, self.max_tokens_per_step) for request in self.running)
        promised += sum(self._folded_blocks(group.root) for group in self._groups)
        while quota > 0 and num_rows > 0 and budget > 0 and (request := self._head()) is not None:
            if request.num_rows > num_rows or not self._place(request, plan, promised):
                return
            heapq.heappop(self._waiting)
            self._leave_queue(request)
            self._fair_queue.serve(request.place)
            self.policy.batching.admit()
            request.state = State.RUNNING
            insort(self.running, request, key=_rank)
            if request.beam is not None:
                self._groups.append(request.beam.group)
            quota -= 1
            num_rows -= request.num_rows
            count = min(len(request.tokens) - request.num_planned, budget)
            added = self._add_grown_row(plan, request, count)
            assert added, "admission promised blocks that are not there"
            if count > 1:
                self.kv.publish_planned(request)
            budget -= count
            promised += self.kv.missing(request, self.max_tokens_per_step) + self._folded_blocks(request)

    def _place(self, request: Request, plan: Plan, promised: int) -> bool:
        """Give a request its first blocks: its leader's, those of a known prefix, or none; False if it does not fit.

        Who shares its leader's last block must compute in this very step, and so copy it: the leader writes to it.
        """
        headroom = 1 if self.running else 0
        available = self.kv.pool.num_free - promised - headroom - self._folded_blocks(request)
        may_fork = not request.num_output and len(self.kv.windows) <= available
        if may_fork and self.kv.fork(request):
            self.swap.drop(request)
            self._count_hit(request, Match())
            return True
        if self._is_still_blocked(request, available):
            return False
        match = self.kv.lookup(request)
        if self.kv.cost(request, match, self.max_tokens_per_step) > available:
            self._blocked = Blocked(request, match)
            return False
        if request.swapped_out is not None and request.swapped_out.num_computed > len(match.path) * self.kv.block_size:
            return self._swap_in(request, match, plan)
        self.swap.drop(request)
        self.kv.adopt(request, match, plan.copies)
        if request.encoder_tokens:
            plan.encodes.append(request)
        self._count_hit(request, match)
        return True

    def _is_still_blocked(self, request: Request, available: int) -> bool:
        """Whether the head of the queue does not fit by what its last look-up found. Nothing was added to that since.

        A look-up takes milliseconds where prompts are long, and the head of the queue is asked about at every step.
        What was found may have been evicted, by which it only costs more.
        """
        blocked = self._blocked
        if blocked is None or blocked.request is not request or self.kv.tree.has_grown(blocked.match, request.salt):
            return False
        return self.kv.cost(request, blocked.match, self.max_tokens_per_step) > available

    def _swap_in(self, request: Request, match: Match, plan: Plan) -> bool:
        """Let a request go on from what it has on the host; not in a plan that copies, whose sources may be free."""
        if plan.copies:
            return False
        self.kv.restore(request, match, plan.swap_in)
        self.swap.free(request)
        return True

    def _add_row(self, plan: Plan, request: Request, start: int, count: int, num_yields: int) -> None:
        """`num_yields` counts the positions at and behind the last known token; below 1 the row stops short of it."""
        if num_yields < 0:
            num_yields = 0
        if request.drafts:
            del request.drafts[max(0, num_yields - 1) :]
        plan.requests.append(request)
        plan.starts.append(start)
        plan.counts.append(count)
        plan.yields.append(num_yields)
        request.num_planned = start + count
        request.num_in_flight += 1
        if num_yields:
            request.num_expected += 1

    def _add_grown_row(self, plan: Plan, request: Request, count: int) -> bool:
        """A row that needs new blocks; False if there are too few."""
        start = request.num_planned
        if not self.kv.grow(request, start + count, plan.copies):
            return False
        known = len(request.tokens) + request.num_expected
        self._add_row(plan, request, start, count, start + count - known + 1)
        return True

    def _unplan(self, plan: Plan, request: Request) -> None:
        """Take a row out of a plan that nobody has seen yet."""
        if request not in plan.requests:
            return
        row = plan.requests.index(request)
        request.num_planned = plan.starts[row]
        request.num_in_flight -= 1
        request.num_expected -= bool(plan.yields[row])
        del plan.requests[row], plan.starts[row], plan.counts[row], plan.yields[row]

    # ── changes of state ──────────────────────────────────────────────────────────────────────────────────────────

    def _cut_off(self, request: Request, tokens: list[int]) -> Finish | None:
        """Why the tokens just appended end the request, if they do; what comes after the last one is taken back."""
        if tokens and not request.max_tokens:  # the prompt has been computed, which is all there is to do
            del request.tokens[request.num_prompt :], tokens[:]
            return Finish.LENGTH
        first = len(request.tokens) - len(tokens)
        for index, token in enumerate(tokens):
            length = first + index + 1
            stopped = token in request.stop_ids and length - request.num_prompt > request.params.min_tokens
            if stopped or length >= request.max_len:
                del tokens[index + 1 :], request.tokens[length:]
                return Finish.STOP if stopped else Finish.LENGTH
        return None

    def _advance(self, request: Request, end: int) -> None:
        """The cache has caught up to `end`, less the drafts that were refused: the last token has no k and v yet."""
        if request.drafts:
            request.drafts.clear()
        last = len(request.tokens) - 1
        request.num_computed = end = end if end < last else last
        if not request.num_in_flight:
            request.num_planned = end
        if end >= request.publish_at:
            self.kv.publish(request, end)
        if self.kv.has_windows:
            self.kv.trim(request)
        if request.forks and end >= request.num_prompt - 1:
            self._release_forks(request)

    # ── beam search ───────────────────────────────────────────────────────────────────────────────────────────────

    def _owner(self, request: Request) -> Request:
        """The request that was submitted."""
        return request if request.beam is None else request.beam.group.root

    def _beams_of(self, request: Request) -> list[Request]:
        """What is preempted together: the live beams of a group, or the request alone."""
        return [request] if request.beam is None else list(request.beam.group.beams)

    def _folded_blocks(self, request: Request) -> int:
        """Blocks that the folded beams of a group will need beside those of its root."""
        if request.beam is None or not (folded := request.beam.group.folded):
            return 0
        num_tokens, most = len(request.tokens), self.max_tokens_per_step
        peak = self.kv.beams_peak(num_tokens, num_tokens + len(folded[0].tokens), len(folded), most)
        return max(0, peak - self.kv.peak(num_tokens, most))

    def _land_beam(self, request: Request, end: int, candidates: Candidates | None, detail: Detail | None) -> None:
        """A beam's row has been computed up to `end`. When all beams of a group have candidates, the next are chosen.

        One that is leaving has been folded: its last token will be computed again, and sampled then.
        """
        if request.finished:
            return
        is_leaving = request.state is State.LEAVING
        if detail is not None and detail.prompt_logprobs:
            self._updates.append(Update(request.id, [], None, Detail(prompt_logprobs=detail.prompt_logprobs)))
            request.num_scored += len(detail.prompt_logprobs)
        request.drafts.clear()
        request.num_computed = end = min(end, len(request.tokens) - 1) if is_leaving else end
        if end >= request.publish_at:
            self.kv.publish(request, end)
        if self.kv.has_windows:
            self.kv.trim(request)
        if candidates is not None and not is_leaving:
            beam = beam_of(request)
            beam.candidates = candidates
            if beam.group.is_complete:
                self._choose_beams(beam.group)

    def _choose_beams(self, group: BeamGroup) -> None:
        """Replace the live beams by those that survive; with none, the search has ended."""
        if survivors := group.advance():
            self._replace_beams(group, survivors)
            return
        root, answers = group.root, group.answers
        detail = Detail(beams=answers) if answers else explain_no_token(root)
        detail.num_cached = root.num_cached
        self._updates.append(Update(root.id, [], answers[0].finish if answers else Finish.ERROR, detail))
        self._end(root)

    def _replace_beams(self, group: BeamGroup, survivors: list[Survivor]) -> None:
        """A parent goes on as its first survivor. Each other survivor is a request that shares the parent's blocks: one
        whose own beam was refused, or a new one. The root always goes on, in another's place if its beam was refused.
        """
        root, length = group.root, len(group.root.tokens)
        parents = dict.fromkeys(survivor.parent for survivor in survivors)
        refused = sorted((each for each in group.beams if each not in parents), key=lambda each: each is not root)
        for request in refused:
            self.kv.release(request)
        if root in refused and len(parents) == len(survivors):
            refused.append(survivors[0].parent)
            del parents[survivors[0].parent]
        group.beams = []
        for survivor in survivors:
            if survivor.parent in parents:
                request = survivor.parent
                del parents[request]
            else:
                request = refused.pop(0) if refused else self._fork_beam(group)
                self.kv.share(survivor.parent, request, survivor.parent.num_computed)
            group.beams.append(request)
        for request, survivor in zip(group.beams, survivors, strict=True):
            group.become(request, survivor, length)
        self._drop_beams(refused)

    def _fork_beam(self, group: BeamGroup) -> Request:
        request = group.fork()
        insort(self.running, request, key=_rank)
        return request

    def _drop_beams(self, requests: Sequence[Request]) -> None:
        """These beams are no more; their blocks come back when no plan names them."""
        for request in requests:
            request.state = State.FINISHED
            self._release_when_idle(request)
        if requests:
            self._drop_finished()

    def _details(self, plan: Plan, sampled: Sampled) -> dict[int, Detail]:
        """What a row's update carries besides its tokens. Most rows have nothing."""
        details: dict[int, Detail] = {}
        for row, logprobs in sampled.logprobs.items():
            details[row] = Detail(logprobs=logprobs)
        for row, prompt_logprobs in sampled.prompt_logprobs.items():
            request = plan.requests[row]
            fresh = prompt_logprobs[max(0, request.num_scored - plan.starts[row]) :]  # recomputed ones were reported
            details.setdefault(row, Detail()).prompt_logprobs = fresh
        return details

    def _enqueue(self, request: Request) -> None:
        request.state = State.WAITING
        heapq.heappush(self._waiting, (request.rank, request))
        self._num_waiting += 1
        self._waiting_tokens += len(request.tokens)

    def _leave_queue(self, request: Request) -> None:
        if self._blocked is not None and self._blocked.request is request:
            self._blocked = None
        self._num_waiting -= 1
        self._waiting_tokens -= len(request.tokens)

    def _head(self) -> Request | None:
        while self._waiting and self._waiting[0][1].finished:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _drop_ended_waiters(self) -> None:
        """Requests that end while they wait stay in the heap until it is mostly made of them."""
        if len(self._waiting) > 2 * self._num_waiting + 64:
            self._waiting = [entry for entry in self._waiting if not entry[1].finished]
            heapq.heapify(self._waiting)

    def _oldest_wait(self, now_s: float) -> float:
        return now_s - min(request.arrival_s for _, request in self._waiting if not request.finished)

    def _preempt(self, request: Request) -> None:
        """Send a running request back to wait, until there is room; of a group all beams, folded into the root."""
        if request.beam is not None:
            group = request.beam.group
            request = group.root
            self._groups.remove(group)
            self._drop_beams(group.fold())
        self.counters.preemptions += 1
        request.num_preemptions += 1
        request.drafts.clear()
        self.running.remove(request)
        request.state = State.LEAVING
        self._release_when_idle(request)

    def _end(self, request: Request) -> None:
        """The request's last update is out; nothing more will be heard of it."""
        was_waiting = request.state is State.WAITING
        if request.beam is not None and request.beam.group in self._groups:
            self._groups.remove(request.beam.group)
            self._drop_beams([each for each in request.beam.group.beams if each is not request])
        request.state = State.FINISHED
        if was_waiting:
            self._leave_queue(request)
            self._drop_ended_waiters()
        self.counters.finished += 1
        del self.requests[request.id]
        self._release_forks(request)
        self.swap.drop(request)
        self._release_when_idle(request)

    def _release_when_idle(self, request: Request) -> None:
        if request.num_in_flight:
            request.release_due = True
        else:
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        """No plan names the request's blocks any more. One that only leaves may keep a copy of them on the host."""
        request.release_due = False
        is_leaving = request.state is State.LEAVING
        num_computed = request.num_computed
        may_stow = is_leaving and self.kv.reaches(request, num_computed)  # a folded beam's window was further on
        if may_stow and self.swap.swap_out(request, ceil_div(num_computed, self.kv.block_size)):
            self.counters.swaps += 1
        self.kv.release(request)
        if is_leaving:
            self._enqueue(request)

    def _release_forks(self, leader: Request) -> None:
        """Those that waited for this prompt can go on: by sharing its blocks, or on their own if it has ended."""
        for fork in leader.forks:
            self._enqueue(fork)
        leader.forks.clear()

    def _drop_finished(self) -> None:
        self.running = [request for request in self.running if request.state is State.RUNNING]

    def _count_hit(self, request: Request, match: Match) -> None:
        self.counters.cached_tokens += request.num_computed
        if not request.num_preemptions:
            request.num_cached = request.num_computed
            request.miss = match.miss

    def _check(self, request: Request) -> None:
        if not request.prompt:
            raise EmptyPrompt("The prompt has no tokens; give at least one.")
        if request.id in self.requests:
            raise InvalidParams(f"A request with the id {request.id!r} is running already; choose another id.")
        check_priority(request.priority)
        if request.num_rows > self.max_requests:
            raise InvalidParams(
                f"A beam search that is {request.num_rows} wide needs as many rows in a step, and this engine computes "
                f"{self.max_requests}. Lower the width or raise max_requests.", "best_of",
            )  # fmt: skip
        if request.num_rows > 1 and self.kv.num_state_groups:
            raise InvalidParams("This model keeps a state that beams cannot share. Use sampling.", "use_beam_search")
        num_encoder = len(request.encoder_tokens)
        needed = self.kv.peak(request.max_len, self.max_tokens_per_step, num_encoder)
        if request.num_rows > 1:
            needed = self.kv.num_fixed(num_encoder) + self.kv.beams_peak(
                request.num_prompt, request.max_len, request.num_rows, self.max_tokens_per_step
            )  # fmt: skip
        if needed > self.kv.pool.num_blocks:
            num_prompt = request.num_prompt + num_encoder
            raise PromptTooLong(
                f"{num_prompt} prompt tokens and {request.max_tokens} new ones"
                f"{f' in {request.num_rows} beams' if request.num_rows > 1 else ''} need {needed} blocks of the cache, "
                f"which has {self.kv.pool.num_blocks}. Shorten the prompt, lower max_tokens"
                f"{' or the width' if request.num_rows > 1 else ''} or raise num_blocks."
            )
