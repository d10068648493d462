"""Structured outputs on the default model: offline, and in the engine's process, also when that dies."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path

import jsonschema
import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.config import DEFAULT_MODEL, EngineConfig
from quire.core.params import StructuredOutputs
from quire.engine.supervisor import EngineCallbacks, Supervised
from quire.errors import BadGrammar
from quire.text.input_processor import InputProcessor
from quire.text.output_processor import OutputProcessor
from quire.text.tokenizers.tokenizer import load_tokenizer

pytestmark = pytest.mark.model

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "country": {"type": "string", "enum": ["France", "Japan", "Peru"]},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "country", "population", "rivers"],
    "additionalProperties": False,
}
PROMPT = "Describe the city of Paris as JSON.\n"


def params(temperature: float, **options) -> SamplingParams:
    spec = StructuredOutputs(**options)
    return SamplingParams(temperature=temperature, seed=7, max_tokens=200, structured_outputs=spec)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
class TestOffline:
    def test_json(self, llm: LLM, temperature: float) -> None:
        options = params(temperature, json=CITY)
        (out,) = llm.generate(PROMPT, options)
        assert out.outputs[0].finish_reason == "stop"
        value = json.loads(out.outputs[0].text)
        jsonschema.validate(value, CITY)
        together = llm.generate([PROMPT, "Lima is", PROMPT], [options, SamplingParams(max_tokens=9), options])
        assert together[0].outputs[0].token_ids == together[2].outputs[0].token_ids == out.outputs[0].token_ids

    def test_regex_choice_and_grammar(self, llm: LLM, temperature: float) -> None:
        choice = ["north", "south", "south-east"]
        outs = llm.generate(
            ["My phone number is", "The wind comes from the", "3 + 4 * 5 = "],
            [
                params(temperature, regex=r"\+\d{2} \d{3} \d{4}"),
                params(temperature, choice=choice),
                params(temperature, grammar='root ::= [0-9]{1,3} (" + " root | ".")'),
            ],
        )
        texts = [out.outputs[0].text for out in outs]
        assert re.fullmatch(r"\+\d{2} \d{3} \d{4}", texts[0])
        assert texts[1] in choice
        assert re.fullmatch(r"(\d{1,3} \+ )*\d{1,3}\.", texts[2]) or outs[2].outputs[0].finish_reason == "length"


def test_samples_of_one_prompt(llm: LLM) -> None:
    options = SamplingParams(n=4, seed=1, max_tokens=200, structured_outputs=StructuredOutputs(json=CITY))
    (out,) = llm.generate(PROMPT, options)
    texts = [answer.text for answer in out.outputs]
    for text in texts:
        jsonschema.validate(json.loads(text), CITY)
    assert len(set(texts)) > 1


def test_a_bad_grammar_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(BadGrammar, match="unclosed group"):
        llm.generate(PROMPT, params(0.0, regex="(a"))


def test_asyncio(llm: LLM) -> None:
    (expected,) = llm.generate(PROMPT, params(0.0, json=CITY))

    async def run() -> str:
        model = AsyncLLM(max_len=2048, kv_memory=0.5)
        try:
            async for out in model.generate(PROMPT, params(0.0, json=CITY)):
                last = out
            return last.outputs[0].text
        finally:
            model.shutdown()

    assert asyncio.run(run()) == expected.outputs[0].text


def test_in_a_process_of_its_own_that_dies_in_the_middle(llm: LLM, default_model: Path) -> None:
    """The new engine compiles the grammar again and goes on from the tokens that have arrived."""
    kinds = [params(0.0, json=CITY), params(1.0, json=CITY), params(1.0, regex="([a-f]{4} ){20}!")]
    expected = [llm.generate(PROMPT, one)[0].outputs[0] for one in kinds]
    tokenizer = load_tokenizer(default_model)
    config = EngineConfig(model=DEFAULT_MODEL, max_len=2048, kv_memory=0.5)
    restarts: list[str] = []

    async def answer(client: Supervised, processor: OutputProcessor, kill_at: int) -> None:
        async for updates in client.submit(processor.requests):
            for update in updates:
                processor.process(update)
            if not restarts and len(processor.output.outputs[0].token_ids) >= kill_at:
                assert client.process_id is not None
                os.kill(client.process_id, signal.SIGKILL)

    async def run() -> list[OutputProcessor]:
        client = Supervised(config, default_model, callbacks=EngineCallbacks(on_restart=restarts.append))
        try:
            facts = await client.start()
            input_processor = InputProcessor(tokenizer, facts.vocab_size, facts.max_len, facts.eos_token_ids)
            processors = [input_processor.process(PROMPT, one) for one in kinds]
            await asyncio.gather(*(answer(client, processor, 12) for processor in processors))
            assert restarts == ["signal SIGKILL"]
            with pytest.raises(BadGrammar, match="unclosed group"):
                await answer(client, input_processor.process(PROMPT, params(0.0, regex="(a")), 1)
            return processors
        finally:
            await client.close()

    answers = [processor.output.outputs[0] for processor in asyncio.run(run())]
    assert [one.token_ids for one in answers] == [one.token_ids for one in expected]
    assert all(one.finish_reason == "stop" for one in answers)
