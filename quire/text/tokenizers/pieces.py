"""TokenPieces: the bytes of each token (llama.cpp's `token_to_piece`).

A text is the concatenation of its tokens' bytes, decoded as UTF-8. `Tokenizer.decode` and `Detokenizer` both use these
pieces, so they give the same text. The bytes of a token are computed on first use and cached.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from quire.errors import UnsupportedModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

SPACE_MARK = "▁"

ToBytes = Callable[[str], bytes]


class TokenPieces(dict[int, bytes]):
    """Token id to bytes; empty bytes for an id that has no token. `pieces[token_id]` computes a missing entry.

    strip_leading_space   the encoder adds a leading space, so decoding removes it
    known                 bytes of added tokens, which `to_bytes` does not decode
    """

    def __init__(
        self,
        id_to_token: Callable[[int], str | None],
        to_bytes: ToBytes,
        *,
        strip_leading_space: bool,
        known: Mapping[int, bytes] | None = None,
    ) -> None:
        super().__init__(known or {})
        self.id_to_token = id_to_token
        self.strip_leading_space = strip_leading_space
        self._to_bytes = to_bytes

    def __missing__(self, token_id: int) -> bytes:
        token = self.id_to_token(token_id)
        piece = self[token_id] = b"" if token is None else self._to_bytes(token)
        return piece

    def join(self, token_ids: Iterable[int]) -> str:
        """The text of a complete sequence."""
        data = b"".join(map(self.__getitem__, token_ids))
        if self.strip_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")


def byte_level_pieces(id_to_token: Callable[[int], str | None], added: Mapping[int, str]) -> TokenPieces:
    """Byte-level BPE: a token has one printable character for each byte. Added tokens are plain text."""
    known = {token_id: content.encode() for token_id, content in added.items()}
    alphabet = {char: byte for byte, char in enumerate(byte_alphabet())}

    def to_bytes(token: str) -> bytes:
        try:
            return bytes(map(alphabet.__getitem__, token))
        except KeyError:
            return token.encode()

    return TokenPieces(id_to_token, to_bytes, strip_leading_space=False, known=known)


def sentencepiece_pieces(id_to_token: Callable[[int], str | None], strip_leading_space: bool) -> TokenPieces:
    """SentencePiece: a token is text with ▁ for a space, or one byte written as <0xAB>."""
    return TokenPieces(id_to_token, _sentencepiece_bytes, strip_leading_space=strip_leading_space)


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            pass
    return token.replace(SPACE_MARK, " ").encode()


def byte_alphabet() -> str:
    """The character for each byte 0 to 255: the byte's own if it is printable, otherwise one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(spare)) for byte in range(256))


def decoder_pieces(backend: Backend, added: Mapping[int, str]) -> TokenPieces:
    """The pieces of a tokenizer, by the decoder in its tokenizer.json."""
    steps = list(_steps(backend))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return byte_level_pieces(backend.id_to_token, added)
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return sentencepiece_pieces(backend.id_to_token, any(map(_strip_leading_space, filter(_is_understood, steps))))
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
    """Refuse a decoder step that does something else than in the tokenizers of Llama and Gemma."""
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
        raise UnsupportedModel(
            f"tokenizer.json has a {step['type']} decoder that quire does not support: {dict(step)}."
        )
    return True


def _strip_leading_space(step: Mapping[str, Any]) -> bool:
    return bool(step["type"] == "Strip" or (step["type"] == "Metaspace" and step["prepend_scheme"] != "never"))
