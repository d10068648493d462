"""ByteLevelEncoder: encodes text with the vocabulary of a GGUF file that the native extension holds (`csrc/bpe.h`).

It needs no Python string for each token and merge, so it is ready in milliseconds. Normalizer and pre-tokenizer are
those of the `tokenizers` library; matching of added tokens and merging are the extension's. The ids equal those of the
library's own model, which `gguf.py` builds where character offsets or many texts at once are needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import normalizers, pre_tokenizers

    from quire.text.tokenizers.pre_tokenizers import PreTokenizerSpec


class ByteLevelEncoder:
    """Encodes single texts. Safe to share between threads.

    bpe      the extension's `BPE`
    added    texts that are matched before the text is split into words, and their ids
    prefix   token ids before every text, with `add_special_tokens`
    suffix   token ids behind every text, with `add_special_tokens`
    """

    def __init__(
        self, bpe: Any, spec: PreTokenizerSpec, added: Mapping[str, int], prefix: Sequence[int], suffix: Sequence[int]
    ) -> None:
        self._bpe = bpe
        self._spec = spec
        self._prefix = list(prefix)
        self._suffix = list(suffix)
        for text, token_id in added.items():
            bpe.add_token(text, token_id)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        token_ids: list[int] = []
        for part in self._bpe.split_added(text):
            token_ids += [part] if isinstance(part, int) else self._encode_part(part)
        return self._prefix + token_ids + self._suffix if add_special_tokens else token_ids

    def _encode_part(self, text: str) -> list[int]:
        """The tokens of a text without added tokens."""
        if self._normalizer is not None:
            text = self._normalizer.normalize_str(text)
        words = [word for word, _ in self._pre_tokenizer.pre_tokenize_str(text)]
        token_ids: list[int] = self._bpe.encode_words(words, self._spec.ignore_merges)
        return token_ids

    @cached_property
    def _normalizer(self) -> normalizers.Normalizer | None:
        return self._spec.normalizer()

    @cached_property
    def _pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        return self._spec.pre_tokenizer()
