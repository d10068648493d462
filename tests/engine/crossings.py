"""Everything crossed with speculation: a request's tokens and log probabilities are those of plain decoding.

    python -m tests.engine.crossings [--requests 20000] [--seed 0]

A world is an engine with a random shape and random proposers, from well-meaning to hostile, and random requests. While
it runs, requests are preempted and aborted, the engine is killed and started again, requests move to another engine
with their cache, and plans are dropped. Each answer is compared with the one of an engine that is left alone and has no
drafts. `test_crossings.py` runs a few worlds.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from quire.core.plan import Update
from quire.core.request import Finish, Request
from quire.engine.batch import BatchBuffers, BufferShape
from quire.engine.draft_model import DraftModel
from quire.engine.engine import Engine
from quire.engine.kv_transfer import KVTransfer
from quire.engine.messages import EngineRequest
from quire.engine.transfer_messages import (
    Blocks,
    Done,
    EndExport,
    EndImport,
    Export,
    Exported,
    Import,
    ReadBlocks,
    WriteBlocks,
    staged_name,
)
from quire.speculative import ngram
from quire.speculative.controller import Controller
from quire.speculative.proposer import ModelProposer, Proposer
from quire.speculative.step_times import EqualTimes
from quire.speculative.suffix import SuffixProposer
from quire.weights.eagle import load_eagle
from quire.weights.heads import Target, load_block_head, load_medusa
from tests.tools import exits, heads
from tests.tools.eagle import eagle_config, eagle_tensors
from tests.tools.hostile import BREAKS_RULES, PROPOSE, Answer, Answers, Plugin
from tests.tools.native import FITTING, all_of, kernels_of, mixed, native_model
from tests.tools.random_requests import GRAMMARS, VOCAB_SIZE, make_requests
from tests.tools.tiny import TinyEngine

OPS = kernels_of()
CONFIGS = {name: replace(FITTING[name], vocab_size=VOCAB_SIZE) for name in ("llama", "gemma3")}
MODELS = {name: native_model(config, OPS, mixed) for name, config in CONFIGS.items()}
DRAFT_MODELS = {name: [MODELS[name], native_model(CONFIGS[name], OPS, all_of("q8_0"), 1)] for name in CONFIGS}
MODEL_KINDS = ("draft", "block", "medusa", "trimmed medusa", "own", "eagle3", "eagle", "self", "exit", "early exit")
MAX_STEPS = 20_000


class World:
    """An engine with a random shape, random proposers and what happens to it."""

    def __init__(self, seed: int, folder: Path, num_requests: int = 14) -> None:
        self.rng = rng = random.Random(seed)
        self.folder = folder
        self.family = rng.choice([*CONFIGS])
        self.config, self.model = CONFIGS[self.family], MODELS[self.family]
        self.kind = rng.choice(["", "", *MODEL_KINDS])
        names = [*PROPOSE, *BREAKS_RULES]
        self.plugins = rng.sample(names, rng.choice([0, 1, 1, 2] if self.kind else [1, 2]))
        self.raises_in = rng.choice(["", "", "", "finish", "reset"])
        self.repeats = rng.choice(["", "suffix", "suffix", "chains only", "ngram"])
        self.measures = rng.random() < 0.4  # durations, which are random; else all drafts are verified
        self.batch = rng.choice([1, 2, 7, 32])
        self.settings: dict[str, Any] = {
            "kv_dtype": rng.choice(["float32", "bfloat16", "int8", "fp8"]),
            "block_size": rng.choice([1, 3, 4, 16]),
            "max_tokens": rng.choice([40, 96, 130]),
            "prefix_cache": rng.random() < 0.8,
        }
        num_groups = len(set(self.config.windows))
        per_request = num_groups * -(-600 // self.settings["block_size"])
        self.settings["num_blocks"] = int(per_request * rng.choice([1.1, 1.5, 6]))
        self.settings["num_host_blocks"] = rng.choice([0, 0, 2 * per_request])
        self.settings["num_import_blocks"] = rng.choice([per_request, 40 * per_request])  # the others are recomputed
        self.disturbs = rng.choice([0.0, 0.0, 0.05, 0.2])
        self._request_seed, self._count = rng.randrange(1 << 30), num_requests
        self.num_drafted = self.num_accepted = 0
        self.happened = Counter[str]()

    @property
    def description(self) -> str:
        return f"{self.family} {self.kind} {self.plugins} {self.raises_in} {self.repeats} {self.batch} {self.settings}"

    def requests(self) -> list[Request]:
        can_exit, can_search = self.kind == "early exit", self.batch >= 3
        return make_requests(self._request_seed, self._count, can_exit=can_exit, can_search=can_search)

    def expect(self) -> Answers:
        """The answers of an engine that is left alone and drafts nothing."""
        roomy = {"kv_dtype": self.settings["kv_dtype"], "num_blocks": 4000, "max_tokens": 600, "max_requests": 32}
        engine = self._exit_engine([], roomy)[0] if self.kind == "early exit" else self._plain_engine(roomy)
        engine.controller = None
        answers = {request.id: Answer() for request in self.requests()}
        for request in self.requests():
            engine.add(request)
        while engine.has_work:
            for update in engine.step():
                answers[update.id].add(update)
        return answers

    def run(self, expected: Answers) -> Answers:
        self._expected = expected
        answers = {name: Answer() for name in expected}
        left, engine = self.requests(), self._build()
        live = dict[str, Request]()
        for _ in range(MAX_STEPS):
            for request in left[: self.rng.randint(0, 4)]:
                engine.add(self._sent(request, answers[request.id], engine))
                live[request.id] = request
                del left[0]
            if not left and not engine.has_work:
                self._count_drafts(engine)
                return answers
            for update in engine.step():
                answers[update.id].add(update)
            if self.rng.random() < self.disturbs:
                engine = self._disturb(engine, live, answers)
        raise AssertionError(f"{self.description}: it never ends")

    def _disturb(self, engine: Engine, live: dict[str, Request], answers: Answers) -> Engine:
        kind = self.rng.choice(["preempted", "preempted", "preempted", "aborted", "dropped", "killed", "moved"])
        running = [request for request in engine.scheduler.running if request.beam is None]
        if kind == "preempted" and running:
            engine.scheduler._preempt(self.rng.choice(running))
        elif kind == "aborted" and running and self.rng.random() < 0.3:
            if update := engine.abort(self.rng.choice(running).id):
                answers[update.id].add(update)
        elif kind == "dropped":
            engine._drop_plans()
            engine.scheduler.reset()
        elif kind == "killed":
            self._count_drafts(engine)
            engine = self._build()
            for name, request in live.items():
                if answers[name].finish is None:
                    engine.add(self._sent(request, answers[name], engine))
        elif kind == "moved":
            self._count_drafts(engine)
            engine = self._move(engine, live, answers)
        else:
            return engine
        self.happened[kind] += 1
        return engine

    def _move(self, engine: Engine, live: dict[str, Request], answers: Answers) -> Engine:
        """All requests move to another engine, those that were submitted together at once."""
        target = self._build()
        engine.info = target.info = SimpleNamespace(device="cpu", fingerprint="")  # type: ignore[assignment]
        here, there = KVTransfer(engine), KVTransfer(target)
        left = [name for name in live if name in engine.scheduler.requests]
        while left:
            root = live[left[0]].leader or live[left[0]]
            group = [name for name in left if (live[name].leader or live[name]) is root]
            left = [name for name in left if name not in group]
            for update in move_group(here, there, group):
                answers[update.id].add(update)
            for name in group:
                if answers[name].finish is None:
                    request = self._sent(live[name], answers[name], target)
                    target.add(request)
                    there.arrive(request, staged_name("move", name))
                    self.happened["with its cache"] += request.swapped_out is not None
            there.handle(EndImport("move"))
            here.handle(EndExport(1))
        assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_blocks
        return target

    def _sent(self, request: Request, answer: Answer, engine: Engine) -> Request:
        """As the supervisor sends it to an engine, with the tokens that there are after an engine was killed."""
        leader = request.leader.id if request.leader is not None else None
        given = list(answer.tokens), len(answer.prompt_logprobs)
        message = EngineRequest.of(request, request.id, leader, *given, 0.0)
        spec = request.params.structured_outputs
        constraint = GRAMMARS.make_constraint(spec, message.output) if spec is not None else None
        return message.to_request(engine.scheduler.requests, constraint)

    def _count_drafts(self, engine: Engine) -> None:
        assert engine.controller is not None
        self.num_drafted += engine.controller.drafted.total()
        self.num_accepted += engine.controller.accepted.total()

    def _build(self) -> Engine:
        own: list[Proposer] = [make_suffix(self.repeats)] if self.repeats else []
        settings = {**self.settings, "max_requests": self.batch}
        models: list[ModelProposer] = []
        if self.kind in ("self", "exit", "early exit"):
            engine, models = self._exit_engine(own, settings)
        elif self.kind == "draft":
            engine, models = self._draft_engine(settings)
        elif self.kind:
            engine, models = heads.build_engine(self.config, self.model, OPS, self._heads(), own, **settings)
        else:
            engine = self._plain_engine(settings)
        plugins = [Plugin(name, self._expected, self.rng.randrange(1 << 30), self.raises_in) for name in self.plugins]
        engine.controller = Controller(own, settings["max_tokens"], VOCAB_SIZE, 12.0, models, plugins)
        clock = self._random_clock() if self.measures else lambda: 0.0
        engine.controller._clock = clock
        if not self.measures:
            engine.controller.times = EqualTimes(12.0)
        return engine

    def _random_clock(self) -> Callable[[], float]:
        now = [0.0]

        def read() -> float:
            now[0] += self.rng.expovariate(1000.0) if self.rng.random() < 0.5 else 0.001
            return now[0]

        return read

    def _plain_engine(self, settings: dict[str, Any]) -> Engine:
        tiny = TinyEngine(self.config, model=self.model, ops=OPS, **settings)
        return Engine(tiny.scheduler, tiny.runner, None)  # type: ignore[arg-type]

    def _heads(self) -> dict[str, Any]:
        target = Target(self.model, self.config)
        if self.kind == "block":
            config = heads.block_config(target)
            tensors = heads.block_tensors(config, self.config)
            return {"block": load_block_head(self._write(config, tensors), target, OPS)}
        if "medusa" in self.kind:
            config = heads.medusa_config(target)
            tensors = heads.medusa_tensors(config, self.config, 50 if self.kind.startswith("trimmed") else None)
            return {"medusa": load_medusa(self._write(config, tensors), target, OPS)}
        config = eagle_config(self.kind, target)
        return {"eagle": load_eagle(self._write(config, eagle_tensors(self.kind, config, self.config)), target, OPS)}

    def _write(self, config: Any, tensors: Any) -> Path:
        return heads.write_head(self.folder / f"{self.family} {self.kind}", config, tensors)

    def _exit_engine(self, own: list[Proposer], settings: dict[str, Any]) -> tuple[Engine, list[ModelProposer]]:
        if self.kind == "self":
            found = exits.untrained(1)
        else:
            target = Target(self.model, self.config)
            calibration = [[0.05, 0.4], [0.3, 0.7], [0.8, 0.95]]  # the tiny model's exits are rarely sure
            folder = self.folder / f"{self.family} exit"
            found = exits.load_exit(folder, target, OPS, layer=2, calibration=calibration)
            found = replace(found, exits=self.kind == "early exit", drafts=True)
        engine, _, drafter = exits.build_engine(self.config, self.model, OPS, found, own, **settings)
        assert drafter is not None
        return engine, [drafter]

    def _draft_engine(self, settings: dict[str, Any]) -> tuple[Engine, list[ModelProposer]]:
        draft = self.rng.choice(DRAFT_MODELS[self.family])
        tiny = TinyEngine(self.config, model=self.model, ops=OPS, more_specs=draft.cache_specs(), **settings)
        scheduler, max_tokens = tiny.scheduler, settings["max_tokens"]
        windows = tuple(scheduler.kv.windows)
        shape = BufferShape(
            max_tokens, self.batch, self.config.max_len, windows, settings["block_size"], VOCAB_SIZE, OPS.arrays
        )
        drafter = DraftModel(
            OPS.record(draft, tiny.more_layers, max_tokens), tiny.more_layers, BatchBuffers(shape), OPS, max_tokens,
            lambda: scheduler.kv.pool, scheduler.reserve,
        )  # fmt: skip
        return Engine(scheduler, tiny.runner, None), [drafter]  # type: ignore[arg-type]


def move_group(here: KVTransfer, there: KVTransfer, names: list[str]) -> list[Update]:
    """Let requests leave, and copy their blocks if there is room."""
    updates, exported = here.handle(Export(1, names))
    assert isinstance(exported, Exported)
    reply = there.handle(Import(2, "move", "", exported.num_blocks, exported.requests))[1]
    if isinstance(reply, Done):
        blocks = here.handle(ReadBlocks(3, 1, 0, exported.num_blocks))[1]
        assert isinstance(blocks, Blocks)
        assert there.handle(WriteBlocks(4, "move", 0, blocks.data))[1] == Done(4)
    return updates


def make_suffix(kind: str) -> SuffixProposer:
    """`ngram` is what runs without the extension."""
    suffix = SuffixProposer(only_chains=kind == "chains only")
    if kind == "ngram":
        suffix._texts = ngram
    return suffix


@contextmanager
def asking_often(rng: random.Random) -> Iterator[None]:
    """Models are asked for random numbers of drafts. Random ones are hardly ever right and would not be asked."""
    with patch("quire.speculative.controller.choose_depth", lambda *_: rng.choice([0, 1, 4, 6])):
        yield


def differences(expected: Answers, found: Answers) -> list[str]:
    """The requests whose answers differ. Of an aborted one the beginning counts."""
    return [
        name
        for name, answer in expected.items()
        if (found[name] != answer if found[name].finish is not Finish.ABORT else not begins(answer, found[name]))
    ]


def begins(whole: Answer, part: Answer) -> bool:
    return (
        whole.tokens[: len(part.tokens)] == part.tokens
        and whole.logprobs[: len(part.logprobs)] == part.logprobs
        and whole.prompt_logprobs[: len(part.prompt_logprobs)] == part.prompt_logprobs
    )


def run_world(seed: int, folder: Path, num_requests: int = 14) -> World:
    world = World(seed, folder, num_requests)
    expected = world.expect()
    with asking_often(world.rng):
        different = differences(expected, world.run(expected))
    assert not different, f"world {seed}, {world.description}: {different} differ"
    return world


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("quire").setLevel(logging.CRITICAL + 1)  # proposers fail on purpose
    begin_s, seen, kinds, happened = time.monotonic(), Counter[str](), Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        seed = options.seed
        while seen["requests"] < options.requests:
            world = run_world(seed, Path(folder))
            number = len(world._expected)
            seen.update(worlds=1, requests=number, drafts=world.num_drafted, right=world.num_accepted)
            kinds.update(dict.fromkeys([*world.plugins, world.kind or "no model"], number))
            happened.update(world.happened)
            seed += 1
            if seed % 50 == 0:
                print(f"{time.monotonic() - begin_s:.0f} s  {dict(seen)}", file=sys.stderr, flush=True)
    print(f"{dict(seen)}\nrequests by proposer: {dict(kinds)}\nhappened: {dict(happened)}\nno answer differs")


if __name__ == "__main__":
    main()
