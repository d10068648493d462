"""The text that a model is calibrated with, as windows of tokens. One in the public domain comes with quire."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.bench.compare import prefix_of, read_text, split
from quire.errors import InvalidParams
from quire.text.tokenizers.tokenizer import Tokenizer

BUILT_IN_TEXT = Path(__file__).with_name("calibration.txt")
DEFAULT_WINDOW, DEFAULT_MAX_TOKENS = 512, 16384
MIN_TOKENS = 256


def calibration_windows(
    tokenizer: Tokenizer, text: Path | None, window: int, max_tokens: int
) -> tuple[list[list[int]], str]:
    """Windows of a file's text or of the built-in one, and where the text is from."""
    content = BUILT_IN_TEXT.read_text(encoding="utf-8") if text is None else read_text(text, max_tokens)
    tokens = tokenizer.encode(content, add_special_tokens=False)[:max_tokens]
    source = "the text that comes with quire" if text is None else str(text)
    if len(tokens) < MIN_TOKENS:
        raise InvalidParams(
            f"{source} has {len(tokens)} tokens, and a calibration needs at least {MIN_TOKENS}. Give a longer text, or "
            "none to use the one that comes with quire.",
            "text",
        )
    return split(tokens, window, prefix_of(tokenizer)), source


def count_tokens(windows: Sequence[Sequence[int]]) -> int:
    return sum(map(len, windows))
