"""OutputProcessor: updates become outputs, with several tokens in an update and with several samples."""

from __future__ import annotations

import pytest

from quire.core.params import SamplingParams
from quire.core.plan import Detail, TokenLogprobs, Update
from quire.core.request import Finish
from quire.errors import InvalidParams
from quire.text.input_processor import InputProcessor
from quire.text.output_processor import OutputProcessor
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level

pytestmark = pytest.mark.cpu

TOKENIZER = Tokenizer.from_gguf(byte_level())


def input_processor(**options) -> InputProcessor:
    return InputProcessor(TOKENIZER, TOKENIZER.vocab_size, 100, **options)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def scored(tokens: list[int], logprob: float = -1.0) -> list[TokenLogprobs]:
    return [TokenLogprobs((token, logprob, 1), []) for token in tokens]


def test_what_comes_after_a_stop_string_counts_for_nothing() -> None:
    processor = input_processor().process("hi", SamplingParams(stop="x", logprobs=0), "a")
    tokens = encode("wdx") + encode("hd")
    assert processor.process(Update("a", list(tokens), None, Detail(logprobs=scored(tokens))))
    answer = processor.output.outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("wd", "stop", "x")
    assert answer.token_ids == encode("wdx")
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    assert answer.cumulative_logprob == -1.0 * len(answer.token_ids)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("finish", [None, Finish.LENGTH])
def test_a_text_that_is_complete_ends_with_its_token(size: int, finish: Finish | None) -> None:
    """As the only tool call that is allowed: what else its step made, or what came before the abort, does not count."""
    seen: list[str] = []

    def ends(text: str) -> bool:
        seen.append(text)
        return "".join(seen).endswith("wd")

    processor = input_processor().process("hi", SamplingParams(logprobs=0), "a", make_text_end=lambda: ends)
    tokens = [*encode("h"), *encode("w"), *encode("d"), *encode("h"), *encode("x")]
    for first in range(0, len(tokens), size):
        some = tokens[first : first + size]
        processor.process(Update("a", some, finish if first + size >= 5 else None, Detail(logprobs=scored(some))))
    answer = processor.output.outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("hwd", "stop", None)
    assert answer.token_ids == tokens[:3]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 3
    assert answer.cumulative_logprob == -3.0


def test_the_first_sample_alone_tells_the_prompts_logprobs() -> None:
    processor = input_processor().process("hdw", SamplingParams(n=2, prompt_logprobs=0), "a")
    prompt = processor.output.prompt_token_ids
    processor.process(Update("a#0", [], None, Detail(prompt_logprobs=scored(prompt[1:2], -1.0))))
    processor.process(Update("a#1", [], None, Detail(prompt_logprobs=scored(prompt[1:], -2.0))))
    processor.process(Update("a#0", encode("h"), Finish.LENGTH, Detail(prompt_logprobs=scored(prompt[2:], -1.0))))
    found = processor.output.prompt_logprobs
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    assert {entry[token].logprob for token, entry in zip(prompt[1:], found[1:], strict=True) if entry} == {-1.0}
    assert processor.unfinished_ids == ["a#1"]


def test_a_snapshot_does_not_grow() -> None:
    processor: OutputProcessor = input_processor().process("hi", SamplingParams(), "a")
    processor.process(Update("a", encode("w")))
    before = processor.snapshot()
    processor.process(Update("a", encode("d"), Finish.LENGTH))
    assert before.outputs[0].text == "w"
    assert not before.finished
    assert processor.output.outputs[0].text == "wd"


def test_priorities_need_a_scheduler_that_heeds_them() -> None:
    with pytest.raises(InvalidParams, match="order='priority'"):
        input_processor().process("hi", SamplingParams(), "a", priority=1)
    assert input_processor(by_priority=True).process("hi", SamplingParams(), "a", priority=1).requests[0].priority == 1
