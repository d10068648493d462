"""A model's own sampling defaults, and a vocabulary padded beyond the tokenizer's, from the file to the answer."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.beam_search import BeamSearchParams
from quire.text.templates.chat_template import ChatTemplate
from tests.server.running import Running
from tests.tools.tiny_models import tiny_text_gguf

pytestmark = pytest.mark.cpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SMALL = {"max_len": 64, "num_blocks": 64}  # a block for each of 64 beams


@pytest.fixture(scope="module")
def greedy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says of itself that the likeliest token is to be taken."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return tiny_text_gguf(path, **{"general.sampling.temp": 0.0, "general.sampling.top_k": 5})


@pytest.fixture(scope="module")
def tiny_llm(greedy_model: Path):
    with LLM(str(greedy_model), **SMALL) as llm:
        yield llm


def test_offline_answers_use_them(tiny_llm: LLM) -> None:
    found = tiny_llm.get_default_sampling_params()
    assert (found.temperature, found.top_k, found.top_p) == (0.0, 5, 1.0)
    (made,) = tiny_llm.generate(["hello"])
    (expected,) = tiny_llm.generate(["hello"], SamplingParams(temperature=0.0))
    assert made.outputs[0].token_ids == expected.outputs[0].token_ids
    *_, streamed = tiny_llm.stream("hello")
    assert streamed.outputs[0].token_ids == expected.outputs[0].token_ids


def test_async_answers_use_them(greedy_model: Path, tiny_llm: LLM) -> None:
    llm = AsyncLLM(str(greedy_model), **SMALL)

    async def ask() -> list[int]:
        return [out.outputs[0].token_ids async for out in llm.generate("hello")][-1]

    try:
        assert asyncio.run(ask()) == tiny_llm.generate(["hello"])[0].outputs[0].token_ids
    finally:
        llm.shutdown()


def test_the_command_line_uses_them(greedy_model: Path, tiny_llm: LLM) -> None:
    command = [sys.executable, "-m", "quire", "generate", str(greedy_model), "-p", "hello", "--max-tokens", "16"]
    command += ["--max-len", "64", "--num-blocks", "32", "--json"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    (made,) = json.loads(printed)["outputs"]
    assert made["outputs"][0]["token_ids"] == tiny_llm.generate(["hello"])[0].outputs[0].token_ids


def test_info_shows_them(greedy_model: Path) -> None:
    command = [sys.executable, "-m", "quire", "info", str(greedy_model), "--json"]
    model = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)["model"]
    assert model["sampling"]["temperature"] == 0.0
    assert model["sampling"]["top_k"] == 5
    assert model["sampling_from"] == "the model"


def test_the_server_uses_them(greedy_model: Path, tiny_llm: LLM) -> None:
    (expected,) = tiny_llm.generate(["hello"])
    with Running("--max-len", "64", "--num-blocks", "32", model=str(greedy_model)) as server, server.client() as http:
        fields = {"prompt": "hello", "return_token_ids": True, "temperature": None, "priority": None, "user": "me"}
        first, second = (http.post("/v1/completions", json=fields).json()["choices"][0] for _ in range(2))
        drawn = {**fields, "temperature": 5.0, "top_k": 0, "seed": 1}
        other = http.post("/v1/completions", json=drawn).json()["choices"][0]
    assert first["token_ids"] == second["token_ids"] == expected.outputs[0].token_ids
    assert other["token_ids"] != first["token_ids"]


def test_every_id_of_a_padded_vocabulary_can_be_reported(tiny_llm: LLM) -> None:
    vocab_size = tiny_llm.info.config.vocab_size
    (made,) = tiny_llm.generate(
        ["hello"], SamplingParams(max_tokens=2, logprobs=vocab_size, prompt_logprobs=vocab_size)
    )
    padded = range(tiny_llm.get_tokenizer().vocab_size, vocab_size)
    for position in [*made.outputs[0].logprobs, *made.prompt_logprobs[1:]]:
        assert len(position) == vocab_size
        assert {position[token].decoded_token for token in padded} == {""}


def test_a_beam_may_hold_padded_ids(tiny_llm: LLM) -> None:
    padded = tiny_llm.get_tokenizer().vocab_size
    params = BeamSearchParams(beam_width=64, max_tokens=3, ignore_eos=True)
    found = tiny_llm.beam_search(["hello", "a b c", "xyz", "The end.", "1 2 3", "Q"], params)
    assert any(token >= padded for made in found for beam in made.sequences for token in beam.tokens)


def test_a_chat_template_is_compiled_once(tiny_llm: LLM, monkeypatch) -> None:
    made: list[str] = []

    class Counted(ChatTemplate):
        def __init__(self, source: str, *args: object) -> None:
            super().__init__(source, *args)  # type: ignore[arg-type]
            made.append(source)

    monkeypatch.setattr("quire.text.templates.chat_template.ChatTemplate", Counted)
    conversation = [{"role": "user", "content": "hello"}]
    source = "{{ messages[0].content }}"
    answers = tiny_llm.chat([conversation] * 3, SamplingParams(max_tokens=1), chat_template=source)
    assert [answer.prompt for answer in answers] == ["hello"] * 3
    assert made == [source]
