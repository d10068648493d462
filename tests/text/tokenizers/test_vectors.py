"""Token ids from other implementations, for vocabularies that are too large for the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.text.tokenizers.tokenizer import Tokenizer, load_tokenizer

VECTORS = Path(__file__).parents[3] / "../shared/data/tokenizers"

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(not VECTORS.is_dir(), reason="the test vectors are not beside this checkout (../shared/data)"),
]


def cases(name: str) -> list[tuple[str, list[int]]]:
    texts = (VECTORS / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = (VECTORS / f"ggml-vocab-{name}.gguf.out").read_text(encoding="utf-8").splitlines()
    assert texts.pop() == ""  # the separator also stands at the end
    assert len(texts) == len(lines) > 40
    return [(text, [int(token_id) for token_id in line.split()]) for text, line in zip(texts, lines, strict=True)]


def check(tokenizer: Tokenizer, name: str) -> None:
    for text, expected in cases(name):
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        assert tokenizer.decode(expected) == text


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "llama-spm", "qwen2"])
def test_gguf_vocabularies(name):
    check(load_tokenizer(VECTORS / f"ggml-vocab-{name}.gguf"), name)


@pytest.mark.parametrize("name", ["llama-spm", "phi-3"])
def test_a_model_directory(name):
    check(load_tokenizer(VECTORS / "tinyllama/TinyLlama_v1.1"), name)
