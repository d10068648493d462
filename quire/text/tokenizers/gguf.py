"""A tokenizer from the metadata of a GGUF file, for `Tokenizer.from_gguf`.

GGUF stores tokens, a type for each, merges or scores, and a few named ids. `build_backend` makes a
`tokenizers.Tokenizer` of them. For byte-level vocabularies `make_encoder` makes a `ByteLevelEncoder`, which is ready
much sooner. Reading the file itself is `quire/weights/gguf.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from quire.errors import BadModelFile, UnsupportedModel
from quire.text.tokenizers.byte_level import ByteLevelEncoder
from quire.text.tokenizers.end_tokens import find_end_ids
from quire.text.tokenizers.pieces import SPACE_MARK, TokenPieces, byte_level_pieces, sentencepiece_pieces
from quire.text.tokenizers.pre_tokenizers import PreTokenizerSpec, find_pre_tokenizer
from quire.weights.gguf_strings import Strings

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

_PREFIX = "tokenizer.ggml."
_ID_KEYS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_END_KEYS = ("eos", "eot", "eom")
_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
_GEMMA4 = "gemma4"  # SentencePiece's tokens, with merges in the file


class TokenType(IntEnum):
    """GGUF's token types."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Tokens(Protocol):
    """The texts of a vocabulary: Python strings, or the native extension's `BPE`."""

    def __len__(self) -> int: ...
    def token(self, id: int, /) -> str | None: ...
    def tokens(self) -> list[str]: ...


class TokenList:
    """`Tokens` as Python strings."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def token(self, token_id: int) -> str | None:
        return self._tokens[token_id] if 0 <= token_id < len(self._tokens) else None

    def tokens(self) -> list[str]:
        return self._tokens


class GGUFVocabulary(NamedTuple):
    """The vocabulary of a file, checked."""

    tokens: Tokens
    bpe: Any | None  # the native extension's `BPE`, which then is `tokens` too
    ids: dict[str, int]  # a token's text to its id, the last one if a text occurs twice; empty if there is a `bpe`
    named: dict[str, int]  # ids of bos, eos, unknown, padding, eot, eom, if the file has them
    special_ids: frozenset[int]  # tokens without text
    added: dict[int, str]  # tokens that are matched before pre-tokenization
    metadata: Mapping[str, Any]  # without arrays if `bpe` holds the vocabulary

    @property
    def kind(self) -> str:
        kind = self.metadata.get(_PREFIX + "model")
        if kind is None:
            raise BadModelFile("The GGUF file has no tokenizer (tokenizer.ggml.model is missing).")
        if kind not in (_BYTE_LEVEL, _SENTENCEPIECE, _GEMMA4):
            raise UnsupportedModel(
                f"The GGUF file's tokenizer is of the kind {kind!r}; quire has gpt2, llama and gemma4."
            )
        return str(kind)

    def find(self, text: str) -> int | None:
        """The id of a token."""
        token_id: int | None = self.ids.get(text) if self.bpe is None else self.bpe.find(text)
        return token_id

    def flag(self, name: str, default: bool) -> bool:
        """A boolean of the tokenizer's metadata."""
        value = self.metadata.get(_PREFIX + name)
        if value is not None and not isinstance(value, bool):
            raise BadModelFile(f"{_PREFIX}{name} is {value!r}; it should be true or false.")
        return default if value is None else value

    def special_tokens(self) -> dict[str, str]:
        """Special tokens by the names that chat templates use."""
        return {name: self.added[self.named[key]] for key, name in _ID_KEYS.items() if key in self.named}

    def end_ids(self) -> frozenset[int]:
        """Every token that ends an answer."""
        return frozenset(find_end_ids(self.find, self.special_ids)) | {
            self.named[key] for key in _END_KEYS if key in self.named
        }

    def pre_tokenizer(self) -> PreTokenizerSpec:
        name = self.metadata.get(_PREFIX + "pre", "default")
        if not isinstance(name, str):
            raise BadModelFile(f"{_PREFIX}pre is not the name of a pre-tokenizer.")
        return find_pre_tokenizer(name)

    def surrounding_ids(self) -> dict[str, int]:
        """The BOS and EOS tokens that stand around each text, as the metadata says."""
        add_bos = self.pre_tokenizer().add_bos if self.kind == _BYTE_LEVEL else True
        wanted = {"bos": self.flag("add_bos_token", add_bos), "eos": self.flag("add_eos_token", False)}
        return {key: self.named[key] for key, is_wanted in wanted.items() if is_wanted and key in self.named}


def read_vocabulary(metadata: Mapping[str, Any]) -> GGUFVocabulary:
    """Read and check the vocabulary."""
    bpe = _make_native_bpe(metadata)
    tokens: Tokens = TokenList(_strings(metadata, "tokens")) if bpe is None else bpe
    if not len(tokens):
        raise BadModelFile("The GGUF file's vocabulary (tokenizer.ggml.tokens) is empty.")
    ids = {token: token_id for token_id, token in enumerate(tokens.tokens())} if bpe is None else {}
    types = _numbers(metadata, "token_type", len(tokens)) or ()
    if set(map(type, types)) - {int}:
        raise BadModelFile(f"{_PREFIX}token_type holds something other than whole numbers.")
    normal = int(TokenType.NORMAL)  # comparing with a member of an enum is four times slower
    not_normal = [(token_id, kind) for token_id, kind in enumerate(types) if kind != normal]
    named = _named_ids(metadata, len(tokens))
    special = frozenset(t for t, kind in not_normal if kind in (TokenType.CONTROL, TokenType.UNKNOWN))
    special = special.union(named.values())
    added = special.union(t for t, kind in not_normal if kind == TokenType.USER_DEFINED)
    texts = {token_id: tokens.token(token_id) or "" for token_id in sorted(added)}
    if bpe is not None:
        metadata = {key: value for key, value in metadata.items() if not isinstance(value, Strings | array | list)}
    return GGUFVocabulary(tokens, bpe, ids, named, special, texts, metadata)


def _make_native_bpe(metadata: Mapping[str, Any]) -> Any | None:
    """The extension's `BPE` of a byte-level vocabulary; None if it cannot hold it."""
    tokens, merges = metadata.get(_PREFIX + "tokens"), metadata.get(_PREFIX + "merges")
    if metadata.get(_PREFIX + "model") != _BYTE_LEVEL or not isinstance(tokens, Strings):
        return None
    return tokens.make_bpe(merges) if isinstance(merges, Strings) else None


def make_encoder(vocabulary: GGUFVocabulary) -> ByteLevelEncoder | None:
    """The encoder that needs no `tokenizers` model; None if the native extension does not hold the vocabulary."""
    if vocabulary.bpe is None:
        return None
    ids = vocabulary.surrounding_ids()
    added = {text: vocabulary.bpe.find(text) for text in vocabulary.added.values() if text}
    around = [[ids[key]] if key in ids else [] for key in ("bos", "eos")]
    return ByteLevelEncoder(vocabulary.bpe, vocabulary.pre_tokenizer(), added, *around)


def make_pieces(vocabulary: GGUFVocabulary) -> TokenPieces:
    """The pieces for decoding."""
    if vocabulary.kind == _BYTE_LEVEL:
        return byte_level_pieces(vocabulary.tokens.token, vocabulary.added)
    return sentencepiece_pieces(vocabulary.tokens.token, vocabulary.flag("add_space_prefix", True))


def build_backend(vocabulary: GGUFVocabulary) -> Backend:
    """The library's tokenizer."""
    backend = _build_byte_level(vocabulary) if vocabulary.kind == _BYTE_LEVEL else _build_sentencepiece(vocabulary)
    _add_tokens(backend, vocabulary)
    _add_post_processor(backend, vocabulary)
    return backend


def _build_byte_level(vocabulary: GGUFVocabulary) -> Backend:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders

    spec = vocabulary.pre_tokenizer()
    merges = _merges(vocabulary.metadata) if vocabulary.bpe is None else vocabulary.bpe.merges()
    backend = Backend(_make_bpe(vocabulary, merges, ignore_merges=spec.ignore_merges))
    backend.pre_tokenizer = spec.pre_tokenizer()
    if normalizer := spec.normalizer():
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    return backend


def _build_sentencepiece(vocabulary: GGUFVocabulary) -> Backend:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, normalizers

    backend = Backend(_make_sentencepiece_bpe(vocabulary))
    space = normalizers.Replace(" ", SPACE_MARK)
    prefixed = vocabulary.flag("add_space_prefix", True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), space]) if prefixed else space
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return backend


def _make_sentencepiece_bpe(vocabulary: GGUFVocabulary) -> models.BPE:
    tokens, unknown = vocabulary.tokens.tokens(), vocabulary.named.get("unknown")
    merges = _merges(vocabulary.metadata) if vocabulary.kind == _GEMMA4 else _derive_merges(vocabulary, tokens)
    return _make_bpe(
        vocabulary,
        merges,
        unk_token=None if unknown is None else tokens[unknown],
        byte_fallback=True,
        fuse_unk=True,
    )


def _derive_merges(vocabulary: GGUFVocabulary, tokens: list[str]) -> list[tuple[str, str]]:
    # Imported here because byte-level vocabularies, such as the default model's, load faster without numpy.
    from quire.text.tokenizers.sentencepiece import derive_merges

    scores = _numbers(vocabulary.metadata, "scores", len(tokens))
    if scores is None:
        raise BadModelFile("The GGUF file's SentencePiece vocabulary has no scores (tokenizer.ggml.scores is missing).")
    types = _numbers(vocabulary.metadata, "token_type", len(tokens)) or [TokenType.NORMAL] * len(tokens)
    mergeable = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    kept = [token_id for token_id, kind in enumerate(types) if kind in mergeable]
    return derive_merges([tokens[t] for t in kept], [scores[t] for t in kept])


def _make_bpe(vocabulary: GGUFVocabulary, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    from tokenizers import models

    ids = vocabulary.ids or {token: token_id for token_id, token in enumerate(vocabulary.tokens.tokens())}
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
    from tokenizers import AddedToken

    special = vocabulary.special_ids
    contents = {token_id: text for token_id, text in vocabulary.added.items() if text}
    backend.add_special_tokens([AddedToken(c, normalized=False) for t, c in contents.items() if t in special])
    backend.add_tokens([AddedToken(c, normalized=False) for t, c in contents.items() if t not in special])


def _add_post_processor(backend: Backend, vocabulary: GGUFVocabulary) -> None:
    """Add BOS and EOS tokens around each text, as the metadata says."""
    from tokenizers import processors

    ids = vocabulary.surrounding_ids()
    if not ids:
        return
    pattern = [key if key in ids else "" for key in ("bos", "eos")]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{pattern[0]} $A {pattern[1]}".split(),
        special_tokens=[{"id": key, "ids": [t], "tokens": [vocabulary.added[t]]} for key, t in ids.items()],
    )


def _named_ids(metadata: Mapping[str, Any], vocab_size: int) -> dict[str, int]:
    named = {}
    for key in (*_ID_KEYS, "eot", "eom"):
        value = metadata.get(f"{_PREFIX}{key}_token_id")
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise BadModelFile(f"{_PREFIX}{key}_token_id is not a whole number.")
        if not 0 <= value < vocab_size:
            raise BadModelFile(f"{_PREFIX}{key}_token_id is {value}, but the vocabulary has {vocab_size} tokens.")
        named[key] = value
    return named


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = _plain(metadata, key)
    if values is None:
        raise BadModelFile(f"The GGUF file's tokenizer has no {_PREFIX}{key}.")
    if set(map(type, values)) - {str}:
        raise BadModelFile(f"{_PREFIX}{key} holds something other than text.")
    return values


def _numbers(metadata: Mapping[str, Any], key: str, count: int) -> list[Any] | None:
    values = _plain(metadata, key)
    if values is not None and len(values) != count:
        raise BadModelFile(f"{_PREFIX}{key} has {len(values)} entries, but the vocabulary has {count} tokens.")
    return values


def _plain(metadata: Mapping[str, Any], key: str) -> list[Any] | None:
    """A list, from a list or an array."""
    values = metadata.get(_PREFIX + key)
    if values is None or isinstance(values, list):
        return values
    if not hasattr(values, "tolist"):
        raise BadModelFile(f"{_PREFIX}{key} is not an array.")
    return list(values.tolist())
