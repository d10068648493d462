"""Markers that are special tokens, which the detokenizer must keep."""

from __future__ import annotations

import pytest

from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tools.formats import HERMES, LLAMA, MISTRAL_NAMED, special_markers
from tests.text.vocabularies import CONTROL, USER_DEFINED, byte_level

pytestmark = pytest.mark.cpu


def test_special_markers():
    plain = byte_level()
    tokens, types = (list(plain[f"tokenizer.ggml.{key}"]) for key in ("tokens", "token_type"))
    size = len(tokens)
    tokens += ["<tool_call>", "</tool_call>", "<|python_tag|>", "[ARGS]"]
    types += [USER_DEFINED, CONTROL, CONTROL, CONTROL]
    tokenizer = Tokenizer.from_gguf(byte_level(tokens=tokens, token_type=types))
    assert special_markers(HERMES, tokenizer) == {"</tool_call>": size + 1}, (
        "one that has text of its own is not special"
    )
    assert special_markers(LLAMA, tokenizer) == {"<|python_tag|>": size + 2}
    assert special_markers(MISTRAL_NAMED, tokenizer) == {"[ARGS]": size + 3}, "those that are no tokens are just text"
    assert special_markers(HERMES, Tokenizer.from_gguf(plain)) == {}
