"""Tiny vocabularies as GGUF metadata, and a slow reference tokenizer."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from quire.text.tokenizers.pieces import byte_alphabet

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "Ġ Ġ", "Ã ©", "1 2"]


def byte_level(**overrides: Any) -> dict[str, Any]:
    """All bytes, a dozen merges, four control tokens and a user-defined one."""
    tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    types = [NORMAL] * len(tokens)
    tokens += ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|x|>", "<br>"]
    types += [CONTROL] * 4 + [USER_DEFINED]
    metadata = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": types,
        "merges": MERGES,
        "bos_token_id": tokens.index("<|im_start|>"),
        "eos_token_id": tokens.index("<|endoftext|>"),
    }
    return _prefixed(metadata | overrides)


def sentencepiece(words: dict[str, float] | None = None, **overrides: Any) -> dict[str, Any]:
    """<unk> <s> </s>, all bytes, and words with scores; every character of a word is a token too."""
    words = (
        {"he": -1, "ll": -2, "hell": -3, "hello": -4, "▁w": -5, "or": -6, "▁wor": -7, "é!": -8}
        if words is None
        else words
    )
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *([BYTE] * 256)]
    characters = [c for c in dict.fromkeys("▁" + "".join(words)) if c not in words]
    tokens += [*words, *characters]
    types += [NORMAL] * (len(words) + len(characters))
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": [0.0] * 259 + list(words.values()) + [-1000.0 - i for i in range(len(characters))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return _prefixed(metadata | overrides)


def _prefixed(metadata: dict[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def merge_slowly(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece by its definition: again and again join the neighbours that score best, the leftmost of equals."""
    symbols = list(text)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not pairs:
            return symbols
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
