"""The core under random traffic: arrivals, aborts, priorities, forks, drafts, beam searches, tiny pools, windows, one
or two plans in flight, tokens that exit early, groups that an encoder fills once, states of constant size, plans that
fail, prefixes shared while they are computed, preempted requests computed again or kept on the host. After every step
the invariants hold, and every answer is the one the request would get alone."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import pytest

from quire.core.drafts import Drafts
from quire.core.pace import Pace
from quire.core.params import SamplingParams
from quire.core.plan import Plan, Sampled, Update
from quire.core.policy import Continuous, Dynamic, Policy, Static, WaitingRatio
from quire.core.request import Finish, Request
from quire.core.scheduler import Scheduler
from quire.core.swap import SwapCosts
from quire.errors import InvalidParams, PromptTooLong
from tests.core.fake_runner import VOCABULARY, FakeRunner, Witness, next_logprobs, next_token
from tests.core.invariants import check

pytestmark = pytest.mark.core

NUM_WORLDS = 340
STEPS_PER_WORLD = 300  # 102,000 steps in all
END = 0  # the token that ends a request


@dataclass
class World:
    """A random configuration and everything that happened in it."""

    random: random.Random

    def __post_init__(self) -> None:
        rng = self.random
        self.block_size = rng.choice([1, 2, 3, 4, 4, 8, 8])
        self.windows = rng.choice([(None,), (None,), (None,), (5,), (None, 4), (3, None, 9), (1,)])
        self.num_encoder_groups = rng.choice([0, 0, 0, 1, 2])
        self.num_state_groups = rng.choice([0, 0, 0, 0, 1, 2])
        self.num_blocks = -(-rng.randint(20, 100) // self.block_size) * (len(self.windows) + self.num_encoder_groups)
        self.num_blocks += 4 * self.num_state_groups
        self.depth = rng.choice([1, 1, 2])
        self.share_of_searches = 0.0 if self.num_state_groups else rng.choice([0.0, 0.0, 0.2, 0.8])
        max_requests = rng.randint(1, 8)
        spare = rng.choice([rng.randint(0, 20), rng.randint(20, 120)])
        self.scheduler = Scheduler(
            self.num_blocks,
            self.block_size,
            max_requests + spare,
            max_requests,
            Policy(self._batching(), rng.choice(["fcfs", "priority"]), priority_positions=rng.choice([1, 5, 50])),
            windows=self.windows,
            num_encoder_groups=self.num_encoder_groups,
            num_state_groups=self.num_state_groups,
            prefix_cache=rng.random() < 0.8,
            num_host_blocks=rng.choice([0, rng.randint(1, 20), 1000]),
            costs=SwapCosts(rng.choice([None, 0.0, 1.0, 1.0]), rng.choice([None, 0.3, 1.0, 1.0])),
        )
        if rng.random() < 0.4:
            self.scheduler.pace = Pace(
                1.0, rng.choice([1, 1, 8]), rng.choice([None, 0.2, 2.0]), rng.choice([None, 0.01, 0.2, 3.0])
            )
        self.runner = FakeRunner(self.num_blocks, self.block_size, self.windows, self.scheduler.kv)
        self.in_flight: deque[tuple[Plan, Sampled, bool]] = deque()  # and whether it fails
        self.context: dict[str, list[int]] = {}
        self.delivered: dict[str, list[int]] = {}
        self.final: dict[str, Update] = {}
        self.everyone: dict[str, Request] = {}
        self.now_s = 0.0
        self.num_copies = self.num_searches = 0

    def _batching(self):
        rng = self.random
        size = rng.randint(1, 6)
        dynamic, ratio = Dynamic(size, rng.uniform(0, 5)), WaitingRatio(rng.uniform(0, 2), rng.randint(0, 9))
        return rng.choice([Continuous(), Continuous(), Continuous(), Static(size), dynamic, ratio])

    def arrive(self) -> None:
        rng = self.random
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))]
        if self.everyone and rng.random() < 0.6:  # begin like somebody before
            other = rng.choice(list(self.everyone.values())).tokens
            prompt = other[: rng.randint(1, len(other))] + prompt[: rng.randint(0, 5)]
        encoder_tokens: list[int] = []
        if self.num_encoder_groups:  # few that differ, so that prompts begin alike after the same and after others
            encoder_tokens = [rng.randrange(2)] * rng.choice([0, 1, 7, 20])
        early = 0.4 if self.depth == 1 and not self.num_state_groups else 0.0
        leader, salt, priority = None, rng.choice([b"", b"", b"tenant"]), rng.randint(-2, 2)
        if rng.random() < self.share_of_searches:
            self._submit(self.search(prompt, salt, priority))
            return
        are_samples = rng.random() < 0.5  # of one request; otherwise they only begin alike
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            request = Request(
                f"r{len(self.everyone)}",
                prompt if are_samples else prompt + [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 3))],
                SamplingParams(
                    min_tokens=rng.choice([0, 0, 2]), max_tokens=None, early_exit=0.5 if rng.random() < early else None
                ),
                end_token_ids=frozenset([END]),
                seed=rng.randrange(3),
                priority=priority,
                salt=salt,
                max_tokens=rng.choice([0, rng.randint(2, 60), rng.randint(2, 60), rng.randint(2, 60)]),
                leader=leader,
                encoder_tokens=encoder_tokens,
            )
            leader = leader or (request if are_samples else None)
            self._submit(request)

    def search(self, prompt: list[int], salt: bytes, priority: int) -> Request:
        """A beam search."""
        rng = self.random
        params = SamplingParams(
            use_beam_search=True,
            n=rng.choice([1, 2, 2, 3, 4, 6]),
            temperature=0.0,
            max_tokens=None,
            length_penalty=rng.choice([0.0, 1.0, 2.0]),
            early_stopping=rng.choice([False, True, "never"]),
        )
        return Request(
            f"r{len(self.everyone)}",
            prompt,
            params,
            end_token_ids=frozenset([END, 1, 2]),
            seed=rng.randrange(3),
            priority=priority,
            salt=salt,
            max_tokens=rng.randint(1, 25),
            constraint=Witness(),
        )

    def _submit(self, request: Request) -> None:
        kv, most = self.scheduler.kv, self.scheduler.max_tokens_per_step
        try:
            self.scheduler.add(request, self.now_s)
        except PromptTooLong:
            needed = kv.beams_peak(request.num_prompt, request.max_len, request.num_rows, most)
            if request.num_rows == 1:
                needed = kv.peak(request.max_len, most, len(request.encoder_tokens))
            assert needed > self.num_blocks
            return
        except InvalidParams:
            assert request.num_rows > self.scheduler.max_requests
            return
        self.everyone[request.id] = request
        self.context[request.id] = list(request.prompt)
        self.delivered[request.id] = []

    def abort(self) -> None:
        live = list(self.scheduler.requests)
        if live:
            update = self.scheduler.abort(self.random.choice(live))
            assert update is not None
            self.take([update])

    def draft(self) -> None:
        """A proposer that is right half of the time."""
        for request in self.scheduler.running:
            if not request.num_in_flight and request.params.early_exit is None and self.random.random() < 0.3:
                tokens = list(request.tokens)
                for _ in range(self.random.randint(0, 4)):
                    guess = (
                        next_token([*request.encoder_tokens, *tokens], request.seed)
                        if self.random.random() < 0.7
                        else 1
                    )
                    tokens.append(guess)
                request.drafts = Drafts(tokens[len(request.tokens) :])
            elif self.random.random() < 0.07:
                self.scheduler.reserve(request, self.random.randint(1, 9))  # as a draft model does

    def launch(self) -> bool:
        plan = self.scheduler.schedule(self.now_s)
        if plan is None:
            return False
        assert plan.num_tokens <= self.scheduler.max_tokens_per_step
        assert len(set(map(id, plan.requests))) == len(plan)
        if self.random.random() < 0.01:
            self.break_down(plan)
            return True
        self.num_copies += len(plan.copies)
        fails = self.random.random() < 0.01
        sampled = self.runner.run(plan, self.context, fails=fails)
        for request, tokens in zip(plan.requests, sampled.tokens, strict=True):
            self.context[request.id] += tokens
        self.in_flight.append((plan, sampled, fails))
        return True

    def break_down(self, plan: Plan) -> None:
        """Nothing of the plan is carried out, and no other is made before that is known."""
        while self.in_flight:
            self.land()
        self.take(self.scheduler.fail(plan, "the step could not begin"))

    def preempt(self) -> None:
        if self.scheduler.running:
            self.scheduler._preempt(self.random.choice(self.scheduler.running))

    def land(self) -> None:
        plan, sampled, fails = self.in_flight.popleft()
        self.take(self.scheduler.fail(plan, "the step failed") if fails else self.scheduler.commit(plan, sampled))
        self.runner.is_broken = any(fails for _, _, fails in self.in_flight)

    def take(self, updates: list[Update]) -> None:
        for update in updates:
            assert update.id not in self.final, "an update after the final one"
            self.delivered[update.id] += update.tokens
            if update.finish:
                self.final[update.id] = update

    def step(self) -> None:
        self.now_s += self.random.random()
        self.launch()
        if len(self.in_flight) >= self.depth or (self.in_flight and self.random.random() < 0.2):
            self.land()
        named = [request for plan, _, _ in self.in_flight for request in plan.requests]
        check(self.scheduler, named)

    def play(self, arrivals: float = 0.11) -> None:
        """Something at random, then a step."""
        dice = self.random.random() + 0.11 - arrivals
        if dice < 0.11:
            self.arrive()
        elif dice < 0.13:
            self.abort()
        elif dice < 0.5:
            self.draft()
        elif dice < 0.52:
            self.preempt()
        self.step()

    def drain(self) -> None:
        for _ in range(20_000):
            if not self.scheduler.has_work and not self.in_flight:
                return
            self.now_s += 10.0
            launched = self.launch()
            if len(self.in_flight) >= self.depth or (self.in_flight and not launched):
                self.land()
        raise AssertionError(f"never finished: {list(self.scheduler.requests)}")

    def judge(self) -> None:
        assert set(self.final) == set(self.everyone), "somebody never heard the end"
        assert self.scheduler.kv.pool.num_free == self.num_blocks
        assert self.scheduler.swap.num_free == self.scheduler.swap.num_host_blocks
        for request in self.everyone.values():
            if request.params.use_beam_search:
                self._judge_search(request)
                continue
            expected = answer_alone(request)
            got, finish = self.delivered[request.id], self.final[request.id].finish
            assert got == expected[: len(got)]
            if finish in (Finish.STOP, Finish.LENGTH):
                assert got == expected
                assert (finish is Finish.LENGTH) == (len(got) == request.max_tokens and not ends(request, got))

    def _judge_search(self, request: Request) -> None:
        final = self.final[request.id]
        assert self.delivered[request.id] == []
        if final.finish in (Finish.ABORT, Finish.ERROR):
            return
        assert final.detail is not None
        assert final.detail.beams is not None
        self.num_searches += 1
        assert [beam.tokens for beam in final.detail.beams] == search_alone(request)


def ends(request: Request, tokens: list[int]) -> bool:
    return tokens[-1:] == [END] and len(tokens) > request.params.min_tokens


def search_alone(request: Request) -> list[list[int]]:
    """A beam search without a cache. As Hugging Face's; see also tests/engine/test_beam_search.py."""
    params, width = request.params, request.params.beam_width
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    found: list[tuple[float, list[int]]] = []
    for length in range(1, request.max_tokens + 1):
        grown = [
            (total + logprob, [*tokens, token])
            for total, tokens in live
            for token, logprob in enumerate(next_logprobs([*request.prompt, *tokens], request.seed))
        ]
        ranked = sorted(grown, key=lambda each: -each[0])[: 4 * width]
        has_ended = [each[1][-1] in request.stop_ids or length == request.max_tokens for each in ranked]
        ended = [each for each, ends in zip(ranked[:width], has_ended, strict=False) if ends]
        live = [each for each, ends in zip(ranked, has_ended, strict=True) if not ends][:width]
        found += [(total / length**params.length_penalty, tokens) for total, tokens in ended]
        found = sorted(found, key=lambda each: -each[0])[:width]
        if not live:
            break
        reach = request.max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else length
        if len(found) == width and (
            params.early_stopping is True or found[-1][0] >= live[0][0] / reach**params.length_penalty
        ):
            break
    return [tokens for _, tokens in found]


def answer_alone(request: Request) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < request.max_tokens:
        tokens.append(next_token([*request.encoder_tokens, *request.prompt, *tokens], request.seed))
        if ends(request, tokens):
            break
    return tokens


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic(seed: int) -> None:
    num_preemptions = num_swaps = num_cached = num_copies = num_read_in_flight = num_rows_lost = num_encoded = 0
    num_searches = num_exited = 0
    for number in range(NUM_WORLDS // 20):
        world = World(random.Random(f"{seed}.{number}"))
        for _ in range(STEPS_PER_WORLD):
            world.play()
        world.drain()
        world.judge()
        num_preemptions += world.scheduler.counters.preemptions
        num_swaps += world.scheduler.counters.swaps
        num_cached += world.scheduler.counters.cached_tokens
        num_copies += world.num_copies
        num_searches += world.num_searches
        num_exited += world.runner.num_exited
        num_read_in_flight += world.runner.num_read_in_flight
        num_rows_lost += world.runner.num_rows_lost
        num_encoded += world.runner.num_encoded
    seen = num_preemptions, num_swaps, num_cached, num_copies, num_read_in_flight, num_rows_lost, num_encoded
    seen = *seen, num_searches, num_exited
    print("SEEN", seed, seen)
    assert min(seen) >= 0, f"the traffic was too light to show anything: {seen}"
