"""A script: an EAGLE head that drafts on a simulated GPU, end to end. `test_interpreted.py` runs it.

Its drafts are those of the same head on the reference's ops, computed token after token, and answers are those of plain
decoding.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.kernels import simulated_gpu  # before what imports Triton's kernels

from quire.core.drafts import Drafts  # isort: skip
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.gpu_drafter import GpuDrafter
from quire.engine.gpu_graphs import Key
from quire.engine.gpu_runner import GpuRunner
from quire.kernels import Kernels, select_torch
from quire.kernels.cuda.attention.split_kv import PADDING_ROW
from quire.kernels.cuda.drafting import Kept, Places, fill_drafts, keep_states, place_drafts
from quire.kernels.cuda.sampling.accept import MAX_NODES
from quire.kernels.paging import Paging
from quire.kernels.taps import Taps
from quire.models.decoder import Decoder
from quire.speculative.controller import Controller
from quire.speculative.drafting import Drafting
from quire.speculative.proposer import Context
from quire.speculative.step_times import EqualTimes
from quire.weights.eagle import LoadedEagle, load_eagle
from quire.weights.heads import Target
from tests.tools.eagle import eagle_config, eagle_tensors
from tests.tools.heads import write_head
from tests.tools.oracle import Oracle, make_tree, run
from tests.tools.paged import PagedCache

CONFIG = replace(simulated_gpu.LLAMA, num_layers=4, windows=(None,) * 4)
DEPTH = 3
MAX_TOKENS = 12


@dataclass
class Scripted(Drafting):
    """Behind each step that may have drafts, or with pauses."""

    pauses: bool = False
    num_calls: int = 0

    def choose_depth(self, rates: Sequence[float], num_rows: int, ratios: Sequence[float]) -> int:
        self.num_calls += 1
        return 0 if self.pauses and self.num_calls % 3 else DEPTH


def make_requests() -> list[Request]:
    params = [
        SamplingParams(temperature=0.0, logprobs=1), SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.0, repetition_penalty=1.2), SamplingParams(temperature=0.9, top_k=5),
    ]  # fmt: skip
    return [
        Request(str(nth), list(range(7, 20 + 5 * nth)), each, max_tokens=MAX_TOKENS, seed=nth)
        for nth, each in enumerate(params)
    ]


class EveryOther(Oracle):
    """Drafts in every other step, so that the device drafts in the others."""

    num_calls = 0

    def propose(self, contexts: Sequence[Context], max_drafts: Sequence[int]) -> list[Drafts | None]:
        self.num_calls += 1
        return super().propose(contexts, max_drafts) if self.num_calls % 2 else [None] * len(contexts)


class Reference:
    """Drafts by the reference's ops, from the tokens of a request alone."""

    def __init__(self, directory: Path) -> None:
        self.ops = select_torch("cpu")
        self.model = simulated_gpu.build_model(CONFIG, self.ops)
        loaded = load_eagle(directory, Target(self.model, CONFIG), self.ops, "float32")
        assert loaded.output is not None
        assert loaded.draft_ids is not None
        self.head, self.output, self.ids = loaded.head, loaded.output, loaded.draft_ids

    @torch.inference_mode()
    def draft(self, tokens: Sequence[int], depth: int) -> list[int]:
        context, count = torch.tensor(tokens), len(tokens) - 1
        sizes = {"kv_heads": CONFIG.num_kv_heads, "head_dim": CONFIG.head_dim, "num_blocks": 64, "block_size": 8}
        of_target, own = PagedCache(groups=(0,) * CONFIG.num_layers, **sizes), PagedCache(**sizes)  # type: ignore[arg-type]
        taps = Taps(self.head.config.tap_layers)
        self.model(context[:-1], torch.arange(count), of_target.step([(0, count)]), of_target.layers, None, taps)
        features = self.head.fuse(torch.cat(taps.states, dim=1))
        drafts, following, positions, paging = [], context[1:], torch.arange(count), own.step([(0, count)])
        for _ in range(depth):
            states, features = self._run(following, features, positions, paging, own)
            drafts.append(int(self.ids[int(self.output.matmul(states)[-1].argmax())]))
            following, features = torch.tensor(drafts[-1:]), features[-1:]
            positions, paging = positions[-1:] + 1, own.step([(0, 1)])
        return drafts

    def _run(
        self, following: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, paging: Paging, own: PagedCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head(following, features.clone(), positions, paging, own.layers[0])


def build(directory: Path, *, exact: bool, drafting: Drafting | None, captured: bool = False, **options: Any) -> Engine:
    def load(model: Decoder, ops: Kernels) -> LoadedEagle:
        return load_eagle(directory, Target(model, CONFIG), ops, "float32")

    controller = None
    if drafting is not None:
        controller = Controller(
            [], 128, CONFIG.vocab_size, 256.0, max_drafts=15, is_pipelined=True, drafting=drafting
        )  # fmt: skip
        controller.times, controller._clock = EqualTimes(256.0), lambda: 0.0
    engine = simulated_gpu.build_engine(
        CONFIG, exact=exact, controller=controller, load_head=load if drafting is not None else None, **options
    )
    simulated_gpu.capture_all(engine)
    assert isinstance(engine.runner, GpuRunner)
    for size in (8, 32) if captured else ():
        engine.runner.graphs._capture(Key("trees" if exact else "verify", size, 16))
    return engine


def check_drafts(engine: Engine, reference: Reference) -> list[int]:
    """Compare the drafts behind each step with the reference. Returns the list to which the number of each is added."""
    controller, runner, compared = engine.controller, engine.runner, list[int]()
    assert controller is not None
    assert isinstance(runner, GpuRunner)
    drafter = runner._drafter
    assert isinstance(drafter, GpuDrafter)
    propose = controller.propose

    def compare(running: Sequence[Request], may_admit: bool) -> None:
        for request in running:
            if count := controller._on_device.get(request.id, 0):
                entry = runner.buffers.state._indices[request]
                got = drafter.drafts[:count, entry].tolist()
                assert got == reference.draft(request.tokens, count), (request.id, len(request.tokens))
                compared.append(count)
        propose(running, may_admit)

    controller.propose = compare  # type: ignore[method-assign]
    return compared


def check(directory: Path, *, exact: bool) -> None:
    expected = run(build(directory, exact=exact, drafting=None), make_requests())
    wanted = {name: answer if exact else (answer[0], []) for name, answer in expected.items()}
    for drafting, captured, trees in (
        (Scripted("eagle", DEPTH, pauses=True), exact, False),
        (Scripted("eagle", DEPTH), True, True),
    ):
        engine = build(directory, exact=exact, drafting=drafting, captured=captured, prefix_cache=False)
        # Without a graph for drafts nothing is drafted behind them. No key is missing then, nor after a pause.
        compared = check_drafts(engine, Reference(directory))
        assert engine.controller is not None
        if trees:
            engine.controller.proposers.append(EveryOther(expected, make_tree, CONFIG.vocab_size))
        got = run(engine, make_requests())
        assert {name: answer if exact else (answer[0], []) for name, answer in got.items()} == wanted
        assert trees or engine.controller.drafted["eagle"] > 0
        assert len(compared) > 2
        assert not trees or engine.controller.accepted["oracle"] > 0
        assert engine.scheduler.kv.pool.num_free == 200
    # Requests are preempted while states are kept: their keys must not be stored in blocks that others have by then.
    engine = build(directory, exact=exact, drafting=Scripted("eagle", DEPTH, pauses=True), captured=True, num_blocks=11)
    compared = check_drafts(engine, Reference(directory))
    got = run(engine, make_requests())
    assert len(compared) > 2
    assert {name: answer if exact else (answer[0], []) for name, answer in got.items()} == wanted
    assert engine.scheduler.counters.preemptions


def check_keep() -> None:
    """Rows of a step of 4, 1 and 3 tokens, of which a side branch, the only one and the first are right; and after them
    a step of single tokens. The tokens are 10, 11, ..., their slots 100, 101, ..."""
    count, width = 8, 5000  # more than the columns of one program
    rows = torch.tensor([[2, 0, 0, 3, 99, 0], [0, 4, 4, 0, 99, 4], [1, 5, 5, 2, 99, 5]], dtype=torch.int32)
    num_accepted, paths = torch.tensor([0, 1, 2], dtype=torch.int32), torch.zeros(3, MAX_NODES, dtype=torch.int32)
    paths[2, :2], paths[1, 0] = torch.tensor([0, 2], dtype=torch.int32), 1
    entries = torch.tensor([3, 3, 3, 3, 1, 2, 2, 2], dtype=torch.int32)
    last_tokens = torch.tensor([0, 70, 71, 72])
    states = torch.randn(count, width)
    step = {
        "num_accepted": num_accepted, "paths": paths, "tokens": torch.arange(10, 18),
        "positions": torch.tensor([40, 41, 42, 41, 7, 20, 21, 21]), "slots": torch.arange(100, 108), "entries": entries,
        "last_tokens": last_tokens, "states": states,
    }  # fmt: skip
    kept = Kept.allocate(20, width, torch.float32, torch.device("cpu"))
    kept.slots[:] = 55  # what is not right must be marked
    keep_states(kept, 2, rows, 3, 3, **step)
    assert kept.slots[2:10].tolist() == [100, 101, 102, -1, 104, 105, 106, -1]
    right = {2: (0, 11, 40), 3: (1, 13, 41), 4: (3, 72, 42), 6: (4, 70, 7), 7: (5, 17, 20), 8: (7, 71, 21)}
    for index, (source, following, position) in right.items():
        assert torch.equal(kept.states[index], states[source]), index
        assert (int(kept.tokens[index]), int(kept.positions[index])) == (following, position), index
    keep_states(kept, 10, None, 3, 0, **step)
    assert kept.slots.tolist() == [55, 55, 100, 101, 102, -1, 104, 105, 106, -1, 100, 101, 102, *[55] * 7]
    assert kept.tokens[10:13].tolist() == [72, 72, 72]
    assert kept.positions[10:13].tolist() == [40, 41, 42]
    assert torch.equal(kept.states[10:13], states[:3])


def check_places() -> None:
    """A row of 20 computed tokens, three of which are right drafts, with blocks for 26; one without a draft that is
    right; a padding row. Blocks have 8 tokens."""
    rows = torch.tensor([[1, 0, 0, 3, 26, 0], [0, 4, 4, 1, 40, 4], [-1] * 6], dtype=torch.int32)
    num_accepted = torch.tensor([0, 3], dtype=torch.int32)
    starts, seq_lens = torch.tensor([4, 6, 10], dtype=torch.int32), torch.tensor([11, 20], dtype=torch.int32)
    table = torch.tensor([[3, 1, 9, 9], [5, 4, 2, 6]], dtype=torch.int32)
    entries = torch.tensor([7, 7, 7, 7, 8, 8], dtype=torch.int32)
    places = Places.allocate(3, 8, 2, torch.device("cpu"))
    places.slots[:] = 77
    place_drafts(rows, num_accepted, starts, seq_lens, entries, table, 8, 15, places)
    assert places.indices.tolist() == [3, 4, 0]
    assert places.entries.tolist() == [7, 8, 15]
    for nth in range(8):
        first, second = 20 + nth, 10 + nth  # positions of the tokens after the first draft
        assert places.positions[nth].tolist() == [min(first, 25), second, 0]
        block = [5, 4, 2, 6][min(first, 25) // 8]
        of_second = [3, 1, 9, 9][second // 8]
        assert places.slots[nth].tolist() == [
            block * 8 + first % 8 if first < 26 else -1, of_second * 8 + second % 8, -1,
        ]  # fmt: skip
        assert places.lengths[nth].tolist() == [min(first, 25) + 1, second + 1, 0]
        spans = [[] for _ in range(3)]
        for row, begin, end, *_ in places.splits[nth].tolist():
            if row != PADDING_ROW:
                spans[row].append((begin, end))
        for span, length in zip(spans, places.lengths[nth].tolist(), strict=True):
            assert [token for begin, end in span for token in range(begin, end)] == list(range(length))


def check_fill() -> None:
    tokens, drafts = torch.arange(9), torch.arange(100, 130).view(3, 10)
    starts, entries = torch.tensor([0, 3, 4, 9], dtype=torch.int32), torch.tensor([2, 5, 6], dtype=torch.int32)
    fill_drafts(tokens, starts, entries, drafts, 3)
    assert tokens.tolist() == [0, 102, 112, 3, 4, 106, 116, 126, 8]
    entries[:] = -1
    tokens = torch.arange(9)
    fill_drafts(tokens, starts, entries, drafts, 3)
    assert tokens.tolist() == list(range(9))


if __name__ == "__main__":
    simulated_gpu.install()
    check_keep()
    check_places()
    check_fill()
    with TemporaryDirectory() as folder:
        model = simulated_gpu.build_model(CONFIG, select_torch("cpu"))
        config = eagle_config("eagle3", Target(model, CONFIG))
        head = write_head(Path(folder), config, eagle_tensors("eagle3", config, CONFIG))
        check(head, exact="exact" in sys.argv)
