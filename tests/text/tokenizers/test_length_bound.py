"""LengthBound: the lower bound against the real number of tokens, and prompts that it refuses."""

from __future__ import annotations

import random
import threading
import time
import unicodedata

import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers

from quire.core.params import SamplingParams
from quire.errors import PromptTooLong
from quire.text.input_processor import InputProcessor
from quire.text.tokenizers.length_bound import find_length_bound
from quire.text.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.text.vocabularies import byte_level, sentencepiece

pytestmark = pytest.mark.cpu


def texts(tokenizer):
    """Every token many times over, and random ones."""
    for token in range(tokenizer.vocab_size):
        yield tokenizer.decode([token], skip_special_tokens=False) * 40
    draw = random.Random(0)
    for _ in range(50):
        yield tokenizer.decode(draw.choices(range(tokenizer.vocab_size), k=60), skip_special_tokens=False)
    yield unicodedata.normalize("NFD", "각ΐé" * 50)
    yield "".join(map(chr, range(32))) * 20


@pytest.mark.parametrize(
    "metadata", [byte_level(), byte_level(pre="qwen2"), sentencepiece(), sentencepiece(add_space_prefix=False)]
)
def test_no_text_becomes_fewer_tokens(metadata):
    tokenizer = Tokenizer.from_gguf(metadata)
    bound = find_length_bound(tokenizer.backend)
    for text in texts(tokenizer):
        assert bound.min_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False)), text


def test_the_default_model_has_a_bound(default_model):
    tokenizer = load_tokenizer(default_model)
    bound = find_length_bound(tokenizer.backend)
    assert bound.min_tokens("word " * 100_000) > 1000
    for text in ("#" * 8000, "\x04\x06" * 1000, "a\U00050000" * 500, "\n" + " " * 8000):
        assert bound.min_tokens(text) <= len(tokenizer.encode(text)), text[:10]


def test_no_bound_where_text_may_vanish():
    strips = Tokenizer.from_gguf(byte_level()).backend
    strips.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    lowers = Tokenizer.from_gguf(byte_level()).backend
    lowers.normalizer = normalizers.StripAccents()
    drops = Tokenizer.from_gguf(byte_level()).backend
    drops.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
    assert [find_length_bound(backend) for backend in (strips, lowers, drops)] == [None] * 3


def test_a_text_that_cannot_fit_is_not_encoded():
    tokenizer = Tokenizer.from_gguf(byte_level())
    input_processor = InputProcessor(
        tokenizer, tokenizer.vocab_size, 100, length_bound=find_length_bound(tokenizer.backend)
    )
    with pytest.raises(PromptTooLong, match=r"2,600 characters, which are at least 200 tokens.* 100"):
        input_processor.check_length("a" * 2600)
    input_processor.check_length("a" * 99)
    input_processor.check_length("<|endoftext|>" * 99)


def test_too_many_token_ids_are_not_looked_at_one_by_one():
    tokenizer = Tokenizer.from_gguf(byte_level())
    input_processor = InputProcessor(tokenizer, tokenizer.vocab_size, 100)
    with pytest.raises(PromptTooLong, match="200 tokens"):
        input_processor.process({"prompt_token_ids": [-1] * 200}, SamplingParams())


def test_other_threads_run_while_a_text_is_encoded(default_model):
    tokenizer, ticks, done = load_tokenizer(default_model), [], threading.Event()

    def tick():
        while not done.is_set():
            time.sleep(0.001)
            ticks.append(1)

    text = "The quick brown fox jumps over the lazy dog. " * 20_000
    for work in (tokenizer.encode, tokenizer.encode_offsets):
        done.clear()
        ticking = threading.Thread(target=tick)
        ticking.start()
        before = len(ticks)
        work(text)
        after = len(ticks)
        done.set()
        ticking.join()
        assert after - before > 10
