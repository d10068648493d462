"""ByteLevelEncoder gives the ids of the library's tokenizer: for tiny, random and real vocabularies and any text."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import DEFAULT_MODEL
from quire.store import resolve
from quire.text.tokenizers import gguf
from quire.text.tokenizers.pieces import byte_alphabet
from quire.text.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from quire.text.tokenizers.tokenizer import MAX_SHORT, Tokenizer, load_tokenizer
from quire.weights import gguf_strings
from quire.weights.gguf_strings import Strings
from tests.text.vocabularies import NORMAL, byte_level

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(gguf_strings.extension() is None, reason="the native extension is not built"),
]

VECTORS = Path(__file__).parents[3] / "../shared/data/tokenizers"
KEYS = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
PIECES = [
    "hello", " world", "Hello", "'s", "'LL", "'", "ſ", "  ", "\n", "\r\n", "\t", "\x00", "\x1c", "\x85",
    "\u00a0", "\u3000", "123", "1", "²", "٣", "Ⅷ", "é", "e\u0301", "\u1e9b\u0323", "中文字", "한국어", "ไทย", "🦙",
    "👩‍👩‍👧", "\ufeff", "\u200b", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "<br>", "<b", "<<|x|>",
    "{}[]();==", "...", "aaaaaaaaaaaa", "Ġ", "Ċ", "\U0010ffff", "\U000e0041", "\u0378",
]  # fmt: skip

ADDED = ["<|", "<||>", "<|a", "ab<"]
PARTS = ["a", "b", "c", " ", "<", "|", ">", "é", "\n", "aaaaa", "abab", "cab", "bc", *ADDED]
ALL_PARTS = "".join(one + other for one in PARTS for other in PARTS)


def as_strings(metadata: dict[str, Any]) -> dict[str, Any]:
    """The metadata with tokens and merges as they are in a file."""
    data, places = b"", {}
    for key in KEYS:
        places[key] = len(data), len(metadata[key])
        data += b"".join(struct.pack("<Q", len(text.encode())) + text.encode() for text in metadata[key])
    return metadata | {key: Strings(data, *place, ValueError) for key, place in places.items()}


def random_text(seed: int) -> str:
    draw = random.Random(seed)
    words = draw.choices(PIECES, k=draw.randrange(12))
    odd = [chr(draw.choice((draw.randrange(0x80), draw.randrange(0xD800), draw.randrange(0xE000, 0x110000))))]
    words += draw.choices(odd, k=draw.randrange(3))
    draw.shuffle(words)
    return "".join(words) * draw.choice((1, 1, 1, 5))


def check(tokenizer: Tokenizer, texts: list[str]) -> None:
    """Encode with the encoder, and then with the library."""
    assert tokenizer.encoder is not None
    for text in texts:
        for add_special_tokens in (True, False):
            found = tokenizer.encoder.encode(text, add_special_tokens)
            expected = tokenizer.backend.encode(text, add_special_tokens=add_special_tokens).ids
            assert found == expected, repr(text)


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer(pre):
    tokenizer = Tokenizer.from_gguf(as_strings(byte_level(pre=pre, add_bos_token=True, add_eos_token=True)))
    check(tokenizer, [random_text(seed) for seed in range(100)])


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20),
    st.sets(st.integers(0, 255), max_size=200),
    st.booleans(),
    st.lists(st.sampled_from(PARTS), max_size=30).map("".join),
)
@settings(deadline=None, max_examples=400)
def test_random_merges(pairs, missing, ignore_merges, text):
    """Merges in any order and more than once, bytes without a token, tokens that occur twice."""
    tokens = [char for byte, char in enumerate(byte_alphabet()) if byte not in missing or chr(byte) in "abc"]
    letters = [token for token in tokens if token in "abc"]
    merges = []
    for left, right in pairs:
        one, other = letters[left % len(letters)], letters[right % len(letters)]
        merges.append(f"{one} {other}")
        letters.append(one + other)
        tokens.append(one + other)
    types = [NORMAL] * len(tokens) + [3, 3, 4, 4]
    overrides = {"tokens": tokens + ADDED, "token_type": types, "merges": merges, "bos_token_id": 0, "eos_token_id": 1}
    pre = "llama-bpe" if ignore_merges else "gpt-2"
    check(Tokenizer.from_gguf(as_strings(byte_level(pre=pre, **overrides))), [text, ALL_PARTS])


@pytest.mark.model
def test_the_default_model():
    tokenizer = load_tokenizer(resolve(DEFAULT_MODEL).path)
    check(tokenizer, [random_text(seed) for seed in range(1500)])
    check(tokenizer, ["a" * 5000, " " * 3000, "ab" * 3000 + " " * 100 + "\n" * 100, "<|im_start|>" * 500, "é" * 3000])
    check(tokenizer, [chr(point) for point in range(0x250)])


@pytest.mark.skipif(not VECTORS.is_dir(), reason="the vocabularies are not beside this checkout (../shared/data)")
@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2"])
def test_published_vocabularies(name):
    tokenizer = load_tokenizer(VECTORS / f"ggml-vocab-{name}.gguf")
    texts = (VECTORS / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    check(tokenizer, texts + [random_text(seed) for seed in range(500)])


class TestLaziness:
    @pytest.fixture
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_gguf(as_strings(byte_level()))

    def test_short_texts_and_decoding_do_not_build_the_library_s_tokenizer(self, tokenizer):
        token_ids = tokenizer.encode("hello<|im_end|> w\u00f6rld")
        assert tokenizer.decode(token_ids) == "hello w\u00f6rld"
        assert tokenizer.token_to_id("hello") == tokenizer.encode("hello")[0]
        assert tokenizer.token_to_id("absent") is None
        assert tokenizer.id_to_token(tokenizer.vocab_size) is None
        assert not tokenizer.lazy_backend.is_built

    @pytest.mark.parametrize("use", ["long text", "offsets"])
    def test_it_is_built_when_it_is_needed(self, tokenizer, use):
        short = tokenizer.encode("hello world")
        if use == "offsets":
            assert tokenizer.encode_with_offsets("hello world") == (short, [0, 5])
        else:
            assert tokenizer.encode("hello world" * MAX_SHORT)[:2] == short
        assert tokenizer.lazy_backend.is_built
        assert tokenizer.encode("hello world") == short

    def test_the_tokenizer_is_the_one_of_plain_lists(self, tokenizer):
        plain = Tokenizer.from_gguf(byte_level())
        assert plain.encoder is None
        for name in ("vocab_size", "bos_token_id", "eos_token_id", "end_token_ids", "special_token_ids"):
            assert getattr(tokenizer, name) == getattr(plain, name)
        assert tokenizer.special_tokens == plain.special_tokens
        assert tokenizer.backend.to_str() == plain.backend.to_str()
        ids = range(tokenizer.vocab_size)
        assert [tokenizer.token_bytes(i) for i in ids] == [plain.token_bytes(i) for i in ids]
        assert [tokenizer.id_to_token(i) for i in ids] == [plain.id_to_token(i) for i in ids]


@pytest.mark.parametrize("merges", [["he"], [" he"], ["h "], ["zz zzz"], ["x y"]])
def test_merges_that_do_not_fit_are_left_to_the_library_s_errors(merges):
    metadata = as_strings(byte_level(merges=merges))
    assert gguf._make_native_bpe(metadata) is None
    with pytest.raises(Exception, match="merge"):
        Tokenizer.from_gguf(metadata)
    with pytest.raises(Exception, match="merge"):
        Tokenizer.from_gguf(byte_level(merges=merges))


@pytest.mark.parametrize("damage", [b"\xff", b"\xc3", b"\xed\xa0\x80"])
def test_tokens_that_are_not_utf8(damage):
    metadata = as_strings(byte_level())
    tokens = struct.pack("<Q", len(damage)) + damage
    metadata["tokenizer.ggml.tokens"] = Strings(tokens, 0, 1, ValueError)
    assert gguf._make_native_bpe(metadata | {"tokenizer.ggml.merges": Strings(tokens, 0, 0, ValueError)}) is None
    with pytest.raises(ValueError, match="UTF-8"):
        Tokenizer.from_gguf(metadata)
