"""Replays on the default model: equal answers, and each change found at its token with its reason."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.bench.replay import replay
from quire.cli.main import make_parser
from quire.config import EngineConfig
from quire.errors import InvalidParams
from quire.trace.diff import Comparison, compare
from quire.trace.format import Arrival, End, Step
from quire.trace.reader import read_recording
from quire.trace.recording import Recording
from tests.tools.recordings import engine, header, recording
from tests.tools.tiny_models import tiny_text_gguf

pytestmark = pytest.mark.model

CONFIG = {"max_len": 256, "num_blocks": 400, "max_requests": 64}
COUNT = 200


def load(count: int = COUNT, **changes: dict[str, object]) -> Recording:
    """Requests, and no tokens of their answers. One in five has a second answer; some have a format or penalties, some
    are a beam search."""
    rng = random.Random(3)
    lines: list[Arrival] = []
    for number in range(count):
        prompt = [rng.randrange(100, 20_000) for _ in range(rng.randint(2, 8))]
        params: dict[str, object] = {"temperature": (number % 2) * 0.9, "max_tokens": rng.randint(2, 5)}
        if number % 10 == 3:
            params["structured_outputs"] = {"regex": "[a-z ]{3,40}"}
        if number % 10 == 5:
            params |= {"repetition_penalty": 1.2, "logit_bias": {"30": 4.0}, "top_k": 20}
        if number % 20 == 7:
            params = {"use_beam_search": True, "n": 2, "temperature": 0.0, "max_tokens": 3}
        line = Arrival(id=str(number), at=number / 100, seed=number, prompt=prompt, params=params)
        line.max_tokens = int(params["max_tokens"])  # type: ignore[call-overload]
        for name, value in changes.get(f"r{number}", {}).items():
            setattr(line, name, value)
        lines.append(line)
        if number % 5 == 0:
            lines.append(Arrival(id=f"{number}b", at=number / 100, seed=number + 1000, leader=str(number)))
    return recording(*lines, *(End(id=line.id, at=99.0, finish="length") for line in lines))


def run(made: Recording, path: Path, save: Path | None = None, **options: object) -> Recording:
    config = EngineConfig(**CONFIG | options)
    return replay(made, config, path, speed=float("inf"), report=lambda done, total: None, save=save)


@pytest.fixture(scope="module")
def first(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    path = tmp_path_factory.mktemp("first") / "a"
    run(load(), default_model, path)
    return read_recording(path)


@pytest.fixture(scope="module")
def few(default_model: Path) -> Recording:
    return run(load(24), default_model)


def test_two_hundred_requests_replay_to_identical_tokens(first, default_model):
    assert len(first.requests) == COUNT + COUNT // 5
    assert first.is_closed
    assert {name: request.seed for name, request in first.requests.items()} == {
        name: request.seed for name, request in load().requests.items()
    }
    found = compare(first, run(first, default_model, max_requests=16, max_tokens_per_step=48, speculate="off"))
    assert found.identical
    assert found.num_compared == len(first.requests)
    assert found.num_cut == 0
    assert found.num_tokens > 500


def one_changed(few: Recording, path: Path, **change: object) -> Comparison:
    """Request 11 is changed; the others are as they were."""
    return compare(few, run(load(24, r11=change), path))


def test_a_changed_seed(few, default_model):
    found = one_changed(few, default_model, seed=4711)
    (difference,) = found.differences
    assert (difference.first_id, difference.reasons[0].cause) == ("11", "seed")
    check_place(few, difference)


def test_a_changed_prompt_token(few, default_model):
    prompt = [*few.requests["11"].prompt]
    prompt[1] = 4711
    found = one_changed(few, default_model, prompt=prompt)
    (difference,) = found.differences
    assert (difference.first_id, difference.reasons[0].cause) == ("11", "prompt")
    assert difference.reasons[0].detail.startswith("token 1 is ")
    check_place(few, difference)


def test_another_type_of_cache(few, default_model):
    found = compare(few, run(load(24), default_model, kv_dtype="int8"))
    assert found.differences
    assert found.causes == {"config": len(found.differences)}
    assert found.differences[0].reasons[0].detail == 'kv_dtype is "auto" and "int8"'
    for difference in found.differences:
        if difference.first_place is not None:
            check_place(few, difference)


def check_place(first, difference):
    """The answers agree up to the token, and the named step has made it."""
    answer = first.requests[difference.first_id].tokens
    assert answer[difference.token] == difference.first_token != difference.second_token
    (step,) = [step for step in first.steps if step.step == difference.first_place.step]
    assert difference.first_token in step.tokens[difference.first_id]
    assert difference.first_place.batch == step.requests


def test_an_anonymous_recording_replays_with_its_lengths(default_model):
    shared = ["ab", "cd"]
    made = recording(
        Arrival(id="0", at=0.0, seed=1, num_prompt=40, blocks=[*shared, "x"], max_tokens=9),
        Arrival(id="1", at=0.0, seed=1, num_prompt=35, blocks=[*shared, "y"], max_tokens=9, tenant="t"),
        Arrival(id="2", at=9.0, seed=1, num_prompt=35, blocks=["z", "y", "w"], max_tokens=0),
        Arrival(id="3", at=9.0, seed=1, num_prompt=3, blocks=["v"], max_tokens=5,
                params={"use_beam_search": True, "n": 2, "temperature": 0.0}),
        *(
            Step(step=1, at=1, done=2, requests=[name], starts=[0], counts=[1], yields=[1], num_tokens={name: count})
            for name, count in (("0", 6), ("1", 2))
        ),
        End(id="3", at=9.0, finish="stop", beam_lengths=[2, 4]),
        head=header(anonymous=True),
    )  # fmt: skip
    replayed = run(made, default_model)
    assert [request.num_prompt for request in replayed.requests.values()] == [40, 35, 35, 3]
    assert [len(request.tokens) for request in replayed.requests.values()] == [6, 2, 0, 0]
    assert max(map(len, replayed.requests["3"].answers)) <= 4
    first, second = (replayed.requests[name].prompt for name in "01")
    assert first[:32] == second[:32]
    assert first[32:35] != second[32:]


REFUSED: dict[str, tuple[Callable[[], Recording], str]] = {
    "an empty recording": (lambda: recording(), "no request in it"),
    "a token that the model does not have": (
        lambda: load(1, r0={"prompt": [2**31 - 1]}), "Request 0 cannot be replayed.*prompt_token_ids holds 2147483647"
    ),
    "a prompt that is too long": (lambda: load(1, r0={"prompt": [5] * 300}), "Request 0 .*300 tokens"),
    "parameters that are wrong": (lambda: load(1, r0={"params": {"temperature": -1}}), "Request 0 .*temperature is -1"),
    "a parameter that does not exist": (lambda: load(1, r0={"params": {"warmth": 1}}), "Request 0 .*warmth"),
    "a priority without an order": (lambda: load(1, r0={"priority": 3}), "Request 0 .*priority is 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replayed_is_refused(name, default_model):
    made, expected = REFUSED[name]
    with pytest.raises(InvalidParams, match=expected):
        run(made(), default_model)


def test_the_command_replays_with_the_recorded_options(default_model, tmp_path, capsys):
    small = load(6)
    small.engines = [engine(config={"model": str(default_model), **CONFIG})]
    save, again = tmp_path / "a", tmp_path / "b"
    run(small, default_model, save)
    command(["trace", "replay", str(save), "--speed", "inf", "--max-requests", "2", "--save", str(again), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["identical"]
    assert found["num_compared"] == 8
    assert read_recording(again).engine.max_requests == 2
    assert read_recording(again).engine.max_len == 256, "as it was recorded"


def command(words: list[str]) -> None:
    arguments = make_parser(words).parse_args(words)
    arguments.run(arguments)


class TestQuantization:
    """A tiny model of random weights in full precision, the same one rounded, and a file with other weights."""

    def answers(self, path: Path, **options: object) -> Recording:
        lines = [
            Arrival(id=str(number), at=0.0, seed=number, max_tokens=24, prompt=[number + 40, 50, 60],
                    params={"temperature": 0.0, "max_tokens": 24, "ignore_eos": True})
            for number in range(6)
        ]  # fmt: skip
        ends = [End(id=line.id, at=9.0, finish="length") for line in lines]
        return replay(
            recording(*lines, *ends), EngineConfig(model=str(path), max_len=64, num_blocks=40, **options), path,
            speed=float("inf"), report=lambda done, total: None,
        )  # fmt: skip

    def test_rounding_while_the_model_is_loaded(self, tmp_path):
        path = tiny_text_gguf(tmp_path / "a.gguf")
        plain = self.answers(path)
        assert compare(plain, self.answers(path)).identical
        found = compare(plain, self.answers(path, quantize="int4"))
        assert found.causes == {"config": len(found.differences)}
        assert found.differences[0].reasons[0].detail == 'quantize is "none" and "int4"'
        for difference in found.differences:
            check_place(plain, difference)

    def test_another_file(self, tmp_path):
        path, other = tiny_text_gguf(tmp_path / "a.gguf"), tiny_text_gguf(tmp_path / "b.gguf", embedding_scale=0.04)
        plain = self.answers(path)
        found = compare(plain, self.answers(other))
        assert found.causes == {"weights": len(found.differences)}
        assert "whose files differ" in found.differences[0].reasons[0].detail
        for difference in found.differences:
            check_place(plain, difference)
