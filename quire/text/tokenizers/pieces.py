"""The bytes that each token stands for.

An answer is the concatenation of its tokens' bytes, read as UTF-8. `Tokenizer.decode` and the incremental `Detokenizer`
both go through here, so they cannot disagree. Bytes are worked out when a token is first seen and then kept, because a
vocabulary has far more tokens than an answer ever uses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

from quire.errors import UnsupportedModel

SPACE_MARK = "▁"

ToBytes = Callable[[str], bytes]


@dataclass(slots=True)
class Pieces:
    """Token id to bytes. `strips_space`: text that begins with a space loses it, as the encoder had put it there."""

    id_to_token: Callable[[int], str | None]
    to_bytes: ToBytes
    strips_space: bool
    _known: dict[int, bytes]

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id that has no token."""
        piece = self._known.get(token_id)
        if piece is None:
            token = self.id_to_token(token_id)
            piece = self._known[token_id] = b"" if token is None else self.to_bytes(token)
        return piece

    def join(self, token_ids: Iterable[int]) -> str:
        """The text of a whole sequence."""
        data = b"".join(map(self.__getitem__, token_ids))
        if self.strips_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")


def byte_level_pieces(id_to_token: Callable[[int], str | None], added: Mapping[int, str]) -> Pieces:
    """Tokens are spelled in an alphabet of 256 printable characters, one a byte; added ones are spelled as they are."""
    known = {token_id: content.encode() for token_id, content in added.items()}
    alphabet = {char: byte for byte, char in enumerate(byte_alphabet())}

    def to_bytes(token: str) -> bytes:
        try:
            return bytes(map(alphabet.__getitem__, token))
        except KeyError:
            return token.encode()

    return Pieces(id_to_token, to_bytes, strips_space=False, _known=known)


def sentencepiece_pieces(id_to_token: Callable[[int], str | None], strips_space: bool) -> Pieces:
    """Tokens are text with spaces marked, or one byte spelled <0xAB>."""
    return Pieces(id_to_token, lambda token: _spell((SPACE_MARK, " "), token), strips_space, _known={})


def _spell(space: tuple[str, str], token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            pass
    return token.replace(*space).encode()


def byte_alphabet() -> str:
    """The character that stands for each byte 0 to 255: itself if it prints, otherwise one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(spare)) for byte in range(256))


def pieces_of(backend: Backend, added: Mapping[int, str]) -> Pieces:
    """Read the decoder of a tokenizer.json."""
    steps = list(_steps(backend))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return byte_level_pieces(backend.id_to_token, added)
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return sentencepiece_pieces(backend.id_to_token, any(map(_strips_space, filter(_is_understood, steps))))
    raise UnsupportedModel(
        f"tokenizer.json has the decoder {' + '.join(sorted(kinds)) or 'none'}; "
        "quire reads byte-level and SentencePiece ones."
    )


def _steps(backend: Backend) -> Iterable[Mapping[str, Any]]:
    if backend.decoder is None:
        return ()
    state = json.loads(backend.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else (state,)


def _is_understood(step: Mapping[str, Any]) -> bool:
    """Whether a step does what Llama's and Gemma's tokenizers do; others would need an engine of their own."""
    match step["type"]:
        case "Replace":
            understood = step["pattern"] == {"String": SPACE_MARK} and step["content"] == " "
        case "Strip":
            understood = (step["content"], step["start"], step["stop"]) == (" ", 1, 0)
        case "Metaspace":
            understood = step["replacement"] == SPACE_MARK
        case _:
            understood = True
    if not understood:
        raise UnsupportedModel(f"tokenizer.json has a {step['type']} decoder that quire does not know: {dict(step)}.")
    return True


def _strips_space(step: Mapping[str, Any]) -> bool:
    return bool(step["type"] == "Strip" or (step["type"] == "Metaspace" and step["prepend_scheme"] != "never"))
