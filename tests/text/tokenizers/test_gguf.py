"""Tokenizers from GGUF metadata, on tiny vocabularies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import BadModelFile, InvalidParams, UnsupportedModel
from quire.text.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.weights.gguf import GGUFFile
from tests.text.vocabularies import CONTROL, NORMAL, USER_DEFINED, byte_level, merge_slowly, sentencepiece
from tests.tools.tiny_models import tiny_text_gguf

pytestmark = pytest.mark.cpu

ANY_TEXT = Tokenizer.from_gguf(byte_level(pre="deepseek-llm"))


def tokens_of(tokenizer: Tokenizer, text: str, **options: bool) -> list[str | None]:
    return [tokenizer.id_to_token(token_id) for token_id in tokenizer.encode(text, **options)]


class TestByteLevel:
    def test_merges_apply_in_order(self):
        assert tokens_of(Tokenizer.from_gguf(byte_level()), "hello world") == ["hello", "Ġworld"]

    def test_special_and_user_defined_text_is_parsed(self):
        found = tokens_of(Tokenizer.from_gguf(byte_level()), "hello<|im_end|><br>hell")
        assert found == ["hello", "<|im_end|>", "<br>", "hell"]

    def test_pre_decides_where_words_end(self):
        assert tokens_of(Tokenizer.from_gguf(byte_level(pre="smollm")), "12") == ["1", "2"]
        assert tokens_of(Tokenizer.from_gguf(byte_level(pre="gpt-2")), "12") == ["12"]

    def test_composed_form_where_the_model_was_trained_on_it(self):
        decomposed = "e\u0301"
        assert tokens_of(Tokenizer.from_gguf(byte_level(pre="qwen2")), decomposed) == ["Ã©"]
        assert tokens_of(Tokenizer.from_gguf(byte_level(pre="llama-bpe")), decomposed, add_special_tokens=False) != [
            "Ã©"
        ]

    def test_special_tokens_are_added_as_the_file_says(self):
        plain = Tokenizer.from_gguf(byte_level())
        both = Tokenizer.from_gguf(byte_level(add_bos_token=True, add_eos_token=True))
        assert tokens_of(plain, "hello") == ["hello"]
        assert tokens_of(both, "hello") == ["<|im_start|>", "hello", "<|endoftext|>"]
        assert tokens_of(both, "hello", add_special_tokens=False) == ["hello"]
        assert tokens_of(Tokenizer.from_gguf(byte_level(pre="llama-bpe")), "hello") == ["<|im_start|>", "hello"]

    def test_end_tokens_are_what_chat_models_stop_with(self):
        tokenizer = Tokenizer.from_gguf(byte_level(eot_token_id=271))
        ends = {tokenizer.id_to_token(token_id) for token_id in tokenizer.end_token_ids}
        assert ends == {"<|endoftext|>", "<|im_end|>", tokenizer.id_to_token(271)}

    def test_an_end_token_by_name_must_be_a_control_token(self):
        metadata = byte_level()
        place = metadata["tokenizer.ggml.tokens"].index("<|im_end|>")
        metadata["tokenizer.ggml.token_type"][place] = USER_DEFINED
        assert place not in Tokenizer.from_gguf(metadata).end_token_ids

    def test_decode_skips_special_tokens_only_when_asked(self):
        tokenizer = Tokenizer.from_gguf(byte_level())
        token_ids = tokenizer.encode("<|im_start|>hello<br>")
        assert tokenizer.decode(token_ids) == "hello<br>"
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<|im_start|>hello<br>"

    def test_names_for_templates(self):
        tokenizer = Tokenizer.from_gguf(byte_level() | {"tokenizer.chat_template": "{{ messages }}"})
        assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}
        assert tokenizer.chat_template == "{{ messages }}"
        assert tokenizer.token_to_id("<|im_start|>") == tokenizer.bos_token_id
        assert tokenizer.vocab_size == len(byte_level()["tokenizer.ggml.tokens"])

    def test_two_tokens_with_the_same_text_keep_their_ids(self):
        metadata = byte_level()
        metadata["tokenizer.ggml.tokens"].append("hello")
        metadata["tokenizer.ggml.token_type"].append(NORMAL)
        tokenizer = Tokenizer.from_gguf(metadata)
        first = metadata["tokenizer.ggml.tokens"].index("hello")
        assert tokenizer.decode([first, tokenizer.vocab_size - 1]) == "hellohello"

    @given(st.text(max_size=40))
    @settings(deadline=None)
    def test_any_text_survives(self, text):
        assert ANY_TEXT.decode(ANY_TEXT.encode(text), skip_special_tokens=False) == text

    @pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
    def test_every_split_compiles_and_loses_nothing(self, pre):
        tokenizer = Tokenizer.from_gguf(byte_level(pre=pre))
        text = "hello  World's 12345 \u00e9\u4e00\ud55c \r\n\n\t!?$^ x= I'LL\u3000"
        assert tokenizer.decode(tokenizer.encode(text)) == text


class TestSentencePiece:
    def test_text_begins_with_a_space_mark_unless_the_file_says_no(self):
        assert tokens_of(Tokenizer.from_gguf(sentencepiece()), "world hello")[:3] == ["<s>", "▁wor", "l"]
        bare = Tokenizer.from_gguf(sentencepiece(add_space_prefix=False))
        assert tokens_of(bare, "hello", add_special_tokens=False) == ["hello"]
        assert bare.decode(bare.encode(" hello")) == " hello"

    def test_gemma_4_has_merges_of_its_own(self):
        """Scores would make "hello" and "▁wor"; the merges end before."""
        merges = ["h e", "l l", "he ll", "▁ w"]
        metadata = sentencepiece(model="gemma4", merges=merges, scores=None, add_space_prefix=False)
        tokenizer = Tokenizer.from_gguf(metadata)
        assert tokens_of(tokenizer, "hello wor🦙") == [
            "<s>", "hell", "o", "▁w", "o", "r", "<0xF0>", "<0x9F>", "<0xA6>", "<0x99>"
        ]  # fmt: skip
        assert tokenizer.decode(tokenizer.encode(" hello  wor🦙")) == " hello  wor🦙"

    def test_characters_outside_the_vocabulary_become_bytes(self):
        tokenizer = Tokenizer.from_gguf(sentencepiece())
        assert tokens_of(tokenizer, "🦙")[2:] == ["<0xF0>", "<0x9F>", "<0xA6>", "<0x99>"]
        assert tokenizer.decode(tokenizer.encode("a🦙é")) == "a🦙é"

    def test_half_a_character_does_not_spoil_a_whole_one(self):
        tokenizer = Tokenizer.from_gguf(sentencepiece())
        token_ids = tokenizer.encode("🦙", add_special_tokens=False)[1:]
        assert tokenizer.decode([*token_ids, token_ids[0]]) == "🦙\ufffd"

    def test_arrays_serve_as_well_as_lists(self):
        metadata = sentencepiece()
        for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
            metadata[key] = np.array(metadata[key])
        assert tokens_of(Tokenizer.from_gguf(metadata), "hello") == ["<s>", "▁", "hello"]

    def test_control_tokens_are_never_merged_from_text(self):
        metadata = sentencepiece({"ab": -1.0, "abc": -2.0})
        place = metadata["tokenizer.ggml.tokens"].index("abc")
        metadata["tokenizer.ggml.token_type"][place] = CONTROL
        found = tokens_of(Tokenizer.from_gguf(metadata), "a bc", add_special_tokens=False)
        assert "abc" not in found

    @given(
        st.dictionaries(st.text("abc▁", min_size=2, max_size=5), st.integers(-200, 0), max_size=12),
        st.lists(st.text("abc ", max_size=12), min_size=1, max_size=4),
    )
    @settings(deadline=None, max_examples=60)
    def test_merges_as_sentencepiece_does(self, words, texts):
        # Distinct scores, as trained vocabularies have them.
        words = {word: score - index / 100 for index, (word, score) in enumerate(words.items())}
        tokenizer = Tokenizer.from_gguf(sentencepiece(words | dict.fromkeys("abc", -500.0)))
        for text in filter(None, texts):
            expected = merge_slowly("▁" + text.replace(" ", "▁"), words)
            assert tokens_of(tokenizer, text, add_special_tokens=False) == expected

    @pytest.mark.parametrize("count", range(1, 40))
    def test_runs_of_spaces_with_equal_scores(self, count):
        words = {"▁" * n: -1e9 for n in range(2, 9)}
        tokenizer = Tokenizer.from_gguf(sentencepiece(words, add_space_prefix=False))
        assert tokens_of(tokenizer, " " * count, add_special_tokens=False) == merge_slowly("▁" * count, words)


class TestRefusals:
    @pytest.mark.parametrize(
        ("overrides", "error", "words"),
        [
            ({"pre": "klingon"}, UnsupportedModel, "klingon"),
            ({"model": "rwkv"}, UnsupportedModel, "rwkv"),
            ({"model": None}, BadModelFile, "tokenizer.ggml.model"),
            ({"tokens": None}, BadModelFile, "tokenizer.ggml.tokens"),
            ({"tokens": []}, BadModelFile, "empty"),
            ({"tokens": [1, 2]}, BadModelFile, "other than text"),
            ({"merges": None}, BadModelFile, "tokenizer.ggml.merges"),
            ({"merges": ["he"]}, BadModelFile, "'he'"),
            ({"merges": ["zz zzz"]}, BadModelFile, "do not fit"),
            ({"token_type": [1]}, BadModelFile, "1 entries"),
            ({"eos_token_id": 10_000}, BadModelFile, "10000"),
        ],
    )
    def test_of_byte_level_metadata(self, overrides, error, words):
        with pytest.raises(error, match=words):
            Tokenizer.from_gguf(byte_level(**overrides))

    def test_of_a_sentencepiece_vocabulary_without_scores(self):
        with pytest.raises(BadModelFile, match="scores"):
            Tokenizer.from_gguf(sentencepiece(scores=None))

    @pytest.mark.parametrize("token_id", [-1, 10_000])
    def test_of_ids_outside_the_vocabulary(self, token_id):
        with pytest.raises(InvalidParams, match=str(token_id)):
            Tokenizer.from_gguf(byte_level()).decode([0, token_id])

    @pytest.mark.parametrize("text", ["\ud800", None, b"bytes"])
    def test_of_what_is_not_text(self, text):
        with pytest.raises(InvalidParams):
            Tokenizer.from_gguf(byte_level()).encode(text)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("bos_token_id", "abc", "bos_token_id is not a whole number"),
        ("bos_token_id", 1.5, "bos_token_id is not a whole number"),
        ("eos_token_id", True, "eos_token_id is not a whole number"),
        ("tokens", 4, "tokens is not an array"),
        ("token_type", 3, "token_type is not an array"),
        ("token_type", np.full(273, np.nan, "f4"), "token_type holds something other than whole numbers"),
        ("add_bos_token", "no", "add_bos_token is 'no'; it should be true or false"),
        ("pre", 5, "pre is not the name of a pre-tokenizer"),
    ],
)
def test_metadata_of_the_wrong_type(tmp_path, key, value, message):
    file = tiny_text_gguf(tmp_path / "model.gguf", **{f"tokenizer.ggml.{key}": value})
    with pytest.raises(BadModelFile, match=message):
        Tokenizer.from_gguf(GGUFFile(file).metadata).encode("Hello")


def test_a_chat_template_that_is_not_text(tmp_path):
    file = tiny_text_gguf(tmp_path / "model.gguf", **{"tokenizer.chat_template": 4})
    with pytest.raises(BadModelFile, match="chat_template is not text"):
        Tokenizer.from_gguf(GGUFFile(file).metadata)
