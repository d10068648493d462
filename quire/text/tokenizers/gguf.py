"""A tokenizer from the metadata of a GGUF file, for `Tokenizer.from_gguf`.

GGUF stores tokens, a type for each, merges or scores, and a few named ids. `build_backend` makes a
`tokenizers.Tokenizer` of them. Reading the file itself is `quire/weights/gguf.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from quire.errors import BadModelFile, UnsupportedModel
from quire.text.tokenizers.end_tokens import find_end_ids
from quire.text.tokenizers.pieces import SPACE_MARK, TokenPieces, byte_level_pieces, sentencepiece_pieces
from quire.text.tokenizers.pre_tokenizers import find_pre_tokenizer

_PREFIX = "tokenizer.ggml."
_ID_KEYS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_END_KEYS = ("eos", "eot", "eom")


class TokenType(IntEnum):
    """GGUF's token types."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """The vocabulary of a file, checked."""

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]  # a token's text to its id
    named: dict[str, int]  # ids of bos, eos, unknown, padding, eot, eom, if the file has them
    special_ids: frozenset[int]  # tokens without text
    added_ids: list[int]  # tokens that are matched before pre-tokenization
    metadata: Mapping[str, Any]

    def flag(self, name: str, default: bool) -> bool:
        """A boolean of the tokenizer's metadata."""
        value = self.metadata.get(_PREFIX + name)
        return default if value is None else bool(value)

    def special_tokens(self) -> dict[str, str]:
        """Special tokens by the names that chat templates use."""
        return {name: self.tokens[self.named[key]] for key, name in _ID_KEYS.items() if key in self.named}

    def end_ids(self) -> frozenset[int]:
        """Every token that ends an answer."""
        return frozenset(find_end_ids(self.ids.get, self.special_ids)) | {
            self.named[key] for key in _END_KEYS if key in self.named
        }

    def id_to_token(self) -> Callable[[int], str | None]:
        """A function from id to token. It references the tokens only, so the rest of the metadata can be freed."""
        tokens = self.tokens
        return lambda token_id: tokens[token_id] if 0 <= token_id < len(tokens) else None


def read_vocabulary(metadata: Mapping[str, Any]) -> GGUFVocabulary:
    """Read and check the vocabulary."""
    tokens = _strings(metadata, "tokens")
    if not tokens:
        raise BadModelFile("The GGUF file's vocabulary (tokenizer.ggml.tokens) is empty.")
    types = _numbers(metadata, "token_type", len(tokens)) or [int(TokenType.NORMAL)] * len(tokens)
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    named = _named_ids(metadata, len(tokens))
    special = frozenset(_of_type(types, TokenType.CONTROL, TokenType.UNKNOWN)).union(named.values())
    added = sorted(special.union(_of_type(types, TokenType.USER_DEFINED)))
    return GGUFVocabulary(tokens, types, ids, named, special, added, metadata)


def build_backend(vocabulary: GGUFVocabulary) -> tuple[Backend, TokenPieces]:
    """The encoder, and the pieces for decoding."""
    kind = vocabulary.metadata.get(_PREFIX + "model")
    if kind == "gpt2":
        backend, pieces, add_bos = _build_byte_level(vocabulary)
    elif kind == "llama":
        backend, pieces, add_bos = _build_sentencepiece(vocabulary)
    elif kind is None:
        raise BadModelFile("The GGUF file has no tokenizer (tokenizer.ggml.model is missing).")
    else:
        raise UnsupportedModel(f"The GGUF file's tokenizer is of the kind {kind!r}; quire has gpt2 and llama.")
    _add_tokens(backend, vocabulary)
    _add_post_processor(backend, vocabulary, add_bos)
    return backend, pieces


def _build_byte_level(vocabulary: GGUFVocabulary) -> tuple[Backend, TokenPieces, bool]:
    spec = find_pre_tokenizer(str(vocabulary.metadata.get(_PREFIX + "pre", "default")))
    merges = _merges(vocabulary.metadata)
    backend = Backend(_make_bpe(vocabulary.ids, merges, ignore_merges=spec.ignore_merges))
    backend.pre_tokenizer = spec.pre_tokenizer()
    if normalizer := spec.normalizer():
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    added = {token_id: vocabulary.tokens[token_id] for token_id in vocabulary.added_ids}
    return backend, byte_level_pieces(vocabulary.id_to_token(), added), spec.add_bos


def _build_sentencepiece(vocabulary: GGUFVocabulary) -> tuple[Backend, TokenPieces, bool]:
    backend = Backend(_make_sentencepiece_bpe(vocabulary))
    space = normalizers.Replace(" ", SPACE_MARK)
    prefixed = vocabulary.flag("add_space_prefix", True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), space]) if prefixed else space
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return backend, sentencepiece_pieces(vocabulary.id_to_token(), prefixed), True


def _make_sentencepiece_bpe(vocabulary: GGUFVocabulary) -> models.BPE:
    # Imported here because byte-level vocabularies, such as the default model's, load faster without numpy.
    from quire.text.tokenizers.sentencepiece import derive_merges

    scores = _numbers(vocabulary.metadata, "scores", len(vocabulary.tokens))
    if scores is None:
        raise BadModelFile("The GGUF file's SentencePiece vocabulary has no scores (tokenizer.ggml.scores is missing).")
    kept = _of_type(vocabulary.types, TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    merges = derive_merges([vocabulary.tokens[t] for t in kept], [scores[t] for t in kept])
    unknown = vocabulary.named.get("unknown")
    return _make_bpe(
        vocabulary.ids,
        merges,
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        byte_fallback=True,
        fuse_unk=True,
    )


def _make_bpe(ids: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(ids, merges, **options)
    except Exception as error:
        raise BadModelFile(f"The GGUF file's vocabulary and merges do not fit together: {error}.") from error


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Merges as pairs of tokens, in order. The GGUF reader may provide them already split."""
    stored = metadata.get(_PREFIX + "merges")
    pairs: list[tuple[str, str]] | None = stored.pairs() if stored is not None and hasattr(stored, "pairs") else None
    return pairs if pairs is not None else _split_merges(_strings(metadata, "merges"))


def _split_merges(merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [merge.partition(" ")[::2] for merge in merges]
    if not all(left and right for left, right in pairs):
        bad = next(merge for merge, (left, right) in zip(merges, pairs, strict=True) if not (left and right))
        raise BadModelFile(f"The GGUF file has the merge {bad!r}; a merge is two tokens with a space between them.")
    return pairs


def _add_tokens(backend: Backend, vocabulary: GGUFVocabulary) -> None:
    special = vocabulary.special_ids
    contents = {t: vocabulary.tokens[t] for t in vocabulary.added_ids if vocabulary.tokens[t]}
    backend.add_special_tokens([AddedToken(c, normalized=False) for t, c in contents.items() if t in special])
    backend.add_tokens([AddedToken(c, normalized=False) for t, c in contents.items() if t not in special])


def _add_post_processor(backend: Backend, vocabulary: GGUFVocabulary, add_bos: bool) -> None:
    """Add BOS and EOS tokens around each text, as the metadata says."""
    wanted = {"bos": vocabulary.flag("add_bos_token", add_bos), "eos": vocabulary.flag("add_eos_token", False)}
    ids = {key: vocabulary.named[key] for key, is_wanted in wanted.items() if is_wanted and key in vocabulary.named}
    if not ids:
        return
    pattern = [key if key in ids else "" for key in ("bos", "eos")]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{pattern[0]} $A {pattern[1]}".split(),
        special_tokens=[{"id": key, "ids": [t], "tokens": [vocabulary.tokens[t]]} for key, t in ids.items()],
    )


def _of_type(types: list[int], *wanted: TokenType) -> list[int]:
    kinds = {int(kind) for kind in wanted}
    return [token_id for token_id, kind in enumerate(types) if kind in kinds]


def _named_ids(metadata: Mapping[str, Any], vocab_size: int) -> dict[str, int]:
    named = {}
    for key in (*_ID_KEYS, "eot", "eom"):
        value = metadata.get(f"{_PREFIX}{key}_token_id")
        if value is None:
            continue
        if not 0 <= int(value) < vocab_size:
            raise BadModelFile(f"{_PREFIX}{key}_token_id is {value}, but the vocabulary has {vocab_size} tokens.")
        named[key] = int(value)
    return named


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = _plain(metadata.get(_PREFIX + key))
    if values is None:
        raise BadModelFile(f"The GGUF file's tokenizer has no {_PREFIX}{key}.")
    if set(map(type, values)) - {str}:
        raise BadModelFile(f"{_PREFIX}{key} holds something other than text.")
    return values


def _numbers(metadata: Mapping[str, Any], key: str, count: int) -> list[Any] | None:
    values = _plain(metadata.get(_PREFIX + key))
    if values is not None and len(values) != count:
        raise BadModelFile(f"{_PREFIX}{key} has {len(values)} entries, but the vocabulary has {count} tokens.")
    return values


def _plain(values: Sequence[Any] | Any | None) -> list[Any] | None:
    """A list, from a list or an array."""
    if values is None or isinstance(values, list):
        return values
    return list(values.tolist() if hasattr(values, "tolist") else values)
