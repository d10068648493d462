"""Requests that leave one engine and arrive at another with their cache: same tokens, and none is computed twice.

The engines are tiny, and their messages are handed over without sockets. Fleets of processes are in test_draining.py.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from msgspec import structs

from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.kv_transfer import KVTransfer
from quire.engine.transfer import MoveFailed, contents_of
from quire.engine.transfer_messages import (
    Blocks,
    Done,
    EndExport,
    EndImport,
    Export,
    Exported,
    Import,
    ReadBlocks,
    TransferFailed,
    WriteBlocks,
    staged_name,
)
from tests.tools.native import FITTING, kernels_of, mixed, native_model
from tests.tools.tiny import FAMILIES, MIXTURES, TinyEngine

pytestmark = pytest.mark.cpu


class Replica:
    """A tiny engine and its side of a move."""

    def __init__(self, config=FAMILIES["llama"], fingerprint="one", num_import_blocks=512, **options):
        tiny = TinyEngine(config, num_import_blocks=num_import_blocks, **options)
        self.scheduler = tiny.scheduler
        self.engine = Engine(tiny.scheduler, tiny.runner, SimpleNamespace(device="cpu", fingerprint=fingerprint))
        self.transfer = KVTransfer(self.engine)
        self.outputs: dict[str, list[int]] = {}

    def add(self, request):
        self.outputs[request.id] = []
        self.engine.add(request)

    def step(self, count=1):
        for _ in range(count):
            for update in self.engine.step():
                self.outputs[update.id] += update.tokens

    def finish(self):
        while self.engine.has_work:
            self.step()

    def ask(self, message):
        return self.transfer.handle(message)[1]

    @property
    def num_computed(self):
        return self.scheduler.counters.computed_tokens

    def check_empty(self):
        pool, swap = self.scheduler.kv.pool, self.scheduler.swap
        assert pool.num_free == pool.num_blocks
        assert swap.num_free == swap.num_host_blocks
        assert not swap.staged


def requests(count=5, max_tokens=20, num_samples=1, **params):
    rng = random.Random(7)
    made = []
    for index in range(count):
        prompt = [rng.randrange(2, 97) for _ in range(rng.randrange(3, 40))]
        leader = None
        for sample in range(num_samples):
            leader = leader or (made[-1] if sample else None)
            made.append(
                Request(
                    f"{index}-{sample}",
                    prompt,
                    SamplingParams(temperature=index % 2 * 0.8, **params),
                    seed=10 * index + sample,
                    max_tokens=max_tokens,
                    leader=leader,
                )
            )
    return made


def copy_of(request, output, known):
    leader = known.get(request.leader.id) if request.leader else None
    return Request(
        request.id, request.prompt, request.params, seed=request.seed, max_tokens=request.max_tokens, leader=leader,
        output=output,
    )  # fmt: skip


def send(source, target, exported, piece=3, name="move"):
    """Copy the blocks of an export. Returns the first failure, or Done."""
    reply = target.ask(Import(1, name, source.engine.info.fingerprint, exported.num_blocks, exported.requests))
    for first in range(0, exported.num_blocks, piece):
        if isinstance(reply, TransferFailed):
            return reply
        blocks = source.ask(ReadBlocks(2, exported.call, first, min(piece, exported.num_blocks - first)))
        if isinstance(blocks, TransferFailed):
            return blocks
        assert isinstance(blocks, Blocks)
        reply = target.ask(WriteBlocks(3, name, first, blocks.data))
    return reply


def land(source, target, exported, made, name="move"):
    """Submit the requests of an export to the target."""
    for cache in exported.requests:
        request = next(each for each in made if each.id == cache.id)
        arrived = copy_of(request, source.outputs[request.id], target.scheduler.requests)
        target.outputs[request.id] = list(source.outputs[request.id])
        target.engine.add(arrived)
        target.transfer.arrive(arrived, staged_name(name, cache.id))
    target.ask(EndImport(name))
    source.ask(EndExport(exported.call))


def move(source, target, ids, made, **options):
    exported = source.ask(Export(9, ids))
    assert isinstance(exported, Exported)
    assert exported.call == 9
    reply = send(source, target, exported, **options)
    assert isinstance(reply, Done), reply
    land(source, target, exported, made)
    return exported


def undisturbed(config, **options):
    replica = Replica(config, **options.pop("engine", {}))
    for request in requests(**options):
        replica.add(request)
    replica.finish()
    return replica


@pytest.mark.parametrize("name", [*FAMILIES, *MIXTURES])
def test_no_token_is_computed_twice_or_changes(name):
    config = {**FAMILIES, **MIXTURES}[name]
    whole = undisturbed(config)
    source, target = Replica(config), Replica(config)
    made = requests()
    for request in made:
        source.add(request)
    source.step(6)
    exported = move(source, target, [request.id for request in made[1:4]], made)
    assert all(cache.num_computed >= cache.num_tokens - 1 for cache in exported.requests)
    source.finish()
    target.finish()
    assert {**source.outputs, **target.outputs} == whole.outputs
    assert source.num_computed + target.num_computed == whole.num_computed
    source.check_empty()
    target.check_empty()


@pytest.mark.parametrize("kv_dtype", ["int8", "bfloat16"])
def test_the_cpu_kernels_caches_move(kv_dtype):
    config, ops = FITTING["gemma3"], kernels_of()
    options = {"model": native_model(config, ops, mixed), "ops": ops, "kv_dtype": kv_dtype, "block_size": 16}
    whole = undisturbed(config, engine=options)
    source, target = Replica(config, **options), Replica(config, **options)
    made = requests()
    for request in made:
        source.add(request)
    source.step(6)
    move(source, target, [request.id for request in made[1:4]], made)
    source.finish()
    target.finish()
    assert {**source.outputs, **target.outputs} == whole.outputs
    assert source.num_computed + target.num_computed == whole.num_computed


@pytest.mark.parametrize("num_steps", [1, 2, 5, 9])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_samples_of_one_prompt_move_together_and_share_blocks(num_steps, prefix_cache):
    options = {"prefix_cache": prefix_cache, "max_tokens": 24, "max_requests": 8}
    whole = undisturbed(FAMILIES["gemma3"], count=2, num_samples=3, engine=options)
    source, target = (Replica(FAMILIES["gemma3"], **options) for _ in range(2))
    made = requests(2, num_samples=3)
    for request in made:
        source.add(request)
    source.step(num_steps)
    exported = move(source, target, [request.id for request in made], made)
    named = {block for cache in exported.requests for table in cache.tables for block in table if block is not None}
    assert named == set(range(exported.num_blocks))
    source.finish()
    target.finish()
    assert target.outputs == whole.outputs
    if prefix_cache:
        assert source.num_computed + target.num_computed == whole.num_computed


def test_samples_that_arrive_share_their_prompts_blocks():
    source, target = Replica(block_size=4), Replica(block_size=4)
    made = requests(1, num_samples=4)
    for request in made:
        source.add(request)
    source.step(5)
    move(source, target, [request.id for request in made], made)
    target.step()
    num_shared = (made[0].num_prompt - 1) // 4
    tables = [request.tables[0][:num_shared] for request in target.scheduler.running]
    assert len(tables) == 4
    assert num_shared
    assert all(table == tables[0] for table in tables)


def test_a_request_that_was_swapped_out_moves_from_the_host():
    whole = undisturbed(FAMILIES["mistral"])
    source, target = (Replica(FAMILIES["mistral"], num_host_blocks=64) for _ in range(2))
    made = requests()
    for request in made:
        source.add(request)
    source.step(4)
    for request in made[:2]:  # one whose swap-out is made by a plan, one for which none was made yet
        source.scheduler._preempt(request)
        assert request.swapped_out
        if request is made[0]:
            source.scheduler._preempt(made[2])
            source.step()
    move(source, target, [request.id for request in made], made)
    source.finish()
    target.finish()
    assert target.outputs == whole.outputs
    assert source.num_computed + target.num_computed == whole.num_computed
    source.check_empty()


def test_a_prompt_that_is_half_computed_goes_on():
    whole = undisturbed(FAMILIES["llama"], engine={"max_tokens": 8, "max_requests": 4})
    source, target = (Replica(max_tokens=8, max_requests=4) for _ in range(2))
    made = requests()
    for request in made:
        source.add(request)
    source.step(2)
    assert any(0 < request.num_computed < request.num_prompt - 1 for request in made)
    exported = move(source, target, [request.id for request in made], made)
    assert any(not cache.num_computed for cache in exported.requests)
    target.finish()
    assert target.outputs == whole.outputs
    assert source.num_computed + target.num_computed == whole.num_computed


def test_beams_are_computed_again():
    beams = {"use_beam_search": True, "best_of": 3}
    source, target = Replica(), Replica()
    made = [Request("a", [5, 6, 7, 8, 9], SamplingParams(temperature=0.0, **beams), max_tokens=8)]
    source.add(made[0])
    source.step(3)
    exported = move(source, target, ["a"], made)
    assert exported.num_blocks == exported.requests[0].num_computed == 0
    target.finish()
    source.check_empty()


def test_whatever_is_left_of_a_move_is_freed():
    source, target = Replica(prefix_cache=False), Replica(prefix_cache=False)
    made = requests(3)
    for request in made:
        source.add(request)
    source.step(3)
    exported = source.ask(Export(1, ["0-0", "1-0", "never"]))
    assert [cache.id for cache in exported.requests] == ["0-0", "1-0"]
    assert send(source, target, exported) == Done(3)
    target.ask(EndImport("move"))
    target.ask(EndImport("move"))
    source.ask(EndExport(exported.call))
    source.ask(EndExport(exported.call))
    source.finish()
    source.check_empty()
    target.check_empty()
    assert isinstance(source.ask(ReadBlocks(2, exported.call, 0, 1)), TransferFailed)


def failing(source, target, change=None):
    """The reason why a move of one request fails."""
    made = requests(1)
    source.add(made[0])
    source.step(3)
    exported = source.ask(Export(1, ["0-0"]))
    if change is not None:
        change(exported)
    reply = send(source, target, exported)
    assert isinstance(reply, TransferFailed)
    target.ask(EndImport("move"))
    target.finish()
    target.check_empty()
    return reply.reason


def test_a_target_without_room():
    assert "no room" in failing(Replica(), Replica(num_import_blocks=0))


def test_a_target_of_another_kind():
    assert "another model" in failing(Replica(), Replica(fingerprint="two"))


def test_a_source_that_had_to_start_over():
    source = Replica()
    assert "source has lost" in failing(source, Replica(), lambda exported: source.scheduler.reset())


def test_a_target_that_had_to_start_over():
    source, target, made = Replica(), Replica(), requests(1)
    source.add(made[0])
    source.step(3)
    exported = source.ask(Export(1, ["0-0"]))
    target.ask(Import(1, "move", "one", exported.num_blocks, exported.requests))
    target.scheduler.reset()
    data = source.ask(ReadBlocks(2, exported.call, 0, 1)).data
    assert "target has lost" in target.ask(WriteBlocks(3, "move", 0, data)).reason
    land(source, target, exported, made)
    target.finish()
    assert target.outputs == undisturbed(FAMILIES["llama"], count=1).outputs


def test_a_cache_of_which_a_part_never_came_is_computed_again():
    """The host blocks hold what was there before."""
    source, target, made = Replica(), Replica(), requests(1)
    source.add(made[0])
    source.step(3)
    exported = source.ask(Export(1, ["0-0"]))
    assert exported.num_blocks > 1
    target.ask(Import(1, "move", "one", exported.num_blocks, exported.requests))
    data = source.ask(ReadBlocks(2, exported.call, 0, 1)).data
    assert target.ask(WriteBlocks(3, "move", 0, data)) == Done(3)
    land(source, target, exported, made)
    assert target.scheduler.requests["0-0"].swapped_out is None
    target.finish()
    assert target.outputs == undisturbed(FAMILIES["llama"], count=1).outputs


@pytest.mark.parametrize("num_blocks", [-1, 1 << 40])
def test_more_blocks_than_requests_have(num_blocks):
    """They would take memory."""
    source, target = Replica(), Replica()
    source.add(requests(1)[0])
    source.step(3)
    exported = source.ask(Export(1, ["0-0"]))
    reply = target.ask(Import(1, "move", "one", num_blocks, exported.requests))
    assert "do not fit" in reply.reason
    target.check_empty()


@pytest.mark.parametrize("reply", [Blocks(1, b"123"), Blocks(1, b"12345"), Done(1), TransferFailed(1, "no")])
def test_a_source_that_sends_other_blocks(reply):
    with pytest.raises(MoveFailed):
        contents_of(reply, 4)
    assert contents_of(Blocks(1, b"1234"), 4) == b"1234"


@pytest.mark.parametrize(
    "change",
    [
        {"tables": []},
        {"tables": [[0]]},
        {"num_computed": 400},
        {"num_computed": -1},
        {"fixed_tables": [[0]]},
    ],
)
def test_tables_that_do_not_fit(change):
    def forge(exported):
        exported.requests[0] = structs.replace(exported.requests[0], **change)

    assert "do not fit" in failing(Replica(), Replica(), forge)


def test_blocks_that_do_not_fit():
    source, target = Replica(), Replica()
    source.add(requests(1)[0])
    source.step(3)
    exported = source.ask(Export(1, ["0-0"]))
    data = source.ask(ReadBlocks(2, exported.call, 0, 1)).data
    for first, sent in ((0, data[:-1]), (-1, data), (exported.num_blocks, data), (exported.num_blocks - 1, data * 2)):
        target.ask(Import(1, "move", "one", exported.num_blocks, exported.requests))
        assert "do not fit" in target.ask(WriteBlocks(3, "move", first, sent)).reason
        target.ask(EndImport("move"))
