"""However an answer grows, the texts of its tokens put together are the answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.params import SamplingParams
from quire.core.plan import Update
from quire.core.request import Finish
from quire.server.tgi.output import TokenTexts
from quire.text.input_processor import InputProcessor
from quire.text.output_processor import OutputProcessor
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level, sentencepiece

pytestmark = pytest.mark.cpu

TOKENIZERS = [Tokenizer.from_gguf(byte_level()), Tokenizer.from_gguf(sentencepiece())]


def open_prompt(tokenizer: Tokenizer, stop: list[str]) -> OutputProcessor:
    intake = InputProcessor(tokenizer, tokenizer.vocab_size, 1 << 20)
    params = SamplingParams(max_tokens=None, stop=stop, include_stop_str_in_output=bool(stop))
    return intake.process({"prompt_token_ids": [0]}, params, "one")


@st.composite
def answers(draw):
    """A tokenizer, tokens of it in groups, and stop strings."""
    tokenizer = draw(st.sampled_from(TOKENIZERS))
    some_text = st.text("helo wrd é🦙", max_size=12)
    encoded = some_text.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    at_random = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6)
    groups = draw(st.lists((encoded | at_random).filter(bool), min_size=1, max_size=6))
    stop = draw(st.lists(st.text("helo wrd", min_size=1, max_size=4), max_size=2))
    return tokenizer, groups, stop


@given(answers())
def test_pieces_are_the_answer(made):
    tokenizer, groups, stop = made
    output_processor = open_prompt(tokenizer, stop)
    answer, texts, pieces = output_processor.output.outputs[0], TokenTexts(tokenizer), []
    for index, group in enumerate(groups):
        finish = Finish.LENGTH if index == len(groups) - 1 else None
        output_processor.process(Update("one", list(group), finish))
        pieces += texts.take(answer)
        assert answer.text.startswith("".join(pieces))
        if answer.finished:
            break
    assert answer.finished
    assert "".join(pieces) == answer.text
    assert len(pieces) == len(answer.token_ids) == texts.num_taken


@given(answers())
def test_grouping_makes_no_difference(made):
    tokenizer, groups, stop = made
    tokens = [token for group in groups for token in group]
    one_by_one, at_once = TokenTexts(tokenizer), TokenTexts(tokenizer)
    first, second = open_prompt(tokenizer, stop), open_prompt(tokenizer, stop)
    pieces: list[str] = []
    for index, token in enumerate(tokens):
        first.process(Update("one", [token], Finish.LENGTH if index == len(tokens) - 1 else None))
        pieces += one_by_one.take(first.output.outputs[0])
    second.process(Update("one", tokens, Finish.LENGTH))
    assert pieces == at_once.take(second.output.outputs[0])


def test_half_a_character_waits_for_its_other_half():
    tokenizer = TOKENIZERS[1]  # has a token for each byte
    tokens = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "é".encode()]
    output_processor, texts = open_prompt(tokenizer, []), TokenTexts(tokenizer)
    answer = output_processor.output.outputs[0]
    output_processor.process(Update("one", tokens[:1]))
    assert texts.take(answer) == [""]
    output_processor.process(Update("one", tokens[1:], Finish.LENGTH))
    assert texts.take(answer) == ["é"]


def test_special_tokens_have_no_text():
    tokenizer = TOKENIZERS[0]
    (special,) = {tokenizer.eos_token_id} & tokenizer.special_token_ids
    output_processor, texts = open_prompt(tokenizer, []), TokenTexts(tokenizer)
    tokens = tokenizer.encode("he", add_special_tokens=False)
    output_processor.process(Update("one", [*tokens, special], Finish.STOP))
    assert texts.take(output_processor.output.outputs[0])[-1] == ""
