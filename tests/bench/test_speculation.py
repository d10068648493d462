"""`quire bench speculation`: what it reads, and what it reports."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.bench.speculation import read_prompts, run
from quire.config import EngineConfig, SpeculationMethod, parse_speculate
from quire.errors import InvalidParams

pytestmark = pytest.mark.cpu


def test_prompts_are_read_by_category(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "category": "x"}\n\n{"turns": ["b", "c"], "category": "x"}\n{"prompt": "d"}\n')
    assert read_prompts(path) == {"x": ["a", "b"], "prompts": ["d"]}


@pytest.mark.parametrize("text", ["mtp:", "eagle", "", "{}", "[1]", "nothing", '{"turns": []}'])
def test_a_file_without_prompts_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidParams):
        read_prompts(path)


def test_answers_are_the_same_and_counted(default_model: object) -> None:
    document = run(EngineConfig(), None, max_prompts=1, batch=2, output_tokens=24, temperature=0.8)
    *_, every = document["rows"]
    assert every["kind"] == "all"
    assert every["num_prompts"] == len(document["rows"]) - 1
    assert every["different"] == 0
    assert 0 <= every["accepted"] <= every["drafted"]


def test_with_speculation_off_there_is_nothing_to_compare(default_model: object) -> None:
    with pytest.raises(InvalidParams, match="nothing to compare"):
        run(EngineConfig(speculate="off"), None, max_prompts=1, batch=1, output_tokens=4, temperature=0.0)


def test_methods_are_parsed() -> None:
    assert parse_speculate("off") is None
    assert parse_speculate("auto") == []
    assert parse_speculate("draft:a/b.gguf,auto,my.module:Class,block:C:/heads,medusa:~/heads,mtp") == [
        SpeculationMethod("draft", "a/b.gguf"),
        SpeculationMethod("plugin", "my.module:Class"),
        SpeculationMethod("block", "C:/heads"),
        SpeculationMethod("medusa", "~/heads"),
        SpeculationMethod("mtp", ""),
    ]


@pytest.mark.parametrize(
    "text", ["", "on", "off,auto", "draft:", "block:", "module:", ":Class", "a b:C", "module:3", None, 7]
)
def test_other_methods_are_refused(text: object) -> None:
    with pytest.raises(InvalidParams, match="speculate"):
        EngineConfig(speculate=text)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["no_such_module:Class", "json:Class", "collections:Counter", "json:loads"])
def test_a_plug_in_that_cannot_be_used_is_refused(name: str) -> None:
    from quire.engine.speculation import load_plugin

    with pytest.raises(InvalidParams, match=name):
        load_plugin(name)


def test_on_a_gpu_a_named_method_is_refused() -> None:
    from quire.engine.speculation import build_controller

    ops: Any = SimpleNamespace(device="cuda", native=None)
    assert build_controller(EngineConfig(), ops, 64, 97, []) is None
    with pytest.raises(InvalidParams, match="on a GPU"):
        build_controller(EngineConfig(speculate="module:Class"), ops, 64, 97, [])
