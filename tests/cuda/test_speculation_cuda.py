"""Speculation on a GPU: with `exact` tokens and log probabilities are those of plain decoding, bit for bit, whatever is
proposed; in float32 the tokens are without it too. `make test-cuda`, or `pytest tests/cuda/test_speculation_cuda.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cuda import gpu  # skips this module where there is no GPU

from quire.core.params import SamplingParams  # isort: skip
from quire.core.drafts import Drafts
from quire.core.plan import Plan
from quire.core.request import Finish, Request
from quire.engine.client import InProcess
from quire.engine.gpu_runner import GpuRunner
from quire.speculative.controller import Controller
from quire.speculative.drafting import DEPTHS, Drafting
from quire.speculative.proposer import Proposer
from quire.speculative.step_times import EqualTimes
from quire.speculative.suffix import SuffixProposer
from quire.weights.json_config import config_from_json
from tests.tools.eagle import eagle_config, eagle_tensors
from tests.tools.heads import write_head
from tests.tools.oracle import Answer, Oracle, make_chain, make_tree, run

pytestmark = pytest.mark.cuda

VOCAB_SIZE = gpu.SMALL_MODEL["vocab_size"]
Make = Callable[[dict[str, Answer]], Proposer]


def make_many(ahead: list[int], rng: random.Random, vocab_size: int) -> Drafts:
    """The longest chain there can be."""
    return Drafts(ahead[:15], None, [0.9] * len(ahead[:15]))


def make_wrong(ahead: list[int], rng: random.Random, vocab_size: int) -> Drafts:
    return Drafts([(token + 1) % vocab_size for token in ahead[:7]], None, [0.9] * len(ahead[:7]))


PROPOSERS: dict[str, Make] = {
    "chains": lambda answers: Oracle(answers, make_chain, VOCAB_SIZE),
    "trees": lambda answers: Oracle(answers, make_tree, VOCAB_SIZE),
    "many": lambda answers: Oracle(answers, make_many, VOCAB_SIZE),
    "wrong": lambda answers: Oracle(answers, make_wrong, VOCAB_SIZE),
    "suffix": lambda answers: SuffixProposer(),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def start(model: Path, **options: Any) -> InProcess:
    return gpu.start(model, **{"kv_memory": 1.0, "max_len": 2048, "max_requests": 32} | options)


def draw_requests(seed: int, count: int) -> list[Request]:
    """Any of the fields that a draft could break, several answers to a prompt, and prefixes that are shared."""
    rng, requests = random.Random(seed), list[Request]()
    shared_prefix = [rng.randrange(2, VOCAB_SIZE) for _ in range(300)]
    while len(requests) < count:
        number = len(requests)
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.7, 1.1]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 0, 20]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            logit_bias=rng.choice([None, None, {7: 3.0}]),
            min_tokens=rng.choice([0, 4]),
            stop_token_ids=rng.choice([[], list(range(2, 60))]),
            logprobs=rng.choice([None, 0, 3]),
            ignore_eos=True,
        )
        phrase = [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randint(1, 9))]
        prompt = shared_prefix[: rng.choice([0, 0, 33, 300])] + phrase * rng.randint(1, 6)
        leader = None
        for sample in range(3 if rng.random() < 0.15 else 1):
            request = Request(
                f"{number}#{sample}", prompt, params, max_tokens=rng.randint(4, 40), seed=31 * number + sample,
                bad_word_ids=((7,), (8, 9)) if rng.random() < 0.1 else (), leader=leader,
            )  # fmt: skip
            leader = leader or request
            requests.append(request)
    return requests[:count]


def speculate(client: InProcess, proposer: Proposer) -> Controller:
    """Verify all that is proposed."""
    controller = Controller([proposer], 1024, VOCAB_SIZE, 256.0, max_drafts=15, is_pipelined=True)
    controller.times, controller._clock = EqualTimes(256.0), lambda: 0.0
    client.engine.controller = controller
    return controller


@pytest.mark.parametrize("options", [{}, {"num_blocks": 260}, {"kv_dtype": "fp8"}, {"max_requests": 3}], ids=str)
@pytest.mark.parametrize("name", PROPOSERS)
def test_with_exact_the_bits_are_those_of_plain_decoding(model: Path, name: str, options: dict[str, Any]) -> None:
    plain_options = {key: value for key, value in options.items() if key == "kv_dtype"}
    plain = start(model, exact=True, speculate="off", dtype="bfloat16", **plain_options)
    expected = run(plain.engine, draw_requests(5, 40))
    client = start(model, exact=True, speculate="suffix", dtype="bfloat16", **options)
    controller = speculate(client, PROPOSERS[name](expected))
    assert run(client.engine, draw_requests(5, 40)) == expected
    assert controller.proposers, "the proposer failed"
    assert name in ("suffix", "wrong") or controller.accepted.total() > 50
    assert client.engine.scheduler.kv.pool.num_free == client.engine.scheduler.kv.pool.num_blocks


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("name", PROPOSERS)
def test_without_exact_the_tokens_are_those_of_plain_decoding_in_float32(
    model: Path, name: str, captures: bool
) -> None:
    expected = run(start(model, speculate="off", dtype="float32").engine, draw_requests(6, 40))
    client = start(model, speculate="suffix", dtype="float32")
    speculate(client, PROPOSERS[name](expected))
    runner = client.engine.runner
    assert isinstance(runner, GpuRunner)
    while captures and runner.idle(1e9):
        pass
    got = run(client.engine, draw_requests(6, 40))
    assert {key: tokens for key, (tokens, _) in got.items()} == {key: tokens for key, (tokens, _) in expected.items()}
    assert {"verify", "trees"} <= {key.kind for key in runner.graphs._captured}


def test_a_controller_that_measures_gives_the_same_tokens(model: Path) -> None:
    """Drafts come and go, and with them gaps between steps."""
    expected = run(start(model, exact=True, speculate="off").engine, draw_requests(7, 60))
    client = start(model, exact=True)
    assert client.engine.controller is not None, "auto speculates with exact"
    assert run(client.engine, draw_requests(7, 60)) == expected
    client.engine.controller.proposers.append(Oracle(expected, make_tree, VOCAB_SIZE))
    again = draw_requests(7, 60)
    assert run(client.engine, again) == expected


def test_neighbours_of_a_step_that_fails_go_on(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = start(model, exact=True)
    launch, failed = client.engine.runner.launch, list[int]()

    def fail(plan: Plan, is_behind: bool = False) -> Any:
        if plan.drafts and not failed:
            failed.append(plan.step)
            raise RuntimeError("the step failed")
        return launch(plan, is_behind)

    monkeypatch.setattr(client.engine.runner, "launch", fail)
    requests = [
        Request(str(number), [5, 6, 7] * 9, SamplingParams(temperature=0.0), max_tokens=60) for number in range(4)
    ]
    expected = run(start(model, exact=True, speculate="off").engine, requests[2:])
    answers = run_two_waves(client, requests)
    assert failed, "something was drafted"
    assert {request.id: answers[request.id] for request in requests[2:]} == {
        name: tokens for name, (tokens, _) in expected.items()
    }


def run_two_waves(client: InProcess, requests: Sequence[Request]) -> dict[str, list[int]]:
    """The second half is added when the first has ended."""
    answers = {request.id: list[int]() for request in requests}
    for wave in (requests[:2], [Request(each.id, each.prompt, each.params, max_tokens=60) for each in requests[2:]]):
        for request in wave:
            client.add(request)
        while client.engine.has_work:
            for update in client.step():
                answers[update.id] += update.tokens
                assert update.finish is not Finish.ABORT
    return answers


HEAD_SHAPES = {"num_hidden_layers": 5}  # the last tapped layer is not the model's last


def write_eagle(folder: Path) -> Path:
    """A random head in the published layout, for the small model."""
    model = config_from_json({**gpu.SMALL_MODEL, **HEAD_SHAPES})
    target: Any = SimpleNamespace(config=model)
    described = eagle_config(
        "eagle3", target, num_attention_heads=8, num_key_value_heads=2, head_dim=64, intermediate_size=1024
    )
    return write_head(folder / "head", described, eagle_tensors("eagle3", described, model))


@pytest.mark.parametrize("exact", [False, True])
def test_a_head_that_drafts_on_the_device_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    """Behind each step that may have drafts, at every depth."""
    options: dict[str, Any] = {"shapes": HEAD_SHAPES, "dtype": "bfloat16" if exact else "float32", "exact": exact}
    expected = run(start(tmp_path, speculate="off", **options).engine, draw_requests(8, 40))
    client = start(tmp_path, speculate=f"eagle:{write_eagle(tmp_path)}", **options)
    rng = random.Random(3)
    monkeypatch.setattr(Drafting, "choose_depth", lambda self, rates, num_rows, ratios: rng.choice(DEPTHS))
    controller = client.engine.controller
    assert controller is not None
    controller.times, controller._clock = EqualTimes(256.0), lambda: 0.0
    got = run(client.engine, draw_requests(8, 40))
    assert controller.drafted["eagle"] > 100
    if exact:
        assert got == expected
    else:
        assert {name: tokens for name, (tokens, _) in got.items()} == {
            name: tokens for name, (tokens, _) in expected.items()
        }
    runner = client.engine.runner
    assert isinstance(runner, GpuRunner)
    assert any(key.depth for key in runner.graphs._captured)
