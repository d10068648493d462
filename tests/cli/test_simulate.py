"""`quire simulate` and `quire plan` with numbers that no load and no engine has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quire.bench.serve.traces import MAX_TOKENS, TraceRequest
from quire.bench.simulate import arrivals
from quire.cli import load
from quire.cli.main import make_parser
from quire.errors import InvalidParams
from tests.capacity.test_simulator import PROFILE

pytestmark = pytest.mark.cpu


def run(folder: Path, *words: str) -> None:
    replace(PROFILE, model="smollm2:135m").save(folder / "p.json")
    given = ["simulate", "--profile", str(folder / "p.json"), "--json", *words]
    arguments = make_parser(given).parse_args(given)
    arguments.run(arguments)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--rate", "1e-300"], "--rate is 1e-300"),
        (["--rate", "1e300"], "--rate is 1e"),
        (["--rate", "nan"], "--rate is nan"),
        (["--rate", "5", "--prompt-tokens", "999999999"], "--prompt-tokens is 999999999"),
        (["--rate", "5", "--output-tokens", "100000000"], "--output-tokens is 100000000"),
        (["--rate", "5", "--num-requests", "1000000000000"], "--num-requests is"),
        (["--rate", "5", "--replicas", "1000000"], "--replicas is 1000000"),
        (["--rate", "5", "--num-blocks", "2000000000"], "num_blocks is 2,000,000,000; a simulation has at most"),
    ],
)
def test_absurd_numbers_are_refused(words: list[str], expected: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParams, match=expected):
        run(tmp_path, *words)


def test_a_plan_of_absurd_prompts_is_refused() -> None:
    given = ["plan", "--prompt-tokens", "999999999999"]
    arguments = make_parser(given).parse_args(given)
    with pytest.raises(InvalidParams, match="--prompt-tokens is 999999999999"):
        arguments.run(arguments)


def test_times_that_are_too_far_apart_are_refused(tmp_path: Path) -> None:
    trace = tmp_path / "far.jsonl"
    rows = [{"timestamp": at, "input_length": 5, "output_length": 5, "hash_ids": [0]} for at in (1e13, -1e6)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InvalidParams, match="too far apart"):
        run(tmp_path, "--trace", str(trace))
    assert load.MAX_TOKENS == MAX_TOKENS


def test_ids_beyond_a_prompt_are_not_laid_out() -> None:
    """A line may name any number of blocks."""

    class Blocks(tuple[int, ...]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            raise AssertionError("all of them are read")

    (made,) = arrivals([TraceRequest(0.0, 5, 1, Blocks(range(1000)))])
    assert len(made.prompt) == 5
