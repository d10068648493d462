"""Tokenizer: text to token ids and back, for every checkpoint format.

It wraps the `tokenizers` library and adds what the engine needs: the ids that end an answer, the chat template, the
names of the special tokens. `load_tokenizer` reads one from a model's path. Incremental decoding is in
`text/detokenizer.py`.

Building the library's tokenizer of a GGUF file takes 0.1 s and 40 MiB for 49,152 tokens. So `ByteLevelEncoder` encodes
short texts where it can, and the library's tokenizer is built when a call first needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import BadModelFile, InvalidParams, ModelNotFound, kind
from quire.text.tokenizers.end_tokens import find_end_ids
from quire.text.tokenizers.pieces import TokenPieces, decoder_pieces

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from quire.text.tokenizers.byte_level import ByteLevelEncoder

MAX_SHORT = 1 << 15  # characters that are encoded without the library's tokenizer


class LazyBackend:
    """The library's tokenizer, built on first use."""

    def __init__(self, build: Callable[[], Backend]) -> None:
        self._build: Callable[[], Backend] | None = build
        self._backend: Backend | None = None
        self._lock = threading.Lock()

    @property
    def is_built(self) -> bool:
        return self._backend is not None

    def get(self) -> Backend:
        with self._lock:
            if self._build is not None:
                self._backend, self._build = self._build(), None
        assert self._backend is not None
        return self._backend


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokenizer:
    """One model's vocabulary. Safe to share between threads."""

    vocab_size: int  # ids are below this; a model's logits may be padded beyond it
    bos_token_id: int | None
    eos_token_id: int | None
    end_token_ids: frozenset[int]  # each of these ends an answer (llama.cpp's EOG tokens)
    special_token_ids: frozenset[int]
    special_tokens: Mapping[str, str]  # bos_token, eos_token, ...: the variables of chat templates
    chat_template: str | None
    pieces: TokenPieces = field(repr=False)
    find_token: Callable[[str], int | None] = field(repr=False)
    lazy_backend: LazyBackend = field(repr=False)
    encoder: ByteLevelEncoder | None = field(default=None, repr=False)

    @property
    def backend(self) -> Backend:
        """The library's tokenizer. The first use builds it."""
        return self.lazy_backend.get()

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """The tokenizer of a Hugging Face model directory."""
        from quire.text.tokenizers.huggingface import read_tokenizer_files

        files = read_tokenizer_files(path)
        added = files.backend.get_added_tokens_decoder()
        special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        special_tokens = files.special_tokens()
        eos_token_id = _id_of(files.backend, special_tokens.get("eos_token"))
        declared = files.end_ids() | ({eos_token_id} if eos_token_id is not None else set())
        return cls(
            vocab_size=max(files.backend.get_vocab_size(), *(token_id + 1 for token_id in added), 0),
            bos_token_id=_id_of(files.backend, special_tokens.get("bos_token")),
            eos_token_id=eos_token_id if eos_token_id is not None else min(declared, default=None),
            end_token_ids=frozenset(declared).union(find_end_ids(files.backend.token_to_id, special_ids)),
            special_token_ids=special_ids,
            special_tokens=special_tokens,
            chat_template=files.chat_template(),
            pieces=decoder_pieces(files.backend, {token_id: token.content for token_id, token in added.items()}),
            find_token=files.backend.token_to_id,
            lazy_backend=LazyBackend(lambda: files.backend),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer in the metadata of a GGUF file."""
        from quire.text.tokenizers.gguf import build_backend, make_encoder, make_pieces, read_vocabulary

        vocabulary = read_vocabulary(metadata)
        encoder, lazy_backend = make_encoder(vocabulary), LazyBackend(lambda: build_backend(vocabulary))
        # Without an encoder the library's tokenizer is built now, and the vocabulary is freed.
        find_token = lazy_backend.get().token_to_id if encoder is None else vocabulary.find
        template = metadata.get("tokenizer.chat_template")
        if not isinstance(template, str | None):
            raise BadModelFile("The GGUF file's tokenizer.chat_template is not text.")
        return cls(
            vocab_size=len(vocabulary.tokens),
            bos_token_id=vocabulary.named.get("bos"),
            eos_token_id=vocabulary.named.get("eos"),
            end_token_ids=vocabulary.end_ids(),
            special_token_ids=vocabulary.special_ids,
            special_tokens=vocabulary.special_tokens(),
            chat_template=template,
            pieces=make_pieces(vocabulary),
            find_token=find_token,
            lazy_backend=lazy_backend,
            encoder=encoder,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. The text of a special token becomes that token.

        `add_special_tokens` prepends the BOS token if the model has one. A rendered chat template already contains it.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several texts.

        Short texts are encoded by `encoder`, which holds the GIL, until the library's tokenizer is built. That one uses
        all cores, and its batch call, unlike the one for a single text, releases the GIL.
        """
        for text in texts:
            _check_text(text)
        if self.encoder is not None and not self.lazy_backend.is_built and sum(map(len, texts)) <= MAX_SHORT:
            return [self.encoder.encode(text, add_special_tokens) for text in texts]
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encoded]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids of a text, as `encode` gives them, and the character offset at which each token begins.

        Added special tokens have no characters. Some tokenizers exclude the space before a word from the span of its
        token although the token contains it; here it is included.
        """
        _check_text(text)
        encoding = self.backend.encode(text)
        offsets, end = [], 0
        for (start, stop), is_added in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
            if is_added:
                start = stop = end
            elif text[end:start].isspace():
                start = end
            offsets.append(start)
            end = max(end, stop)
        return encoding.ids, offsets

    def encode_offsets(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, int, int]]:
        """The id, start and stop of each token of a text. Start and stop are character offsets."""
        _check_text(text)
        (encoded,) = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return [(token, *span) for token, span in zip(encoded.ids, encoded.offsets, strict=True)]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a sequence. Bytes that are not UTF-8 become U+FFFD."""
        ids = [self._check_id(token_id) for token_id in token_ids]
        if skip_special_tokens:
            ids = [token_id for token_id in ids if token_id not in self.special_token_ids]
        return self.pieces.join(ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; empty for an id without a token, which may be padding."""
        return self.pieces[token_id]

    def token_text(self, token_id: int) -> str:
        """The text of a single token. Bytes that are not UTF-8 become U+FFFD."""
        return self.pieces[token_id].decode("utf-8", "replace")

    def id_to_token(self, token_id: int) -> str | None:
        """The token as it is stored in the vocabulary; None for an id without a token."""
        return self.pieces.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as it is stored in the vocabulary."""
        return self.find_token(token)

    def _check_id(self, token_id: int) -> int:
        if not 0 <= token_id < self.vocab_size:
            raise InvalidParams(f"Token id {token_id} is outside the vocabulary; ids are 0 to {self.vocab_size - 1}.")
        return token_id


def load_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer of a `.gguf` file or of a model directory."""
    if path.is_dir():
        return Tokenizer.from_directory(path)
    if not path.is_file():
        raise ModelNotFound(f"{path} does not exist; give a model directory or a .gguf file.")
    # Imported here because a directory needs no GGUF reader.
    from quire.weights.gguf import GGUFFile

    with GGUFFile(path) as file:
        return Tokenizer.from_gguf(file.metadata)


def _id_of(backend: Backend, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise InvalidParams(f"A text to tokenize is {kind(text)}; give a string.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParams(
            f"The text has a lone surrogate (half a character) at index {error.start}; remove it."
        ) from None
