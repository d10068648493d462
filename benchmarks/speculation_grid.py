"""What speculation gains or loses at a given share of right drafts: batch sizes x shares, on one engine, in turns.

    python benchmarks/speculation_grid.py [MODEL] [--batch 1,4,16,64] [--right 0,0.3,0.6,0.9] [--fixed 1,2,4] [--json]

The drafts come from an oracle. It knows the answers, and each of its drafts is right with the given chance if the one
before is. So the figures are those of the controller and of the steps, whatever proposes. Each round answers the same
requests plainly, with the controller, and with fixed numbers of drafts, in a random order. A cell shows the ratio of
the shortest times: interruptions by other programs only take longer.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from arguments import count, count_list

from quire import LLM, SamplingParams
from quire.bench.speculation import Answer, Bench
from quire.core.drafts import Drafts
from quire.core.plan import Plan, Sampled
from quire.core.request import Request
from quire.engine.machine import machine
from quire.engine.speculation import FREE_DRAFTS, MAX_DRAFTS
from quire.speculative.controller import Controller
from quire.speculative.eligibility import has_prompt, may_draft
from quire.speculative.proposer import Context

MAX_DEPTH = 8  # drafts of the oracle
DEVICE = "cpu"


class Oracle:
    """A proposer that knows the answers."""

    name = "oracle"

    def __init__(self, share: float, answers: Sequence[Sequence[int]], vocab_size: int) -> None:
        self._share = share
        self._answers = answers  # by request id
        self._vocab_size = vocab_size
        self._random = random.Random(0)

    def propose(self, contexts: Sequence[Context], max_drafts: Sequence[int]) -> list[Drafts | None]:
        return [self._draft(context, min(most, MAX_DEPTH)) for context, most in zip(contexts, max_drafts, strict=True)]

    def _draft(self, context: Context, most: int) -> Drafts:
        tokens, answer = list[int](), self._answers[int(context.request_id)]
        at, is_right = len(context.tokens) - context.num_prompt, True
        for token in answer[at : at + most]:
            is_right = is_right and self._random.random() < self._share
            tokens.append(token if is_right else (token + 1) % self._vocab_size)
        return Drafts(tokens, None, [max(0.02, self._share)] * len(tokens), self.name)

    def finish(self, request_id: str) -> None:
        pass

    def reset(self) -> None:
        pass


class Fixed(Controller):
    """A controller that chooses nothing: every row has the same number of drafts in every step."""

    def __init__(self, oracle: Oracle, num_drafts: int, max_tokens: int, vocab_size: int) -> None:
        super().__init__([], max_tokens, vocab_size, FREE_DRAFTS[DEVICE])
        self._oracle = oracle
        self._num_drafts = num_drafts

    def propose(self, running: Sequence[Request], may_admit: bool) -> None:
        if may_admit or any(map(has_prompt, running)):
            return
        rows = [request for request in running if may_draft(request)]
        contexts = [Context(row.id, row.tokens, row.num_prompt, row.salt) for row in rows]
        limits = [min(self._num_drafts, row.max_len - len(row.tokens) - 1) for row in rows]
        for row, drafts in zip(rows, self._oracle.propose(contexts, limits), strict=True):
            row.drafts = drafts

    def observe(self, plan: Plan, sampled: Sampled) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Cell:
    """Speeds are relative to plain decoding."""

    batch: int
    share: float
    plain_tokens_per_s: float
    controller: float
    fixed: dict[int, float]
    tokens_per_step: float  # of the controller, for each row
    slowest: float  # of the controller's rounds
    different: int

    @property
    def best_fixed(self) -> float:
        return max(self.fixed.values(), default=1.0)


class Grid:
    def __init__(self, llm: LLM, options: argparse.Namespace) -> None:
        self._bench = Bench(llm)
        self._engine = llm._client.engine
        self._options = options
        self._vocab_size = llm.info.config.vocab_size
        self._max_tokens = self._engine.scheduler.max_tokens_per_step

    def run(self, batch: int, shares: Sequence[float]) -> list[Cell]:
        answers = self._answer(batch, None).tokens
        self._check_lengths(answers)
        return [self._measure(batch, share, answers) for share in shares]

    def _measure(self, batch: int, share: float, answers: list[list[int]]) -> Cell:
        oracle = Oracle(share, answers, self._vocab_size)
        limits = self._max_tokens, self._vocab_size
        controller = Controller([], *limits, FREE_DRAFTS[DEVICE], (), [oracle], MAX_DRAFTS[DEVICE])
        ways: dict[str | int, Controller | None] = {"plain": None, "controller": controller}
        ways |= {num_drafts: Fixed(oracle, num_drafts, *limits) for num_drafts in self._options.fixed}
        found: dict[str | int, list[Answer]] = defaultdict(list)
        order = list(ways)
        for _ in range(1 + self._options.rounds):
            random.shuffle(order)
            for way in order:
                found[way].append(self._answer(batch, ways[way]))
        plain, chosen = self._best(found["plain"]), self._best(found["controller"])
        num_tokens = sum(map(len, answers)) - batch
        return Cell(
            batch,
            share,
            num_tokens / plain.seconds,
            plain.seconds / chosen.seconds,
            {way: plain.seconds / self._best(found[way]).seconds for way in ways if isinstance(way, int)},
            num_tokens / chosen.num_steps / batch,
            plain.seconds / max(each.seconds for each in found["controller"][1:]),
            sum(each.tokens != answers for kind in found.values() for each in kind),
        )

    def _best(self, answers: Sequence[Answer]) -> Answer:
        """The fastest, without the first one: nothing is known then."""
        return min(answers[1:], key=lambda answer: answer.seconds)

    def _answer(self, batch: int, controller: Controller | None) -> Answer:
        requests, source = [], random.Random(batch)
        params = SamplingParams(temperature=0, max_tokens=self._options.output_tokens, ignore_eos=True)
        for number in range(batch):
            prompt = [source.randrange(self._vocab_size) for _ in range(self._options.prompt_tokens)]
            requests.append(Request(f"{number}", prompt, params, seed=number, max_tokens=self._options.output_tokens))
        return self._bench.answer(requests, controller)

    def _check_lengths(self, answers: list[list[int]]) -> None:
        assert all(len(answer) == self._options.output_tokens for answer in answers)


def show(cell: Cell) -> None:
    fixed = "  ".join(f"{num_drafts}: {speed:.3f}" for num_drafts, speed in cell.fixed.items())
    print(
        f"batch {cell.batch:3}  right {cell.share:.1f}  plain {cell.plain_tokens_per_s:7.0f} tok/s  "
        f"controller {cell.controller:.3f} ({cell.tokens_per_step:.2f} tokens a step, slowest round "
        f"{cell.slowest:.3f})  fixed {fixed}  different {cell.different}",
        file=sys.stderr,
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--batch", type=count_list, default=[1, 4, 16, 64])
    parser.add_argument("--right", type=share_list, default=[0.0, 0.3, 0.6, 0.9])
    parser.add_argument("--fixed", type=count_list, default=[1, 2, 4])
    parser.add_argument("--prompt-tokens", type=count, default=64)
    parser.add_argument("--output-tokens", type=count, default=96)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    llm = LLM(options.model, device=DEVICE, max_requests=max(options.batch), prefix_cache=False)
    grid, cells = Grid(llm, options), []
    for batch in options.batch:
        for cell in grid.run(batch, options.right):
            show(cell)
            cells.append(cell)
    if options.json:
        document = {"machine": machine(llm.config), "model": options.model, "cells": [asdict(cell) for cell in cells]}
        print(json.dumps(document))


def share_list(text: str) -> list[float]:
    found = [float(each) for each in text.split(",")]
    if not all(0 <= share <= 1 for share in found):
        raise ValueError(text)
    return found


if __name__ == "__main__":
    main()
