"""Scheduler: decides what the next step computes, and processes what it produced.

It handles blocks and token counts, no tensors and no model. `schedule()` returns a Plan, the engine runs it, `commit()`
turns the result into Updates. Plans are committed in order, and may be committed one step late. Until its commit, the
requests of a plan keep their blocks.

An exception inside an operation leaves queues and blocks inconsistent. The next operation then starts with `reset`,
which keeps the requests and their tokens and rebuilds everything else. `recover` also ends the request at fault.
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
from quire.core.swap import Pairs, Swap, SwapCosts
from quire.errors import EmptyPrompt, InvalidParams, PromptTooLong

_sort_key = attrgetter("sort_key")
_FINISHED = State.FINISHED


@dataclass(slots=True)
class Counters:
    """Totals since the start, for metrics and tests."""

    steps: int = 0  # calls of `schedule`, also those that returned no plan
    computed_tokens: int = 0
    admitted_tokens: int = 0  # tokens of requests when they were admitted
    cached_tokens: int = 0  # of these, tokens found in the prefix tree or shared with a leader
    preemptions: int = 0
    swaps: int = 0  # preemptions that swapped the request's blocks out to the host
    finished: int = 0
    exited_tokens: int = 0  # tokens that an exit has chosen


@dataclass(frozen=True, slots=True)
class Preview:
    """The next step before it is planned."""

    num_tokens: int  # that waiting requests may use
    num_running_tokens: int
    num_reserved_blocks: int  # free ones that running requests need for their tokens and for the next


@dataclass(frozen=True, slots=True)
class Blocked:
    """The waiting request that did not fit at the last attempt, and its prefix match then."""

    request: Request
    match: Match


class Scheduler:
    """Waiting requests are in a heap, running ones in a list, both ordered by `Request.sort_key`.

    The first running request always makes progress: the last ones are preempted for it.
    """

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
        num_import_blocks: int = 0,
        costs: SwapCosts | None = None,
        pace: Pace | None = None,
    ) -> None:
        assert max_tokens_per_step >= max_requests >= 1
        self.kv = KVCache(
            num_blocks, block_size, windows, num_encoder_groups=num_encoder_groups, num_state_groups=num_state_groups,
            prefix_cache=prefix_cache,
        )  # fmt: skip
        self.swap = Swap(num_host_blocks, costs, num_import_blocks)
        self.max_tokens_per_step = max_tokens_per_step
        self.max_requests = max_requests
        self.policy = policy or Policy()
        self.pace = pace or Pace()
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.counters = Counters()
        self._waiting: list[tuple[tuple[int, int], Request]] = []
        self._num_waiting = 0  # finished requests that are still in the heap do not count
        self._waiting_tokens = 0  # tokens of the waiting requests
        self._num_arrived = 0
        self._fair_queue = FairQueue()
        self._in_flight: deque[Plan] = deque()  # plans neither committed nor failed, oldest first
        self._beam_groups: list[BeamGroup] = []  # running beam searches
        self._blocked: Blocked | None = None
        self._detached: dict[str, Request] = {}  # those that moved to another engine and whose blocks are still read
        self._updates: list[Update] = []  # results of the current operation
        self._may_exit = False  # whether a request has ever been allowed to exit early
        self._has_draft_blocks = False  # whether running requests may hold blocks that were allocated for drafts
        self._in_operation = False  # still True at the next operation if an exception interrupted this one

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, request: Request, now_s: float = 0.0) -> None:
        """Queue a request, or raise if it could never be served."""
        self._check(request)
        self._begin_operation()
        request.queue_position = self._fair_queue.assign(request.tenant, request.num_prompt)
        request.sort_key = self.policy.sort_key(request.queue_position, request.priority), self._num_arrived
        request.arrival_s = now_s
        if request.params.use_beam_search:
            request.beam = Beam(BeamGroup(request))
        self._num_arrived += 1
        self._may_exit |= request.params.early_exit is not None
        leader = request.leader
        is_led = leader is not None and self.requests.get(leader.id) is leader and not request.num_output
        if leader and is_led and leader.num_computed < leader.num_prompt - 1:
            request.state = State.HELD
            leader.forks.append(request)
        else:
            self._enqueue(request)
        self.requests[request.id] = request
        self._in_operation = False

    def abort(self, request_id: str, finish: Finish = Finish.ABORT, detail: Detail | None = None) -> Update | None:
        """End a request now. Returns None if the id is unknown or the request has already had its final update."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        self._begin_operation()
        self._leave_leader(request)
        self._finish(request)
        self._drop_finished()
        self._in_operation = False
        detail = detail or Detail()
        detail.num_cached = request.num_cached
        return Update(request.id, [], finish, detail)

    def detach(self, request_id: str) -> Request | None:
        """Remove a request that continues on another engine. It keeps its blocks until `release_detached`.

        No plan is in flight. Returns None if the id is unknown or the request has already had its final update.
        """
        assert not self._in_flight, "a plan in flight may write to the request's blocks"
        request = self.requests.get(request_id)
        if request is None:
            return None
        self._begin_operation()
        self._leave_leader(request)
        self._finish(request, keeps_blocks=True)
        self._detached[request_id] = request
        self._drop_finished()
        self._in_operation = False
        return request

    def is_detached(self, request: Request) -> bool:
        """Whether its blocks still have what it computed: a reset releases them."""
        return not self._in_operation and self._detached.get(request.id) is request

    def release_detached(self, request_id: str) -> None:
        """The other engine has the request, or does without its blocks."""
        self._begin_operation()
        if (request := self._detached.pop(request_id, None)) is not None:
            self._release_all(request)
        self._in_operation = False

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def may_admit(self) -> bool:
        """Whether the next step may admit a waiting request: there is a row for it, and it was not too large before."""
        return bool(self._num_waiting) and len(self.running) < self.max_requests and self._blocked is None

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    # ── one step ──────────────────────────────────────────────────────────────────────────────────────────────────

    def schedule(self, now_s: float = 0.0) -> Plan | None:
        """Plan the next step. Returns None when there is nothing to compute yet."""
        self._begin_operation()
        self.counters.steps += 1
        self.kv.begin_plan(self.counters.steps)
        plan = Plan(self.counters.steps)
        num_waiting = self._count_waiting()
        prompt_budget = self._prompt_budget(num_waiting)
        preempted = self._plan_running(plan, prompt_budget, num_waiting)
        self._publish_chunks(plan)
        if not preempted:
            self._admit(plan, prompt_budget + num_waiting - (plan.num_tokens - len(plan)), now_s)
        if not plan.requests:
            assert not plan.swap_in, "a request that is swapped in has a row"
            self._in_operation = False
            return None  # pending swap-outs stay pending until the next plan
        plan.swap_out.extend(self.swap.take_swap_out())
        self.counters.computed_tokens += plan.num_tokens
        self._in_flight.append(plan)
        self._in_operation = False
        return plan

    def commit(self, plan: Plan, sampled: Sampled) -> list[Update]:
        """Append a step's tokens to its requests and end those that are done. Plans are committed in order."""
        assert self._in_flight[0] is plan, "plans are committed in order"
        self._begin_operation()
        updates = self._updates
        details = self._details(plan, sampled)
        num_finished = self.counters.finished
        columns = zip(plan.requests, plan.starts, plan.counts, plan.yields, sampled.tokens, strict=True)
        for row, (request, start, count, num_yields, tokens) in enumerate(columns):
            request.num_in_flight -= 1
            if num_yields:
                request.num_expected -= 1
            if request.beam is not None:
                self._commit_beam(request, start + count, sampled.candidates.get(row), details.get(row))
            elif request.state is not _FINISHED:
                finish = None
                if row in plan.drafts:
                    request.num_drafted += len(plan.drafts[row])
                    request.num_accepted += max(0, len(tokens) - 1)
                if row in sampled.exited:
                    count = sampled.exited[row]  # the rest waits for its later layers
                    request.num_exited += 1
                    details.setdefault(row, Detail()).num_exited = 1
                    self.counters.exited_tokens += 1
                all_tokens = request.tokens
                all_tokens += tokens
                if request.constraint is not None:
                    for token in tokens:
                        request.constraint.advance(token)
                if len(all_tokens) >= request.max_len or not request.stop_ids.isdisjoint(tokens):
                    finish = self._check_stop(request, tokens)
                    if finish:
                        ended = details.setdefault(row, Detail())
                        ended.num_cached, ended.num_accepted = request.num_cached, request.num_accepted
                        ended.num_drafted = request.num_drafted
                        if ended.logprobs:
                            del ended.logprobs[len(tokens) :]
                detail = details.get(row) if details else None
                if tokens or detail:
                    updates.append(Update(request.id, tokens, finish, detail))
                    if detail and detail.prompt_logprobs:
                        request.num_scored += len(detail.prompt_logprobs)
                self._advance(request, start + count)
                if num_yields:
                    request.waits_from = request.num_computed if row in sampled.exited else None
                if finish:
                    self._finish(request)
            if request.release_due and not request.num_in_flight:
                self._release_blocks(request)
        if self.counters.finished > num_finished:
            self._drop_finished()
        self._in_flight.popleft()
        self._in_operation = False
        return updates

    def fail(self, plan: Plan, message: str) -> list[Update]:
        """End the requests of a plan that could not be run, and the requests that read blocks it was to fill.

        Requests that the plan was to swap out are recomputed. A plan that was never launched must be failed before the
        next one is made.
        """
        self._begin_operation()
        self._in_flight.remove(plan)
        for request, num_yields in zip(plan.requests, plan.yields, strict=True):
            request.num_in_flight -= 1
            request.num_expected -= bool(num_yields)
        readers, blocks = self._find_readers(plan)
        self.kv.unpublish(blocks)
        broken = [request for request in [*plan.requests, *readers] if not request.finished]
        failed = list(dict.fromkeys(self._root_of(request) for request in broken))
        self._updates += [
            Update(request.id, [], Finish.ERROR, Detail(num_cached=request.num_cached, message=message))
            for request in failed
        ]
        for request in failed:
            self._finish(request)
        for request in plan.requests:
            if request.release_due and not request.num_in_flight:
                self._release_blocks(request)
        self.swap.invalidate({host_block for _, host_block in plan.swap_out}, self.requests.values())
        self._drop_finished()
        self._in_operation = False
        return self._updates

    def recover(self, error: Exception, message: str) -> list[Update]:
        """Reset after an exception in an operation, and end the request at fault.

        That is the request being processed, or the newest one if there was none. So every error ends a request, and
        errors cannot repeat for ever.
        """
        updates, self._updates = self._updates, []
        reported = {update.id for update in updates if update.finish}
        ended = {request.id for request in self._find_fault(error)} | reported
        for request in [request for request in self.requests.values() if request.id in ended]:
            request.state = State.FINISHED
            self.counters.finished += 1
            if request.id not in reported:
                detail = Detail(num_cached=request.num_cached, message=message)
                updates.append(Update(request.id, [], Finish.ERROR, detail))
        self.reset()
        return updates

    def reset(self) -> None:
        """Rebuild queues and blocks. Every request waits again and recomputes its tokens. No plan is in flight."""
        self._in_operation = True
        self._in_flight.clear()
        self._beam_groups.clear()
        self._detached.clear()
        self._blocked = None
        self.kv.reset()
        self.swap.reset()
        self.requests = {name: request for name, request in self.requests.items() if not request.finished}
        self.running, self._waiting = [], []
        self._num_waiting = self._waiting_tokens = 0
        for request in self.requests.values():
            request.num_preemptions += request.state in (State.RUNNING, State.PREEMPTED)
            request.reset()
            if request.beam is not None:
                request.beam.group.restart()
            self._enqueue(request)
        self._in_operation = False

    def _begin_operation(self) -> None:
        """Called first by every operation. Resets if an exception interrupted the last one."""
        if self._in_operation:
            self.reset()
        self._in_operation = True
        self._updates = []

    def _find_fault(self, error: Exception) -> list[Request]:
        """The request being processed: the innermost local variable named `request`. Otherwise the newest, if any."""
        found = None
        for frame, _ in walk_tb(error.__traceback__):
            request = frame.f_locals.get("request")
            if isinstance(request, Request) and request.state is not State.NEW:
                found = request
        if found is not None:
            return [self._root_of(found)]
        return sorted(self.requests.values(), key=lambda each: each.sort_key[1])[-1:]

    def _find_readers(self, plan: Plan) -> tuple[list[Request], set[int]]:
        """The requests of later plans that read blocks of a failed plan, and all blocks with invalid contents.

        A block can be shared as soon as the plan that fills it is made. So its readers are in the same plan or in a
        later one in flight, and one pass over the plans in order also finds the readers of readers.
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

    def reserve(self, request: Request, count: int) -> int:
        """Allocate blocks for the request's last token and up to `count` drafts, before they are planned.

        Returns for how many tokens there are blocks. As for drafts that are planned, only blocks are used that nobody
        else needs.
        """
        return self.reserve_all([(request, count)])[0]

    def reserve_all(self, wanted: Sequence[tuple[Request, int]]) -> list[int]:
        """`reserve` for several requests: the blocks that nobody needs are counted once."""
        size, num_groups, found = self.kv.block_size, len(self.kv.windows), list[int]()
        spare: int | None = None
        for request, count in wanted:
            start = request.num_planned
            if not self.kv.has_writable(request):
                found.append(0)  # the block is copied by the plan that writes to it
                continue
            if start + 1 + count > request.capacity:
                spare, num_free = self._count_spare_blocks() if spare is None else spare, self.kv.pool.num_free
                free = (spare + num_groups) // num_groups  # one is for this request's own last token
                end = min(start + 1 + count, (ceil_div(request.capacity, size) + free) * size)
                if end > request.capacity:
                    missing = self.kv.num_missing_blocks(request, self.max_tokens_per_step)  # not among the spare ones
                    self._has_draft_blocks |= self.kv.grow(request, end, [])
                    missing -= self.kv.num_missing_blocks(request, self.max_tokens_per_step)
                    spare = max(0, spare - (num_free - self.kv.pool.num_free - missing))
            found.append(max(0, min(1 + count, request.capacity - start)))
        return found

    def _give_back_draft_blocks(self) -> bool:
        """Release the blocks that were allocated for drafts and hold none, since others need them. Returns whether
        there were some. A request keeps those for its next token."""
        if not self._has_draft_blocks:
            return False
        self._has_draft_blocks = has_released = False
        for each in self.running:
            if each.drafts is not None or each.num_drafts_in_flight:
                self._has_draft_blocks = True
                continue
            end = max(each.num_planned, len(each.tokens) + each.num_expected)
            if each.capacity > end:
                has_released |= self.kv.give_back(each, end)
        return has_released

    def count_draft_blocks(self) -> int:
        """Blocks that `_give_back_draft_blocks` would release."""
        if not self._has_draft_blocks:
            return 0
        idle = [each for each in self.running if each.drafts is None and not each.num_drafts_in_flight]
        ends = [ceil_div(max(r.num_planned, len(r.tokens) + r.num_expected), self.kv.block_size) for r in idle]
        tables = [table[end:] for request, end in zip(idle, ends, strict=True) for table in request.tables]
        return sum(block is not None for table in tables for block in table)

    def _count_spare_blocks(self) -> int:
        """Free blocks that no running request needs for its tokens and its next one."""
        num_groups = len(self.kv.windows)
        needed = (self.kv.num_missing_blocks(each, self.max_tokens_per_step) + num_groups for each in self.running)
        return max(0, self.kv.pool.num_free - sum(needed))

    # ── planning ──────────────────────────────────────────────────────────────────────────────────────────────────

    def preview(self) -> Preview:
        """What the next step has for waiting requests, as `_plan_running` divides it. Drafts are not known before."""
        num_waiting = self._count_waiting()
        prompt_budget = self._prompt_budget(num_waiting)
        budget, waiting_budget, num_rows, num_tokens, num_blocks = prompt_budget, num_waiting, 0, 0, 0
        for request in self.running:
            known = len(request.tokens) + request.num_expected
            num_left, count = known - request.num_planned, 1
            num_missing = self.kv.num_missing_blocks(request, self.max_tokens_per_step)
            is_last = known >= request.max_len or (request.num_expected and request.beam is not None)
            if request.num_drafts_in_flight or num_left <= 0 or (request.num_in_flight and is_last):
                num_blocks += num_missing
                continue
            if num_left > 1 and self._may_exit and request.num_waiting:
                count = min(num_left, waiting_budget + 1)
                waiting_budget -= count - 1
            elif num_left > 1:
                count = min(num_left, budget + 1)
                budget -= count - 1
            num_rows, num_tokens = num_rows + 1, num_tokens + count
            end = request.num_planned + count
            growth = self.kv.num_blocks_to_grow(request, end)
            has_all = ceil_div(end, self.kv.block_size) * self.kv.block_size >= len(request.tokens)
            num_blocks += growth if has_all else max(num_missing, growth)
        left = prompt_budget + num_waiting - (num_tokens - num_rows)
        num_blocks += sum(self._folded_blocks(group.root) for group in self._beam_groups)
        return Preview(max(0, min(left, self.max_tokens_per_step - num_tokens)), num_tokens, num_blocks)

    def _count_waiting(self) -> int:
        """Tokens of the step for those that exited early, as far as there is room beside one for each request."""
        if not self._may_exit:
            return 0
        return min(sum(request.num_waiting for request in self.running), self.max_tokens_per_step - len(self.running))

    def _prompt_budget(self, num_waiting: int) -> int:
        """The most tokens of the step beside one for each running request, and beside those that exited early.

        The latency target limits it only while a request is decoding. A request that recomputes its tokens, after a
        preemption or a restart, is not decoding.
        """
        max_tokens = self.max_tokens_per_step - len(self.running) - num_waiting
        if self.pace.target_s is None:
            return max_tokens
        backlogs = [len(r.tokens) + r.num_expected - r.num_planned - 1 - r.num_waiting for r in self.running]
        if not any(n == 0 and (r.num_output or r.num_expected) for r, n in zip(self.running, backlogs, strict=True)):
            return max_tokens
        return self.pace.prompt_tokens(sum(backlogs) + self._waiting_tokens, len(self.running), max_tokens)

    def _plan_running(self, plan: Plan, budget: int, waiting_budget: int) -> bool:
        """Add rows for the running requests: one token each, and more as long as `budget` lasts. Drafts come last.
        Tokens that exited early have a budget of their own.

        Returns whether a request was preempted.
        """
        add_row, growing, drafting = self._add_row, [], []
        draft_blocks: int | None = None
        for request in self.running:
            num_tokens = len(request.tokens) + request.num_expected
            start = request.num_planned
            if request.num_drafts_in_flight:
                continue  # its length is not known
            if request.drafts is not None:
                draft_blocks = self._truncate_drafts(request, num_tokens, draft_blocks)
                if request.drafts is not None:
                    drafting.append(request)
                    continue
            num_left = num_tokens - start
            if num_left <= 0:
                continue
            if request.num_in_flight and (
                num_tokens >= request.max_len or (request.num_expected and request.beam is not None)
            ):
                continue  # its token in flight comes first: it may be the last, a beam may be dropped
            count = 1
            if num_left > 1 and self._may_exit and request.num_waiting:
                count = min(num_left, waiting_budget + 1)
                waiting_budget -= count - 1
            elif num_left > 1:
                count = min(num_left, budget + 1)
                budget -= count - 1
            if start + count <= request.capacity:
                add_row(plan, request, start, count, start + count - num_tokens + 1)
            else:
                growing.append((request, count))
        for request in drafting:
            assert request.drafts is not None
            request.drafts.truncate(budget)
            start, count = request.num_planned, 1 + len(request.drafts)
            budget -= count - 1
            if start + count <= request.capacity:
                add_row(plan, request, start, count, count)
            else:
                growing.append((request, count))
        return self._grow_rows(plan, growing) if growing else False

    def _truncate_drafts(self, request: Request, num_tokens: int, num_free: int | None) -> int | None:
        """Drop drafts beyond `max_len` or beyond the free blocks. Returns the free blocks left for others, if counted.

        Drafts use only blocks that no running request needs for its tokens and its next one, so they never cause a
        preemption. A request with several tokens left has none: it is computing its prompt. With a token in flight,
        drafts are outdated. A beam continues with any of several candidates, and a state cannot be rolled back.
        """
        assert request.drafts is not None
        size, num_groups = self.kv.block_size, len(self.kv.windows)
        is_next = request.num_planned == num_tokens - 1 and not request.num_in_flight
        if not is_next or request.beam is not None or self.kv.num_state_groups:
            request.drafts = None
            return num_free
        if num_free is None:
            num_free = self._count_spare_blocks()
        num_blocks = ceil_div(num_tokens, size)
        max_drafts = min(request.max_len - num_tokens - 1, (num_blocks + num_free // num_groups) * size - num_tokens)
        request.drafts.truncate(max(0, max_drafts))
        if not len(request.drafts):
            request.drafts = None
            return num_free
        return num_free - (ceil_div(num_tokens + len(request.drafts), size) - num_blocks) * num_groups

    def _publish_chunks(self, plan: Plan) -> None:
        """Publish the blocks that rows of several tokens fill in this plan.

        A row of one token publishes at commit: a step that has only such rows may read keys before all are stored.
        """
        if self.kv.prefix_cache:
            for request, count in zip(plan.requests, plan.counts, strict=True):
                if count > 1 and request.params.early_exit is None:  # else they may wait for their later layers
                    self.kv.publish_planned(request)

    def _grow_rows(self, plan: Plan, growing: list[tuple[Request, int]]) -> bool:
        """Add the rows that need new blocks, in order. While blocks are short, those of drafts that were not right are
        released, and then the last running request is preempted.

        Returns whether a request was preempted.
        """
        preempted = False
        for request, count in growing:
            if request.state is not State.RUNNING:
                continue
            while not self._add_grown_row(plan, request, count):
                if self._give_back_draft_blocks():
                    continue
                victims = self._beams_of(self.running[-1])
                num_in_flight = sum(victim.num_in_flight - (victim in plan.requests) for victim in victims)
                if request in victims and num_in_flight:
                    return preempted  # its plan in flight may free blocks behind its window
                for victim in victims:
                    self._remove_row(plan, victim)
                self._preempt(victims[0], plan.copies)
                preempted = True
                if num_in_flight:
                    return preempted  # its blocks are released when the plan in flight is committed
                if request in victims:
                    break
        return preempted

    def _admit(self, plan: Plan, prompt_budget: int, now_s: float) -> None:
        """Admit waiting requests strictly in order: a request that does not fit blocks those after it.

        A request is admitted only to a step that computes some of its tokens. So its prefix look-up finds every block
        published before it computes.
        """
        quota = self.policy.batching.quota(self._num_waiting, len(self.running), lambda: self.oldest_wait_s(now_s))
        if not quota:
            return
        num_rows = self.count_free_rows()
        budget = min(prompt_budget, self.max_tokens_per_step - plan.num_tokens)
        num_reserved = sum(self.kv.num_missing_blocks(request, self.max_tokens_per_step) for request in self.running)
        num_reserved += sum(self._folded_blocks(group.root) for group in self._beam_groups)
        while quota > 0 and num_rows > 0 and budget > 0 and (request := self._peek_waiting()) is not None:
            if request.num_rows > num_rows:
                return
            if not self._allocate(request, plan, num_reserved):
                if self._give_back_draft_blocks():
                    continue
                return
            heapq.heappop(self._waiting)
            self._leave_queue(request)
            self._fair_queue.mark_served(request.queue_position)
            self.policy.batching.admit()
            request.state = State.RUNNING
            insort(self.running, request, key=_sort_key)
            if request.beam is not None:
                self._beam_groups.append(request.beam.group)
            quota -= 1
            num_rows -= request.num_rows
            count = min(len(request.tokens) - request.num_planned, budget)
            added = self._add_grown_row(plan, request, count)
            assert added, "admission counted blocks that are not free"
            if count > 1 and request.params.early_exit is None:
                self.kv.publish_planned(request)
            budget -= count
            num_reserved += self.kv.num_missing_blocks(request, self.max_tokens_per_step) + self._folded_blocks(request)

    def _allocate(self, request: Request, plan: Plan, num_reserved: int) -> bool:
        """Give a waiting request its first blocks. Returns False if it does not fit.

        They come from its leader, from the host or from the prefix tree. A fork shares its leader's last block, to
        which the leader writes. It must have a row in this step, because that row copies the block.
        """
        available = self.count_available_blocks(request, num_reserved)
        may_fork = not request.num_output and len(self.kv.windows) <= available
        if may_fork and self.kv.fork(request):
            self.swap.drop(request)
            self._count_hit(request, Match())
            return True
        if self._is_still_blocked(request, available):
            return False
        match = self.kv.lookup(request)
        if self.kv.num_blocks_to_admit(request, match, self.max_tokens_per_step) > available:
            self._blocked = Blocked(request, match)
            return False
        if request.swapped_out is not None and request.swapped_out.num_computed > len(match.path) * self.kv.block_size:
            return self._swap_in(request, match, plan)
        self.swap.drop(request)
        self.kv.attach_prefix(request, match, plan.copies)
        if request.encoder_tokens:
            plan.encodes.append(request)
        self._count_hit(request, match)
        return True

    def count_free_rows(self) -> int:
        """Rows of a step for waiting requests. Running searches keep those of beams that may still be forked."""
        num_beams = sum(each.width - len(each.beams) for each in self._beam_groups)
        return self.max_requests - len(self.running) - num_beams

    def count_available_blocks(self, request: Request, num_reserved: int) -> int:
        """Free blocks that a waiting request may use. One stays free while others run."""
        headroom = 1 if self.running else 0
        return self.kv.pool.num_free - num_reserved - headroom - self._folded_blocks(request)

    def _is_still_blocked(self, request: Request, available: int) -> bool:
        """Whether the first waiting request still does not fit, judged by its last match if that has not grown.

        This saves a look-up in every step: one takes milliseconds for a long prompt. Evictions since then only
        raise the number of blocks needed, so the result holds.
        """
        blocked = self._blocked
        if blocked is None or blocked.request is not request or self.kv.tree.has_grown(blocked.match, request.salt):
            return False
        return self.kv.num_blocks_to_admit(request, blocked.match, self.max_tokens_per_step) > available

    def _swap_in(self, request: Request, match: Match, plan: Plan) -> bool:
        """Resume a request from its host blocks. Returns False if the plan has copies, whose sources may be free.

        They are published at once, because they are filled before the plan runs. Samples of one prompt that come back
        together share them.
        """
        if plan.copies:
            return False
        self.kv.swap_in(request, match, plan.swap_in)
        self.swap.free(request)
        if self.kv.prefix_cache and request.params.early_exit is None:
            self.kv.publish_planned(request)
        return True

    def _add_row(self, plan: Plan, request: Request, start: int, count: int, num_yields: int) -> None:
        """`num_yields` counts the row's positions from the request's last token on; it is below 1 if there are none."""
        if num_yields < 0:
            num_yields = 0
        if request.drafts is not None:
            verified, request.drafts = request.drafts, None
            if len(verified):
                self._has_draft_blocks = True
                plan.drafts[len(plan.requests)] = verified
                request.num_drafts_in_flight = len(verified)
        plan.requests.append(request)
        plan.starts.append(start)
        plan.counts.append(count)
        plan.yields.append(num_yields)
        request.num_planned = start + count
        request.num_in_flight += 1
        if num_yields:
            request.num_expected += 1

    def _add_grown_row(self, plan: Plan, request: Request, count: int) -> bool:
        """Allocate blocks and add a row. Returns False if too few blocks are free."""
        start = request.num_planned
        if not self.kv.grow(request, start + count, plan.copies):
            return False
        num_tokens = len(request.tokens) + request.num_expected
        self._add_row(plan, request, start, count, start + count - num_tokens + 1)
        return True

    def _remove_row(self, plan: Plan, request: Request) -> None:
        """Remove a request's row, if it has one, from the plan being made."""
        if request not in plan.requests:
            return
        row = plan.requests.index(request)
        request.num_planned = plan.starts[row]
        request.num_in_flight -= 1
        request.num_expected -= bool(plan.yields[row])
        request.num_drafts_in_flight = 0
        del plan.requests[row], plan.starts[row], plan.counts[row], plan.yields[row]
        moved = {other - (other > row): drafts for other, drafts in plan.drafts.items() if other != row}
        plan.drafts.clear()
        plan.drafts.update(moved)

    # ── commit ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _details(self, plan: Plan, sampled: Sampled) -> dict[int, Detail]:
        """What updates carry besides tokens, by row. Most rows have no entry."""
        details: dict[int, Detail] = {}
        for row, logprobs in sampled.logprobs.items():
            details[row] = Detail(logprobs=logprobs)
        for row, prompt_logprobs in sampled.prompt_logprobs.items():
            request = plan.requests[row]
            fresh = prompt_logprobs[max(0, request.num_scored - plan.starts[row]) :]  # recomputed ones were reported
            details.setdefault(row, Detail()).prompt_logprobs = fresh
        return details

    def _check_stop(self, request: Request, tokens: list[int]) -> Finish | None:
        """Why the tokens just appended end the request, or None. Tokens after the one that ends it are removed."""
        if tokens and not request.max_tokens:  # only the prompt is computed
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
        """Set `num_computed` to `end`, less the rejected drafts. The newest token has no k and v yet."""
        request.num_drafts_in_flight = 0
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

    def _root_of(self, request: Request) -> Request:
        """The request that was submitted."""
        return request if request.beam is None else request.beam.group.root

    def _beams_of(self, request: Request) -> list[Request]:
        """The requests that are preempted together: the live beams of a group, or the request alone."""
        return [request] if request.beam is None else list(request.beam.group.beams)

    def _folded_blocks(self, request: Request) -> int:
        """Blocks that the folded beams of a group will need in addition to those of its root."""
        if request.beam is None or not (folded := request.beam.group.folded):
            return 0
        num_tokens, most = len(request.tokens), self.max_tokens_per_step
        peak = self.kv.beams_peak(num_tokens, num_tokens + len(folded[0].tokens), len(folded), most)
        return max(0, peak - self.kv.peak(num_tokens, most))

    def _commit_beam(self, request: Request, end: int, candidates: Candidates | None, detail: Detail | None) -> None:
        """Commit a beam's row, computed up to `end`. When all beams of a group have candidates, the next are chosen.

        A preempted beam has been folded into its root. Its last token is recomputed and sampled later.
        """
        if request.finished:
            return
        is_preempted = request.state is State.PREEMPTED
        if detail is not None and detail.prompt_logprobs:
            self._updates.append(Update(request.id, [], None, Detail(prompt_logprobs=detail.prompt_logprobs)))
            request.num_scored += len(detail.prompt_logprobs)
        request.num_computed = end = min(end, len(request.tokens) - 1) if is_preempted else end
        if end >= request.publish_at:
            self.kv.publish(request, end)
        if self.kv.has_windows:
            self.kv.trim(request)
        if candidates is not None and not is_preempted:
            beam = beam_of(request)
            beam.candidates = candidates
            if beam.group.is_complete:
                self._choose_beams(beam.group)

    def _choose_beams(self, group: BeamGroup) -> None:
        """Replace the live beams by the survivors. Without survivors the search has ended."""
        if survivors := group.advance():
            self._replace_beams(group, survivors)
            return
        root, answers = group.root, group.answers
        detail = Detail(beams=answers) if answers else explain_no_token(root)
        detail.num_cached = root.num_cached
        self._updates.append(Update(root.id, [], answers[0].finish if answers else Finish.ERROR, detail))
        self._finish(root)

    def _replace_beams(self, group: BeamGroup, survivors: list[Survivor]) -> None:
        """Each parent's request becomes its first survivor. Any other survivor reuses the request of a dropped beam, or
        gets a new request, and shares its parent's blocks. The root's request always stays in use: if its beam is
        dropped, it takes over another survivor.
        """
        root, length = group.root, len(group.root.tokens)
        parents = dict.fromkeys(survivor.parent for survivor in survivors)
        dropped = sorted((each for each in group.beams if each not in parents), key=lambda each: each is not root)
        for request in dropped:
            self.kv.release(request)
        if root in dropped and len(parents) == len(survivors):
            dropped.append(survivors[0].parent)
            del parents[survivors[0].parent]
        group.beams = []
        for survivor in survivors:
            if survivor.parent in parents:
                request = survivor.parent
                del parents[request]
            else:
                request = dropped.pop(0) if dropped else self._fork_beam(group)
                self.kv.share_blocks(survivor.parent, request, survivor.parent.num_computed)
            group.beams.append(request)
        for request, survivor in zip(group.beams, survivors, strict=True):
            group.assign(request, survivor, length)
        self._drop_beams(dropped)

    def _fork_beam(self, group: BeamGroup) -> Request:
        request = group.fork()
        insort(self.running, request, key=_sort_key)
        return request

    def _drop_beams(self, requests: Sequence[Request]) -> None:
        """Remove beams from the search. Their blocks are released when no plan in flight uses them."""
        for request in requests:
            request.state = State.FINISHED
            self._release_when_idle(request)
        if requests:
            self._drop_finished()

    # ── queues and blocks ─────────────────────────────────────────────────────────────────────────────────────────

    def _enqueue(self, request: Request) -> None:
        request.state = State.WAITING
        heapq.heappush(self._waiting, (request.sort_key, request))
        self._num_waiting += 1
        self._waiting_tokens += len(request.tokens)

    def _leave_queue(self, request: Request) -> None:
        if self._blocked is not None and self._blocked.request is request:
            self._blocked = None
        self._num_waiting -= 1
        self._waiting_tokens -= len(request.tokens)

    def _peek_waiting(self) -> Request | None:
        while self._waiting and self._waiting[0][1].finished:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def waiting_requests(self, limit: int) -> list[Request]:
        """The first waiting requests, in order."""
        live = (entry for entry in self._waiting if not entry[1].finished)
        return [request for _, request in heapq.nsmallest(limit, live)]

    def unqueued_requests(self) -> list[Request]:
        """Requests that are neither running nor waiting: held for a leader, or preempted with blocks in flight."""
        num_running = sum(request.beam is None or request.beam.group.root is request for request in self.running)
        if len(self.requests) == self._num_waiting + num_running:
            return []
        return [request for request in self.requests.values() if request.state in (State.HELD, State.PREEMPTED)]

    def _compact_waiting(self) -> None:
        """Remove finished requests from the heap once they are most of it."""
        if len(self._waiting) > 2 * self._num_waiting + 64:
            self._waiting = [entry for entry in self._waiting if not entry[1].finished]
            heapq.heapify(self._waiting)

    def oldest_wait_s(self, now_s: float) -> float:
        return now_s - min(request.arrival_s for _, request in self._waiting if not request.finished)

    def _preempt(self, request: Request, copies: Pairs | None = None) -> None:
        """Move a running request back to the waiting ones. A beam group is preempted whole, folded into its root.

        It has no row in the plan being made, but some of that plan's copies may be for it. Copies to blocks that are
        released are dropped.
        """
        copies = [] if copies is None else copies
        if request.beam is not None:
            group = request.beam.group
            request = group.root
            self._beam_groups.remove(group)
            self._drop_beams(group.fold())
        self.counters.preemptions += 1
        request.num_preemptions += 1
        request.drafts = None
        self.running.remove(request)
        request.state = State.PREEMPTED
        self._release_when_idle(request, copies)
        copies[:] = [(source, target) for source, target in copies if self.kv.pool.refs[target]]

    def _finish(self, request: Request, *, keeps_blocks: bool = False) -> None:
        """End a request. Its final update has been made, or the caller makes it."""
        was_waiting = request.state is State.WAITING
        if request.beam is not None and request.beam.group in self._beam_groups:
            self._beam_groups.remove(request.beam.group)
            self._drop_beams([each for each in request.beam.group.beams if each is not request])
        request.state = State.FINISHED
        if was_waiting:
            self._leave_queue(request)
            self._compact_waiting()
        self.counters.finished += 1
        del self.requests[request.id]
        self._release_forks(request)
        if not keeps_blocks:
            self._release_all(request)

    def _release_all(self, request: Request) -> None:
        """Release the blocks of a request that has ended, here and on the host."""
        self.swap.drop(request)
        self._release_when_idle(request)

    def _leave_leader(self, request: Request) -> None:
        """A fork that is held for its leader is so no longer."""
        if request.state is State.HELD and request.leader is not None:
            request.leader.forks.remove(request)

    def _release_when_idle(self, request: Request, copies: Sequence[tuple[int, int]] = ()) -> None:
        if request.num_in_flight:
            request.release_due = True
        else:
            self._release_blocks(request, copies)

    def _release_blocks(self, request: Request, copies: Sequence[tuple[int, int]] = ()) -> None:
        """Release a request's blocks, which no plan in flight uses. A preempted request may be swapped out first.

        `copies` are those of the plan being made.
        """
        request.release_due = False
        request.waits_from = None
        is_preempted = request.state is State.PREEMPTED
        num_computed = request.num_computed
        # The root of folded beams may be shorter than it was, and its window's blocks already released.
        can_swap = is_preempted and self.kv.holds_context(request, num_computed)
        if can_swap and self.swap.swap_out(request, ceil_div(num_computed, self.kv.block_size), copies):
            self.counters.swaps += 1
        self.kv.release(request)
        if is_preempted:
            self._enqueue(request)

    def _release_forks(self, leader: Request) -> None:
        """Queue the forks held for this leader. They share its blocks, or compute the prompt if it has ended."""
        for fork in leader.forks:
            self._enqueue(fork)
        leader.forks.clear()

    def _drop_finished(self) -> None:
        self.running = [request for request in self.running if request.state is State.RUNNING]

    def _count_hit(self, request: Request, match: Match) -> None:
        self.counters.admitted_tokens += len(request.tokens)
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
                f"A beam search of width {request.num_rows} needs {request.num_rows} rows in a step, and max_requests "
                f"is {self.max_requests}. Lower the width or raise max_requests.", "best_of",
            )  # fmt: skip
        if request.num_rows > 1 and self.kv.num_state_groups:
            raise InvalidParams(
                "This model has a recurrent state, which beams cannot share. Use sampling.", "use_beam_search"
            )
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
