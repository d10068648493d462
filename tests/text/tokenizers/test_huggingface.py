"""Tokenizers from model directories that the tests write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from quire.errors import BadModelFile, ModelNotFound, UnsupportedModel
from quire.text.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.text.vocabularies import byte_level, sentencepiece

pytestmark = pytest.mark.cpu


@pytest.fixture(params=[byte_level, sentencepiece])
def source(request) -> Tokenizer:
    return Tokenizer.from_gguf(request.param())


def save(source: Tokenizer, path: Path, **files: object) -> Path:
    source.backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_reads_what_the_library_wrote(source, tmp_path):
    loaded = load_tokenizer(save(source, tmp_path))
    for text in ("hello world  é 🦙", " hello", "x<|im_end|></s>y"):
        assert loaded.encode(text) == source.encode(text)
        assert loaded.decode(loaded.encode(text)) == source.decode(source.encode(text))
    assert loaded.vocab_size == source.vocab_size
    assert loaded.special_token_ids == source.special_token_ids


def test_agrees_with_the_library_on_valid_text(source, tmp_path):
    loaded = load_tokenizer(save(source, tmp_path))
    for text in ("hello world", "  two", "é!🦙"):
        token_ids = loaded.encode(text)
        assert loaded.decode(token_ids) == loaded.backend.decode(token_ids)


def test_end_tokens_from_every_place(tmp_path):
    source = Tokenizer.from_gguf(byte_level())
    path = save(
        source,
        tmp_path,
        generation_config={"eos_token_id": [5, 6]},
        config={"eos_token_id": 7},
        tokenizer_config={"eos_token": {"content": "<|x|>"}, "bos_token": "<|im_start|>"},
    )
    loaded = Tokenizer.from_directory(path)
    named = {source.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>", "<|x|>")}
    assert loaded.end_token_ids == {5, 6, 7} | named
    assert loaded.eos_token_id == source.token_to_id("<|x|>")
    assert loaded.special_tokens == {"eos_token": "<|x|>", "bos_token": "<|im_start|>"}


def test_tokenizer_config_overrides_the_map(tmp_path):
    path = save(
        Tokenizer.from_gguf(byte_level()),
        tmp_path,
        special_tokens_map={"eos_token": "<|im_end|>", "pad_token": "<|x|>"},
        tokenizer_config={"eos_token": "<|endoftext|>", "pad_token": None},
    )
    assert Tokenizer.from_directory(path).special_tokens == {"eos_token": "<|endoftext|>", "pad_token": "<|x|>"}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("one", "one"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "rag", "template": "r"}], "r"),
        (None, None),
    ],
)
def test_chat_template_of_the_config(template, expected, tmp_path):
    path = save(Tokenizer.from_gguf(byte_level()), tmp_path, tokenizer_config={"chat_template": template})
    assert Tokenizer.from_directory(path).chat_template == expected


def test_chat_template_of_its_own_file_wins(tmp_path):
    path = save(Tokenizer.from_gguf(byte_level()), tmp_path, tokenizer_config={"chat_template": "config"})
    (path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_directory(path).chat_template == "file"


def test_nothing_is_truncated_or_padded_in_silence(tmp_path):
    source = Tokenizer.from_gguf(byte_level())
    source.backend.enable_truncation(2)
    source.backend.enable_padding(length=50)
    assert len(Tokenizer.from_directory(save(source, tmp_path)).encode("hello world hello")) > 2
    assert len(Tokenizer.from_directory(tmp_path).encode("hello")) == 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{", "cannot be read as a tokenizer"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[]", "must be an object"),
        ("tokenizer_config.json", '{"chat_template": 3}', "neither text nor a list"),
        ("tokenizer_config.json", '{"chat_template": [3]}', "without names"),
        ("generation_config.json", '{"eos_token_id": "x"}', "'x'"),
        ("config.json", "\xff", "cannot be read"),
    ],
)
def test_broken_files_are_named(name, content, words, tmp_path):
    save(Tokenizer.from_gguf(byte_level()), tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(BadModelFile, match=words):
        Tokenizer.from_directory(tmp_path)


def test_a_decoder_that_quire_does_not_read(tmp_path):
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        Tokenizer.from_directory(tmp_path)


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(ModelNotFound):
        load_tokenizer(tmp_path / "none.gguf")
    with pytest.raises(ModelNotFound):
        Tokenizer.from_directory(tmp_path / "none")


def test_two_files_of_gpt2(tmp_path: Path) -> None:
    """As OPT's directories have them, against transformers' class."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "Ġ w", "hell o"]
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *alphabet, *(pair.replace(" ", "") for pair in merges)]
    (tmp_path / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_bos_token": True,
        **{name: {"content": "</s>", "__type": "AddedToken"} for name in ("bos_token", "eos_token", "unk_token")},
        "pad_token": "<pad>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    for text in ("hello world", "  héllo\nhell 123", "<pad>hello</s> ", ""):
        assert ours.encode(text) == theirs(text)["input_ids"], text
    assert ours.decode(ours.encode("  héllo\nworld")) == "  héllo\nworld"
    (tmp_path / "merges.txt").write_text("h e l\n")
    with pytest.raises(BadModelFile, match=r"merges.txt cannot be read as a tokenizer"):
        Tokenizer.from_directory(tmp_path)
