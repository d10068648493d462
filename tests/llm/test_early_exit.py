"""Early exit offline: texts, stop strings, samples, counts and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.errors import InvalidParams
from quire.weights.heads import Target
from quire.weights.loader import load_model
from tests.tools.exits import exit_config, exit_tensors
from tests.tools.heads import write_head
from tests.tools.native import kernels_of
from tests.tools.tiny_models import tiny_text_gguf

pytestmark = pytest.mark.cpu

PARAMS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model, and a head of which every token may exit."""
    directory = tmp_path_factory.mktemp("exit")
    path = tiny_text_gguf(directory / "model.gguf")
    loaded = load_model(path, dtype="float32", ops=kernels_of())
    config = exit_config(Target(loaded.model, loaded.config), calibration=[[0.0, 0.99]])
    write_head(directory / "head", config, exit_tensors(config, loaded.config, 90))
    return {"model": str(path), "exit_head": str(directory / "head"), "num_blocks": 64, "max_requests": 4}


def test_texts_and_counts(options: dict[str, Any]) -> None:
    llm = LLM(**options)
    plain, exited = (llm.generate("hello world", SamplingParams(**PARAMS, early_exit=c))[0] for c in (None, 0.9))
    assert plain.num_exited_tokens == 0
    assert exited.num_exited_tokens == 30 - 1 - 3
    text, ids = exited.outputs[0].text, exited.outputs[0].token_ids
    assert len(ids) == 30
    stop = text[12:15]
    (stopped,) = llm.generate("hello world", SamplingParams(**PARAMS, early_exit=0.9, stop=stop))
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert stopped.outputs[0].stop_reason == stop
    assert 0 < stopped.num_exited_tokens < exited.num_exited_tokens
    params = {**PARAMS, "temperature": 1.0, "seed": 3}
    (samples,) = llm.generate("hello world", SamplingParams(**params, early_exit=0.9, n=3))
    assert samples.num_exited_tokens == 3 * 26
    assert len({answer.text for answer in samples.outputs}) == 3
    (first,) = llm.generate("hello world", SamplingParams(**params, early_exit=0.9))
    assert first.outputs[0].token_ids == samples.outputs[0].token_ids


def test_without_an_exit_head_it_is_refused(options: dict[str, Any]) -> None:
    llm = LLM(**{**options, "exit_head": None})
    with pytest.raises(InvalidParams, match="no exit head"):
        llm.generate(["hello", "world"], SamplingParams(early_exit=0.9))
    assert llm.generate("hello", SamplingParams(max_tokens=2))[0].outputs[0].token_ids


def test_the_command_line(options: dict[str, Any], capsys, monkeypatch) -> None:
    words = ["generate", options["model"], "-p", "hello world", "--temperature", "0", "--max-tokens", "12", "--json"]
    more = ["--exit-head", options["exit_head"], "--early-exit", "0.9", "--num-blocks", "64"]
    monkeypatch.setattr("sys.argv", ["quire", *words, *more])
    main()
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    assert output["early_exit_tokens"] > 5
