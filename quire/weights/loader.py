"""From a path to a model that is ready to run. The engine calls `load_model`.

A path is a `.gguf` file or a directory with a `config.json` and safetensors beside it. Finding, fetching and naming
models is `store.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quire.errors import InvalidParams
from quire.kernels import Kernels
from quire.layers.source import Part, Shape
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder
from quire.models.registry import MODELS
from quire.weights.checkpoint import Checkpoint, CheckpointSource, GGUFCheckpoint, SafetensorsCheckpoint, StoredPart
from quire.weights.config import read_directory_config, read_gguf_config
from quire.weights.gguf import GGUFFile
from quire.weights.names import may_stay_unread
from quire.weights.random_weights import RandomWeights
from quire.weights.safetensors import SafetensorsFiles
from quire.weights.survey import Survey, check

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, what its files said about it, and the memory its weights take.

    `unused` are the tensors that the files have and the model does not need; others than these would be refused.
    """

    model: Decoder
    config: ModelConfig
    weight_bytes: int
    unused: tuple[str, ...] = ()


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ops: Kernels,
    packed: bool = False,
    quantize: str | None = None,
    max_len: int | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Open the files, and build the model that they describe: see `build_model`."""
    with opened(path) as (config, checkpoint):
        config = shorten(config, max_len, path)
        return build_model(
            config,
            checkpoint,
            dtype=dtype,
            device=device,
            ops=ops,
            packed=packed,
            quantize=quantize,
            progress=progress,
        )


def build_model(
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ops: Kernels,
    packed: bool = False,
    quantize: str | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Build the model and fill it with the checkpoint's weights.

    Matrices are packed for our own kernels if `ops` are those, and plain ones rounded if `quantize` says so. Otherwise
    they become dense, or with `packed` stay in the blocks they are stored in. `progress` is told how many bytes of how
    many have been read.
    """
    total = sum(stored.nbytes for stored in survey(config, checkpoint, ops))
    on_read = counter(total, progress)
    with CheckpointSource(
        checkpoint,
        dtype,
        device,
        packed=packed,
        native=ops.native,
        linear=ops.linear,
        quantize=quantize,
        on_read=on_read,
    ) as source:
        model = MODELS[config.family](config, source, ops)
    unused = tuple(name for name in checkpoint.shapes if name not in source.used)
    return LoadedModel(model, config, source.nbytes, unused)


def build_random_model(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, ops: Kernels, quantize: str | None = None
) -> LoadedModel:
    """The model with numbers from a seed, for measuring: no weights are read."""
    source = RandomWeights(0, dtype, device, ops.linear, ops.native, quantize)
    return LoadedModel(MODELS[config.family](config, source, ops), config, source.nbytes)


def shorten(config: ModelConfig, max_len: int | None, path: Path) -> ModelConfig:
    if max_len is not None and max_len > config.max_len:
        raise InvalidParams(
            f"max_len is {max_len:,}, but {path.name} was made for {config.max_len:,} tokens; lower it."
        )
    return replace(config, max_len=max_len or config.max_len)


@contextmanager
def opened(path: Path) -> Iterator[tuple[ModelConfig, Checkpoint]]:
    if path.is_dir():
        yield read_directory_config(path), SafetensorsCheckpoint(SafetensorsFiles(path))
        return
    with GGUFFile(path) as file:
        config = read_gguf_config(file)
        yield config, GGUFCheckpoint(file, config.family)


def survey(config: ModelConfig, checkpoint: Checkpoint, ops: Kernels) -> list[StoredPart]:
    """How the checkpoint stores the parts that the model asks for; it has all of their tensors, in the right shape."""
    found = [checkpoint.find(part, cols) for part, cols in ask(config, ops)]
    available = checkpoint.shapes
    ignored = {name for name in available if may_stay_unread(name, tied=config.tie_embeddings)}
    expected: dict[str, Shape] = {}
    for stored in found:
        expected.update(stored.tensors)
    check(expected, available, ignored)
    return found


def ask(config: ModelConfig, ops: Kernels) -> list[tuple[Part, int | None]]:
    """The parts that a model asks a source for, with their columns if they are of a matrix."""
    source = Survey()
    MODELS[config.family](replace(config, max_len=1), source, ops)  # max_len sizes tables, not weights
    return source.asked


def count_weights(config: ModelConfig, ops: Kernels) -> int:
    """Numbers in all of a model's weights."""
    return sum(num_values(part, cols) for part, cols in ask(config, ops))


def weight_bytes(found: Sequence[StoredPart], dtype: torch.dtype, *, packed: bool = False) -> int:
    """Bytes that `build_model` will take for weights that are not packed for our own CPU kernels."""
    return sum(
        stored.nbytes
        if packed and stored.quantized and stored.cols is not None
        else num_values(stored.part, stored.cols) * dtype.itemsize
        for stored in found
    )


def num_values(part: Part, cols: int | None) -> int:
    return part.rows if cols is None else part.rows * part.width(cols)


def counter(total: int, progress: Progress | None) -> Callable[[int], None]:
    """Adds up bytes and tells `progress`."""
    done = 0

    def add(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, total)

    return add
