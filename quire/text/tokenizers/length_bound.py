"""LengthBound: a lower bound on the number of tokens of a text, without encoding it.

The server refuses a prompt that cannot fit the context by this bound, because encoding megabytes takes seconds. The
bound is valid only if the tokenizer drops no input; `find_length_bound` returns None unless that is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.text.tokenizers.pieces import SPACE_MARK, byte_alphabet

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

NFC_RATIO = 4  # composing characters makes UTF-8 at most 3.5 times shorter
KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation"})


@dataclass(frozen=True, slots=True)
class LengthBound:
    max_token_bytes: int  # the most bytes of UTF-8 in one token
    dropped: bytes = b""  # bytes without a token, which the tokenizer drops

    def min_tokens(self, text: str) -> int:
        """The text has at least this many tokens."""
        num_bytes = len(text.encode(errors="replace").translate(None, self.dropped))
        return -(-num_bytes // self.max_token_bytes)


def find_length_bound(backend: Backend) -> LengthBound | None:
    """The bound of a tokenizer; None if a token can stand for any amount of text."""
    from tokenizers import models

    ratio = _normalizer_ratio(backend)
    if ratio is None or not _pre_tokenizer_keeps_all(backend) or not isinstance(backend.model, models.BPE):
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # such a token absorbs any number of spaces
        return None
    vocabulary = backend.get_vocab()
    if any(step["type"] == "ByteLevel" for step in _steps(backend.pre_tokenizer)):
        longest = max(max(map(len, vocabulary)), *(len(token.content.encode()) for token in added), 1)
        dropped = bytes(byte for byte, char in enumerate(byte_alphabet()) if char not in vocabulary)
        return LengthBound(longest * ratio, dropped)
    if not backend.model.byte_fallback or not all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return None
    return LengthBound(max(len(token.replace(SPACE_MARK, " ").encode()) for token in vocabulary) * ratio)


def _normalizer_ratio(backend: Backend) -> int | None:
    """The factor by which the normalizer can shorten a text; None if there is no bound."""
    ratio = 1
    for step in _steps(backend.normalizer):
        match step:
            case {"type": "NFC"}:
                ratio *= NFC_RATIO
            case {"type": "Prepend"} | {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                pass
            case _:
                return None
    return ratio


def _pre_tokenizer_keeps_all(backend: Backend) -> bool:
    return all(
        step["type"] in KEEPING_PRE_TOKENIZERS and step.get("behavior") != "Removed"
        for step in _steps(backend.pre_tokenizer)
    )


def _steps(component: Any) -> Iterable[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer, or the members of a sequence, as in tokenizer.json."""
    if component is None:
        return ()
    state = json.loads(component.__getstate__())
    steps: list[Mapping[str, Any]] = state.get("normalizers") or state.get("pretokenizers") or []
    return steps if state["type"] == "Sequence" else (state,)
