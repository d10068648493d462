"""A script: speculation on a simulated GPU, end to end. `test_interpreted.py` runs it.

With `exact` tokens and log probabilities are those of plain decoding to the last bit, and without it the tokens are.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from tests.kernels import simulated_gpu  # before what imports Triton's kernels

from quire.core.drafts import Drafts  # isort: skip
from quire.core.params import SamplingParams
from quire.core.plan import Plan, Sampled
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.gpu_graphs import Key
from quire.engine.gpu_runner import GpuRunner
from quire.engine.runner import accept, find_moves
from quire.kernels import reference
from quire.kernels.cuda.move import TokenMover
from quire.kernels.cuda.sampling.accept import FIELDS, MAX_NODES, accept_drafts
from quire.kernels.paging import LayerCache
from quire.models.config import ModelConfig
from quire.speculative.controller import Controller
from quire.speculative.step_times import EqualTimes
from quire.speculative.suffix import SuffixProposer
from tests.engine.test_speculation import VOCAB_SIZE
from tests.tools.oracle import Answer, Oracle, make_chain, make_tree, run
from tests.tools.trees import draw_parents

CONFIG = replace(simulated_gpu.LLAMA, vocab_size=VOCAB_SIZE)
MAX_TOKENS = 9
FEW_BLOCKS = 8


class OtherParity:
    """A constraint that allows tokens of the other parity than the last one's."""

    error = ""

    def __init__(self, last: int = 0) -> None:
        self._last = last

    def allowed(self) -> bytes:
        return (b"\x55" if self._last % 2 else b"\xaa") * -(-VOCAB_SIZE // 8)

    def num_allowed(self, tokens: Sequence[int]) -> int:
        last = self._last
        for count, token in enumerate(tokens):
            if (token + last) % 2 == 0:
                return count
            last = token
        return len(tokens)

    def forced(self) -> Sequence[int]:
        return ()

    def copy(self) -> OtherParity:
        return OtherParity(self._last)

    def advance(self, token: int) -> None:
        assert (token + self._last) % 2
        self._last = token


def make_requests() -> list[Request]:
    """One of each kind that goes a way of its own, two answers to one prompt, and a prefix that two share."""
    asked: list[tuple[SamplingParams, dict[str, object]]] = [
        (SamplingParams(temperature=0.0), {}),
        (SamplingParams(temperature=0.9, top_p=0.9, logprobs=2), {}),
        (SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=1), {}),
        (SamplingParams(temperature=0.8, stop_token_ids=list(range(40, 60))), {}),
        (SamplingParams(temperature=0.6), {"constraint": OtherParity()}),
        (SamplingParams(temperature=1.0), {"bad_word_ids": ((7,), (8, 9))}),
        (SamplingParams(temperature=0.0, prompt_logprobs=1), {}),
    ]
    prompt, requests = list(range(5, 25)), list[Request]()
    for number, (params, more) in enumerate(asked):
        tokens = [*prompt[: 17 if number % 2 else 6], 30 + number]
        requests.append(Request(str(number), tokens, params, max_tokens=MAX_TOKENS, seed=number, **more))  # type: ignore[arg-type]
    twin = Request("twin", requests[1].prompt, requests[1].params, max_tokens=MAX_TOKENS, seed=99, leader=requests[1])
    return [*requests[:2], twin, *requests[2:]]


def capture_verify(engine: Engine) -> None:
    runner = engine.runner
    assert isinstance(runner, GpuRunner)
    for kind in ("verify", "trees"):
        for size in (16, 64, 128):
            runner.graphs._capture(Key(kind, size, 16))


def make_controller(proposer: Oracle | SuffixProposer) -> Controller:
    controller = Controller([proposer], 128, VOCAB_SIZE, 12.0, max_drafts=15)
    controller.times, controller._clock = EqualTimes(12.0), lambda: 0.0
    return controller


def check_answers(config: ModelConfig, *, exact: bool, kinds: Sequence[int] = range(3)) -> None:
    """With drafts of these kinds: chains, trees in few blocks, and what the text repeats in few blocks."""
    plain = simulated_gpu.build_engine(config, exact=exact)
    simulated_gpu.capture_all(plain)
    expected = run(plain, make_requests())
    lengths = {len(tokens) for tokens, _ in expected.values()}
    assert lengths != {MAX_TOKENS}, "a request stops in between"
    proposers = [Oracle(expected, make_chain, VOCAB_SIZE), Oracle(expected, make_tree, VOCAB_SIZE), SuffixProposer()]
    for nth in kinds:
        proposer = proposers[nth]
        controller = make_controller(proposer)
        few = {"num_blocks": FEW_BLOCKS, "num_host_blocks": 40} if nth else {}
        engine = simulated_gpu.build_engine(config, exact=exact, controller=controller, **few)
        simulated_gpu.capture_all(engine)
        if nth == 1 or exact:
            capture_verify(engine)
        got = run(engine, make_requests())
        for name, answer in expected.items():
            assert as_told(got[name], exact) == as_told(answer, exact), (exact, nth, name)
        assert controller.proposers, "the proposer failed"
        assert not isinstance(proposer, Oracle) or controller.accepted.total() > 10
        assert not few or engine.scheduler.counters.preemptions
        assert engine.scheduler.kv.pool.num_free == (FEW_BLOCKS if few else 200)


def as_told(answer: Answer, exact: bool) -> object:
    return answer if exact else answer[0]


def check_accept(seed: int) -> None:
    """Random trees and chains, of which a random path is right. Some logits are not finite."""
    rng, plan, rows = random.Random(seed), Plan(0), rng_rows(seed)
    tokens, max_logits, step_tokens, parents, entries, draft_rows = [], [], [], [], [], []
    for row, drafts in enumerate(rows):
        plan.requests.append(Request(str(row), [1]))
        first, count = len(tokens), 0 if drafts is None else len(drafts)
        if drafts is not None:
            plan.drafts[row] = drafts
            draft_rows.append((row, first, first, count, 0, 0))
        sampled = [rng.randrange(3) for _ in range(count + 1)]
        tokens += sampled
        max_logits += [rng.choice([1.0] * 12 + [float("nan"), float("-inf")]) for _ in sampled]
        step_tokens += [0, *(drafts.tokens if drafts is not None else [])]
        parents += [0] if drafts is None else [0, *(drafts.parent(node) + 1 for node in range(count))]
        entries += [row] * (count + 1)
    expected = Sampled([[] for _ in rows])
    first = 0
    for row, drafts in enumerate(rows):
        accept(plan, expected, row, first, tokens, max_logits, {})
        first += 1 + (0 if drafts is None else len(drafts))
    num_accepted, paths = torch.zeros(len(rows), dtype=torch.int32), torch.zeros(len(rows), MAX_NODES).int()
    last_tokens = torch.full((len(rows),), 9)
    accept_drafts(
        torch.tensor(draft_rows, dtype=torch.int32).view(-1, FIELDS),
        torch.tensor(parents + [0] * MAX_NODES, dtype=torch.int32),
        torch.tensor(step_tokens), torch.tensor(tokens), torch.tensor(max_logits),
        torch.tensor(entries, dtype=torch.int32), last_tokens, num_accepted, paths,
    )  # fmt: skip
    for row, path in expected.accepted.items():
        assert paths[row, : int(num_accepted[row])].tolist() == path, (seed, row)
        assert int(last_tokens[row]) == (expected.tokens[row] or [9])[-1]


def rng_rows(seed: int) -> list[Drafts | None]:
    """Siblings have different tokens of three, so paths are often right."""
    rng, rows = random.Random(seed + 1000), list[Drafts | None]()
    for _ in range(8):
        parents = draw_parents(rng.choice([0, 1, 4, 15, 63]), rng)
        kept, seen = list[int](), set[tuple[int, int]]()
        tokens = [rng.randrange(3) for _ in parents]
        for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
            if (parent, token) not in seen and (parent == -1 or parent in kept):
                seen.add((parent, token))
                kept.append(node)
        tree = Drafts(tokens, parents).keep(kept)
        rows.append(tree if len(tree) else None)
    return rows


def check_moves(dtype: torch.dtype, dim: int) -> None:
    """Paths of two rows in two layers, of which the second one has another number of heads."""
    size, plan, sampled = 4, Plan(0), Sampled([[], []])
    tables, paths = [[5, 2, 7, 3], [1, 4, 6, 0]], [[1, 3, 4, 8], [0, 2]]
    for row, table in enumerate(tables):
        request = Request(str(row), [1])
        request.tables = [list(table)]
        plan.requests.append(request)
        plan.starts.append(3 + row)
        sampled.accepted[row] = paths[row]
    starts, lengths = torch.tensor([0, 10, 14], dtype=torch.int32), torch.tensor([13, 8], dtype=torch.int32)
    layers = [
        LayerCache(*(torch.randn(8, heads, size, dim).to(dtype) for _ in "kv"), 0, size) for heads in (2, 2, 3)
    ]  # fmt: skip
    copies = [LayerCache(layer.k.clone(), layer.v.clone(), 0, size) for layer in layers]
    device_paths = torch.zeros(2, MAX_NODES, dtype=torch.int32)
    for row, path in enumerate(paths):
        device_paths[row, : len(path)] = torch.tensor(path)
    TokenMover(layers, 1, torch.device("cpu"))(
        torch.tensor([[0, 0, 0, 9, 0, 0], [1, 10, 10, 3, 0, 10]], dtype=torch.int32),
        torch.tensor([4, 2], dtype=torch.int32), device_paths, starts, lengths,
        [torch.tensor(tables, dtype=torch.int32)],
    )  # fmt: skip
    moves = torch.tensor(find_moves(plan, sampled, 0, size)).T
    by_token = [LayerCache(c.k.transpose(1, 2), c.v.transpose(1, 2), 0, size) for c in copies]
    reference.move_kv(by_token, [(moves[0], moves[1])])
    for layer, copy in zip(layers, copies, strict=True):
        assert torch.equal(layer.k.view(torch.uint8), copy.k.view(torch.uint8)), (dtype, dim)
        assert torch.equal(layer.v.view(torch.uint8), copy.v.view(torch.uint8)), (dtype, dim)


if __name__ == "__main__":
    simulated_gpu.install()
    for number in range(12):
        check_accept(number)
    for cache_dtype, cache_dim in ((torch.float32, 16), (torch.float16, 24), (torch.float8_e4m3fn, 80)):
        check_moves(cache_dtype, cache_dim)
    is_exact = "exact" in sys.argv
    check_answers(CONFIG, exact=is_exact, kinds=range(3 if is_exact else 2))
