"""InputProcessor: what reaches the engine of a request's words and tokens."""

from __future__ import annotations

import pytest

from quire.core.params import SamplingParams
from quire.text.input_processor import InputProcessor
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level

pytestmark = pytest.mark.cpu

TOKENIZER = Tokenizer.from_gguf(byte_level())


def test_tokens_that_the_model_does_not_have_are_not_banned() -> None:
    """A tokenizer may have more tokens than the model has logits. Such an id would end the whole step."""
    words = {word: TOKENIZER.encode(word, add_special_tokens=False) for word in ("a", "h")}
    low, high = sorted(words, key=lambda word: max(words[word]))
    vocab_size = max(words[high])
    assert max(words[low]) < vocab_size
    processor = InputProcessor(TOKENIZER, vocab_size, 100, eos_token_ids=(3, vocab_size + 7))
    params = SamplingParams(bad_words=[low, high], min_tokens=1)
    (request,) = processor.process({"prompt_token_ids": [0]}, params).requests
    assert tuple(words[low]) in request.bad_word_ids
    assert all(max(ids) < vocab_size for ids in request.bad_word_ids)
    assert 3 in request.end_token_ids
    assert max(request.end_token_ids) < vocab_size
