"""The tokenizer of a model, whatever it is stored as. Called by the engine, the server and the command line."""

from __future__ import annotations

from pathlib import Path

from quire.errors import ModelNotFound
from quire.text.tokenizer import Tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer of a `.gguf` file or of a model directory."""
    if path.is_dir():
        return Tokenizer.from_directory(path)
    if not path.is_file():
        raise ModelNotFound(f"{path} does not exist; give a model directory or a .gguf file.")
    # Imported here, because a directory needs no GGUF reader.
    from quire.weights.gguf import GGUFFile

    with GGUFFile(path) as file:
        return Tokenizer.from_gguf(file.metadata)
