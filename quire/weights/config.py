"""ModelConfig from a path. No weights are read, and no torch is loaded.

This module reads the files; `json_config.py` and `gguf_config.py` interpret their content. The engine and `quire info`
call `read_config`.
"""

from __future__ import annotations

from pathlib import Path

from quire.errors import UnsupportedModel
from quire.models.config import ModelConfig
from quire.quant.ggml_types import GGMLType
from quire.weights.fields import Fields, read_json
from quire.weights.gguf import GGUFFile
from quire.weights.gguf_config import config_from_gguf
from quire.weights.gguf_families import with_longrope

__all__ = ["config_from_gguf", "read_config", "read_directory_config", "read_gguf_config"]


def read_config(path: Path) -> ModelConfig:
    """From a `.gguf` file, or a directory with a `config.json`."""
    if path.is_dir():
        return read_directory_config(path)
    with GGUFFile(path) as file:
        return read_gguf_config(file)


def read_directory_config(directory: Path) -> ModelConfig:
    """`config.json`, with the end-of-sequence tokens and sampling parameters of `generation_config.json`, if any."""
    from quire.weights.json_config import config_from_json  # a GGUF file starts without it

    generation = directory / "generation_config.json"
    return config_from_json(
        read_json(directory / "config.json"),
        read_json(generation) if generation.is_file() else {},
        where=str(directory / "config.json"),
    )


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    shapes, where = {name: info.shape for name, info in file.tensors.items()}, str(file.path)
    config = config_from_gguf(file.metadata, shapes, rope_divisors(file), where=where)
    short, long = (rope_divisors(file, f"rope_factors_{length}.weight") for length in ("short", "long"))
    if short is None or long is None:
        return config
    return with_longrope(config, Fields(file.metadata, where, f"{file.metadata['general.architecture']}."), short, long)


def rope_divisors(file: GGUFFile, name: str = "rope_freqs.weight") -> list[float] | None:
    """The values of that tensor, or None if the file has no such tensor."""
    info = file.tensors.get(name)
    if info is None:
        return None
    if info.type is not GGMLType.F32:
        raise UnsupportedModel(f"{file.path}: {name} is of type {info.type.name}; quire supports F32 only.")
    values: list[float] = file.raw(info.name).copy().view("<f4").ravel().tolist()
    return values
