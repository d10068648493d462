"""Tensor parallel on a CPU: with any number of ranks the logits are bit for bit those of one, in any batch, in chunks,
from the cache, after preemption and swapping, and with drafts. Ranks are threads here; `tests/engine/test_ranks.py` has
processes."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.core.drafts import Drafts
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.kernels import Kernels
from quire.kernels.cpu.ranks import NUM_WORDS, Command, CpuRanks, merge_largest, to_pairs
from quire.kernels.cpu.shared_pages import SharedPages
from quire.kernels.cpu.tape_memory import Columns, Memory
from quire.kernels.cpu.tape_ops import Embed, Matmul, Meet, Norm, Recorded, Round
from quire.models.config import ModelConfig
from tests.tools.native import FITTING, ISAS, MODULE, all_of, fitting, kernels_of, mixed, native_model
from tests.tools.ranks import ThreadRanks
from tests.tools.scores import Scores
from tests.tools.tiny import FAMILIES, MIXTURES, TinyEngine

pytestmark = pytest.mark.cpu

NINE_HEADS = replace(
    fitting(FAMILIES["llama"], 32), num_heads=9, num_kv_heads=3, hidden_size=160, intermediate_size=160, vocab_size=203
)
ONE_KEY_HEAD = replace(FITTING["llama"], num_heads=5, num_kv_heads=1, hidden_size=96)
CONFIGS = FITTING | MIXTURES | {"nine heads": NINE_HEADS, "one key head": ONE_KEY_HEAD}
CACHE_TYPES = ("bfloat16", "int8", "float32", "fp8")
ISA = ISAS[0]


def questions(seed: int = 1) -> list[Request]:
    """Prompts of mixed length, some of which begin alike; every other one is greedy."""
    rng = random.Random(seed)
    common = [rng.randrange(97) for _ in range(21)]
    requests = []
    for number in range(6):
        prompt = (common if number % 3 == 0 else []) + [rng.randrange(97) for _ in range(rng.randint(1, 40))]
        params = SamplingParams(temperature=rng.choice([0.7, 1.5]) if number % 2 else 0.0, max_tokens=None)
        requests.append(Request(str(number), prompt, params, seed=number, max_tokens=rng.randint(1, 8)))
    return requests


class OneRank:
    """A model on one rank, and what it answers."""

    def __init__(self, name: str, scores: list[Scores], kv_dtype: str) -> None:
        self.config, self.kv_dtype = CONFIGS[name], kv_dtype
        self.answers = TinyEngine(
            self.config, model=make_model(self.config)(kernels_of(ISA)), ops=kernels_of(ISA), kv_dtype=kv_dtype
        ).answer(questions())
        self.scores = scores[-1]

    def ranks(self, size: int, **options: Any) -> ThreadRanks:
        return ThreadRanks(self.config, size, make_model(self.config), isa=ISA, kv_dtype=self.kv_dtype, **options)


def make_model(config: ModelConfig) -> Any:
    def make(ops: Kernels) -> Any:
        return native_model(config, ops, mixed)

    return make


@pytest.mark.parametrize("name", CONFIGS)
def test_any_number_of_ranks_has_the_bits_of_one(name: str, scores: list[Scores]) -> None:
    one = OneRank(name, scores, CACHE_TYPES[list(CONFIGS).index(name) % len(CACHE_TYPES)])
    for size in (2, 3, 4):
        if size > one.config.num_heads and one.config.latent is None:
            continue
        with one.ranks(size) as engine:
            scores.append(Scores())
            assert engine.answer(questions()) == one.answers, size
            scores[-1].check(one.scores)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["nine heads", "gemma3"])
def test_chunks_cache_hits_preemption_and_swapping(name: str, size: int, scores: list[Scores]) -> None:
    one = OneRank(name, scores, "bfloat16")

    def check(answers: list[list[int]]) -> None:
        assert answers == one.answers
        scores[-1].check(one.scores)
        scores.append(Scores())

    scores.append(Scores())
    with one.ranks(size) as engine:
        check(engine.answer(questions()))
        hits = engine.scheduler.counters.cached_tokens
        check(engine.answer(questions()))
        assert engine.scheduler.counters.cached_tokens > hits + 50
    with one.ranks(size, max_tokens=7, max_requests=5, block_size=3) as engine:
        check(engine.answer(questions()[::-1])[::-1])
    with one.ranks(size, max_tokens=24, max_requests=16, num_host_blocks=500, prefix_cache=False) as engine:
        check(engine.answer_preempted(questions(), seed=4))
        assert engine.scheduler.counters.swaps


@pytest.mark.parametrize("size", [2, 3])
def test_draft_trees_are_verified_by_all_ranks(size: int) -> None:
    """Accepted side branches are moved in the cache of each rank."""
    one = OneRank("nine heads", [Scores()], "bfloat16")
    with one.ranks(size, max_tokens=128) as engine:
        requests = questions()
        for request in requests:
            engine.scheduler.add(request)
        rng, num_moved = random.Random(3), 0
        while engine.scheduler.has_work:
            for request, answer in zip(requests, one.answers, strict=True):
                request.drafts = draft_tree(request, answer, rng)
            plan = engine.scheduler.schedule()
            assert plan is not None
            sampled = engine.runner.launch(plan).wait()
            num_moved += any(path != list(range(len(path))) for path in sampled.accepted.values())
            engine.scheduler.commit(plan, sampled)
        assert num_moved
        assert [request.tokens[request.num_prompt :] for request in requests] == one.answers


def draft_tree(request: Request, answer: list[int], rng: random.Random) -> Drafts | None:
    """A wrong branch, and after it the right tokens."""
    done = len(request.tokens) - request.num_prompt
    right = answer[done : done + 3]
    if request.finished or not done or not right or rng.random() < 0.3:
        return None
    wrong = (right[0] + 1) % 97
    return Drafts([wrong, *right], [-1, -1, *range(1, len(right))])


def test_every_format_is_shared(scores: list[Scores]) -> None:
    """Each rank packs its own rows of the matrices."""
    for format in ("q8_0", "q4_1", "bf16", "f32"):
        scores.append(Scores())
        expected = TinyEngine(
            NINE_HEADS, model=native_model(NINE_HEADS, kernels_of(ISA), all_of(format)), ops=kernels_of(ISA)
        ).answer(questions())
        alone = scores[-1]
        scores.append(Scores())
        with ThreadRanks(
            NINE_HEADS, 3, lambda ops, format=format: native_model(NINE_HEADS, ops, all_of(format)), isa=ISA
        ) as engine:
            assert engine.answer(questions()) == expected, format
            scores[-1].check(alone)


@pytest.mark.parametrize("name", ["nine heads", "gemma3", "cohere2", "bloom", "experts"])
def test_between_two_meetings_no_shared_memory_is_read_and_written(name: str) -> None:
    """A rank that is slow may still read what a fast one would overwrite."""
    config = CONFIGS[name]
    with ThreadRanks(config, 2, make_model(config), isa=ISA) as engine:
        ops = engine.runner.model.tape.ops
        num_meetings = sum(isinstance(op, Meet) for op in ops)
        assert num_meetings >= 4 * config.num_layers
        read: set[int] = set()
        written: set[int] = set()
        num_shared = 0
        for op in ops:
            if isinstance(op, Meet):
                assert not read & written
                num_shared += len(written)
                read, written = set(), set()
                continue
            reads, writes = accesses(op)
            read |= {id(memory) for memory in reads if memory.kind.shared}
            written |= {id(memory) for memory in writes if memory.kind.shared}
        assert not read & written
        assert num_shared >= num_meetings


def test_the_largest_logit_of_all_ranks_is_that_of_the_lowest_token() -> None:
    """As one rank finds it: NaN is the largest, and of equals the first counts."""
    nan, infinite = np.nan, np.inf
    largest = np.array([[1, 5, nan, infinite, 2, -infinite], [3, 5, 9, nan, 2, -infinite], [2, 7, nan, 1, 3, -1]])
    tokens = np.array([[0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]])
    found, best = merge_largest(tokens, largest.astype(np.float32))
    assert found.tolist() == [10, 21, 2, 13, 24, 25]
    assert np.array_equal(best, np.array([3, 7, nan, nan, 3, -1], np.float32), equal_nan=True)


def test_pairs_are_sent_in_several_commands() -> None:
    """A swap of many blocks does not fit into one."""
    pages = SharedPages.create()
    ranks = [CpuRanks(MODULE, SharedPages(pages.file), rank, 2, crowded=True) for rank in range(2)]
    pairs = [(number, number + 7) for number in range(NUM_WORDS)]
    received: list[tuple[int, int]] = []

    def receive() -> None:
        while (command := ranks[1].receive()) is not None:
            assert command[0] is Command.MOVE_TOKENS
            assert command[1][0] == 3
            received.extend(to_pairs(command[1][1:]))
            ranks[1].native.report_done()

    thread = threading.Thread(target=receive)
    thread.start()
    ranks[0].give_pairs(Command.MOVE_TOKENS, pairs, 3)
    ranks[0].wait()
    ranks[0].native.set_broken()
    thread.join()
    pages.close()
    assert received == pairs


def accesses(op: Any) -> tuple[list[Memory], list[Memory]]:
    """The memory that an op reads and writes."""
    reads: list[Any] = []
    writes: list[Any] = []
    match op:
        case Embed():
            writes = [op.out]
        case Norm():
            reads = [op.x.storage, op.residual and op.residual.storage]
            writes = [op.sum and op.sum.storage, op.y, op.quantized]
        case Matmul():
            reads = [op.x.storage, op.quantized]
            writes = [op.y, op.gated]
        case Round():
            reads, writes = [op.x.storage], [op.quantized]
        case Recorded():
            columns = {name: value.storage for name, value in op.arguments.items() if isinstance(value, Columns)}
            writes = [columns.pop(name) for name in ("out", "y", "routes") if name in columns]
            reads = list(columns.values())
        case _:
            reads = [columns.storage for name, columns in op.columns.items() if columns is not None and name != "out"]
            writes = [op.columns["out"].storage]
    return tuple([each.memory for each in storages if each is not None and each.needed] for storages in (reads, writes))
