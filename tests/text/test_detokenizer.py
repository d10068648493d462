"""Detokenizer: text that is detokenized incrementally equals text that is decoded at once; stop strings."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import InvalidParams
from quire.text.detokenizer import Detokenizer, StopStringScanner
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level, sentencepiece

pytestmark = pytest.mark.cpu

TOKENIZERS = [Tokenizer.from_gguf(byte_level()), Tokenizer.from_gguf(sentencepiece())]
TOKENIZERS.append(Tokenizer.from_gguf(sentencepiece(add_space_prefix=False)))


@st.composite
def answers(draw):
    """A tokenizer and tokens of it: pieces of text, and ids at random."""
    tokenizer = draw(st.sampled_from(TOKENIZERS))
    some_text = st.text("helo wrd é🦙<|im_end|></s>", max_size=12)
    encoded = some_text.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    at_random = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6)
    return tokenizer, [token_id for part in draw(st.lists(encoded | at_random, max_size=5)) for token_id in part]


def cut(draw_from, token_ids: list[int]) -> list[list[int]]:
    """The same tokens in groups."""
    groups = []
    while token_ids:
        size = draw_from.draw(st.integers(0, 4))
        groups.append(token_ids[:size])
        token_ids = token_ids[size:]
    return groups


def run(detokenizer: Detokenizer, groups: list[list[int]]) -> str:
    return "".join([*(detokenizer.push(group) for group in groups), detokenizer.finish()])


def stop_by_definition(tokenizer, token_ids, stops, skip, min_tokens) -> tuple[str | None, int, int]:
    """Try every length: the stop string, where it ends, and how many tokens that took."""
    kept = [t for t in token_ids if not (skip and t in tokenizer.special_token_ids)]
    text = tokenizer.decode(kept, skip_special_tokens=False)
    arrived = []  # for each count of tokens, how many characters are certain
    for count in range(len(token_ids) + 1):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
        arrived.append(len(detokenizer.push(token_ids[:count])))
    arrived[-1] = len(text)
    for end in range(1, len(text) + 1):
        used = next(count for count, length in enumerate(arrived) if length >= end)
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits and used > min_tokens:
            return max(hits, key=len), end, used
    return None, len(text), len(token_ids)


@given(answers(), st.booleans(), st.data())
@settings(deadline=None, max_examples=60)
def test_pieces_make_up_the_whole(answer, skip, data):
    tokenizer, token_ids = answer
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    text = run(detokenizer, cut(data, token_ids))
    assert text == detokenizer.text == tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert detokenizer.num_tokens_used == len(token_ids)


@given(
    answers(),
    st.lists(st.text("helo wé🦙\ufffd<", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
    st.integers(0, 6),
    st.data(),
)
@settings(deadline=None, max_examples=100)
def test_stop_strings_by_definition(answer, stops, skip, include, min_tokens, data):
    tokenizer, token_ids = answer
    detokenizer = Detokenizer(
        tokenizer, stop=stops, skip_special_tokens=skip, include_stop=include, min_tokens=min_tokens
    )
    text = run(detokenizer, cut(data, token_ids))
    hit, end, used = stop_by_definition(tokenizer, token_ids, stops, skip, min_tokens)
    whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert detokenizer.stop_hit == hit
    assert text == detokenizer.text == whole[: end - len(hit) if hit and not include else end]
    assert detokenizer.num_tokens_used == used


def test_an_incomplete_character_is_held_back():
    tokenizer = TOKENIZERS[0]
    first, *rest = tokenizer.encode("🦙")
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token_id]) for token_id in (first, *rest)] == ["", "", "", "🦙"]
    assert detokenizer.push([first]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_text_that_cannot_become_a_stop_string_is_returned():
    tokenizer = TOKENIZERS[0]
    detokenizer = Detokenizer(tokenizer, stop=["hello world!"])
    pushed = [detokenizer.push(tokenizer.encode(text)) for text in ("hello", " world", " ", "x")]
    assert pushed == ["", "", "hello world ", "x"]
    assert detokenizer.finish() == ""


def test_after_a_stop_there_is_nothing():
    tokenizer = TOKENIZERS[0]
    detokenizer = Detokenizer(tokenizer, stop=["wor"])
    assert detokenizer.push(tokenizer.encode("hello world hello")) == "hello "
    assert detokenizer.push(tokenizer.encode("more")) + detokenizer.finish() == ""
    assert (detokenizer.stop_hit, detokenizer.num_tokens_used) == ("wor", 2)


def test_a_continuation_keeps_its_first_space():
    tokenizer = TOKENIZERS[1]
    token_ids = tokenizer.encode("world", add_special_tokens=False)
    assert run(Detokenizer(tokenizer), [token_ids]) == "world"
    assert run(Detokenizer(tokenizer, continues=True), [token_ids]) == " world"


def test_padding_of_the_models_output_has_no_text():
    tokenizer = TOKENIZERS[0]
    assert run(Detokenizer(tokenizer), [[tokenizer.vocab_size + 5], tokenizer.encode("hello")]) == "hello"


def test_a_long_piece_of_text_takes_as_many_calls_as_a_short_one():
    def count_calls(text: str) -> int:
        events: list[str] = []
        scanner = StopStringScanner(["</s>", "Observation:", "\n\nUser:"])
        sys.setprofile(lambda frame, event, argument: events.append(event))
        try:
            scanner.scan(text, may_stop=True)
        finally:
            sys.setprofile(None)
        return len(events)

    assert count_calls("no <stop> in \n here " * 1000) == count_calls("no <stop> in \n here ")


@pytest.mark.parametrize("stop", [[""], ["a", ""], [1]])
def test_an_empty_stop_string_is_refused(stop):
    with pytest.raises(InvalidParams, match="stop string"):
        Detokenizer(TOKENIZERS[0], stop=stop)
