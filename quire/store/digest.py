"""A digest of a model's files, so that two recordings can tell whether they were made with the same weights.

Files of up to WHOLE_BYTES are hashed whole, larger ones in pieces at even distances: reading all of a large model would
take as long as loading it. Weights that were trained or quantized differ in every piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

WHOLE_BYTES = 1 << 30
PIECE_BYTES = 1 << 20
STRIDE_BYTES = 64 << 20
SUFFIXES = (".gguf", ".safetensors", ".json", ".model")


def digest_of(path: Path) -> str:
    """Of a .gguf file, or of a directory's weights, configuration and tokenizer."""
    from hashlib import blake2b  # imported here, as the other modules of the store do

    digest = blake2b(digest_size=16)
    for file in model_files(path):
        size = file.stat().st_size
        name = file.name if path.is_dir() else ""
        digest.update(f"{name}\0{size}\0".encode())
        for piece in pieces(file, size):
            digest.update(piece)
    return digest.hexdigest()


def model_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.iterdir() if file.is_file() and file.suffix in SUFFIXES)


def pieces(file: Path, size: int) -> Iterator[bytes]:
    stride = PIECE_BYTES if size <= WHOLE_BYTES else STRIDE_BYTES
    with file.open("rb") as opened:
        for begin in range(0, size, stride):
            opened.seek(begin)
            yield opened.read(PIECE_BYTES)
