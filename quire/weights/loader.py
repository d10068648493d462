"""Builds a model that is ready to run from a path. The engine calls `opened`, `survey` and `build_model`.

A path is a `.gguf` file or a directory with `config.json` and safetensors. `quire/store/` finds and downloads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import InvalidParams
from quire.kernels import Kernels
from quire.kernels.arrays import ITEM_BYTES
from quire.layers.source import Part, Shape
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder
from quire.models.registry import MODELS
from quire.weights.checkpoint import Checkpoint, StoredPart
from quire.weights.config import read_directory_config, read_gguf_config
from quire.weights.fields import read_json
from quire.weights.gguf import GGUFFile
from quire.weights.gguf_checkpoint import GGUFCheckpoint
from quire.weights.names import is_draft_layer, is_key_of_sharing_layer, may_stay_unread
from quire.weights.survey import Survey, check

if TYPE_CHECKING:
    from quire.weights.dense_source import DenseSource
    from quire.weights.panel_source import PanelSource
    from quire.weights.random_tensors import RandomTensors
    from quire.weights.random_weights import RandomPanels
    from quire.weights.tiled_source import TiledSource

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, its configuration, and the memory that its weights take.

    `unused` are tensors in the files that the model does not need. `names.may_stay_unread` allows each of them.
    """

    model: Decoder
    config: ModelConfig
    weight_bytes: int
    unused: tuple[str, ...] = ()


def load_model(
    path: Path,
    *,
    dtype: str,
    ops: Kernels,
    packed: bool = False,
    quantize: str | None = None,
    max_len: int | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Open the files and build the model that they describe. See `build_model` for the options."""
    with opened(path) as (config, checkpoint):
        config = shorten(config, max_len, path)
        return build_model(
            config,
            checkpoint,
            dtype=dtype,
            ops=ops,
            packed=packed,
            quantize=quantize,
            progress=progress,
        )


def build_model(
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    dtype: str,
    ops: Kernels,
    packed: bool = False,
    quantize: str | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Build the model and fill it with the checkpoint's weights.

    If `ops` are quire's own CPU kernels, matrices are packed for them, and plain ones are quantized as `quantize` says.
    Otherwise they become dense in `dtype`, or with `packed` keep their quantized blocks. `progress` gets the bytes read
    so far and the total.
    """
    total = sum(stored.nbytes for stored in survey(config, checkpoint, ops))
    with open_source(checkpoint, dtype, ops, packed, quantize, counter(total, progress)) as source:
        model = MODELS[config.family](config, source, ops)
    unused = tuple(name for name in checkpoint.shapes if name not in source.used)
    return LoadedModel(model, config, source.nbytes, unused)


def open_source(
    checkpoint: Checkpoint,
    dtype: str,
    ops: Kernels,
    packed: bool = False,
    quantize: str | None = None,
    on_read: Callable[[int], None] | None = None,
) -> PanelSource | DenseSource | TiledSource:
    """The source of weights in the form that `ops` need."""
    if ops.native is not None:
        from quire.weights.panel_source import PanelSource

        return PanelSource(checkpoint, ops.native, quantize=quantize, on_read=on_read)
    from quire.kernels.torch_arrays import torch_type

    assert ops.linear is not None
    if has_tiles(ops, dtype):
        from quire.weights.tiled_source import TiledSource

        return TiledSource(
            checkpoint, torch_type(dtype), ops.device, linear=ops.linear, exact=ops.exact, quantize=quantize,
            on_read=on_read,
        )  # fmt: skip
    from quire.weights.dense_source import DenseSource

    return DenseSource(
        checkpoint, torch_type(dtype), ops.device, packed=packed, keeps_mxfp4=ops.fused is not None, linear=ops.linear,
        on_read=on_read,
    )  # fmt: skip


def has_tiles(ops: Kernels, dtype: str) -> bool:
    """Whether there are kernels that multiply codes: quire's own on a GPU, for types of 16 bits."""
    return ops.fused is not None and ITEM_BYTES[dtype] == 2


def build_random_model(config: ModelConfig, *, dtype: str, ops: Kernels, quantize: str | None = None) -> LoadedModel:
    """The model with random weights, for benchmarks. Only the configuration is read."""
    source = random_source(0, dtype, ops, quantize)
    return LoadedModel(MODELS[config.family](config, source, ops), config, source.nbytes)


def random_source(seed: int, dtype: str, ops: Kernels, quantize: str | None = None) -> RandomPanels | RandomTensors:
    if ops.native is not None:
        from quire.weights.random_weights import RandomPanels

        return RandomPanels(seed, ops.native, quantize)
    from quire.kernels.torch_arrays import torch_type

    assert ops.linear is not None
    if quantize is not None:
        from quire.weights.random_tiles import RandomTiles

        return RandomTiles(seed, torch_type(dtype), ops.device, ops.linear, quantize, exact=ops.exact)
    from quire.weights.random_tensors import RandomTensors

    return RandomTensors(seed, torch_type(dtype), ops.device, ops.linear)


def shorten(config: ModelConfig, max_len: int | None, path: Path) -> ModelConfig:
    if max_len is not None and max_len > config.max_len:
        raise InvalidParams(
            f"max_len is {max_len:,}, but {path.name} was made for {config.max_len:,} tokens; lower it."
        )
    return replace(config, max_len=max_len or config.max_len)


@contextmanager
def opened(path: Path) -> Iterator[tuple[ModelConfig, Checkpoint]]:
    if path.is_dir():
        from quire.weights.safetensors import SafetensorsFiles  # a GGUF file starts without these
        from quire.weights.safetensors_checkpoint import SafetensorsCheckpoint
        from quire.weights.schemes.read import read_scheme

        config = read_directory_config(path)
        scheme = read_scheme(read_json(path / "config.json"), str(path / "config.json"))
        yield config, SafetensorsCheckpoint(SafetensorsFiles(path), config.family, scheme)
        return
    with GGUFFile(path) as file:
        config = read_gguf_config(file)
        yield config, GGUFCheckpoint(file, config.family)


def survey(config: ModelConfig, checkpoint: Checkpoint, ops: Kernels) -> list[StoredPart]:
    """How the checkpoint stores each part that the model declares. All their tensors exist, in the right shape."""
    found = [checkpoint.find(part, cols) for part, cols in declared_parts(config, ops)]
    available = checkpoint.shapes
    ignored = {
        name
        for name in available
        if may_stay_unread(name, tied=config.tie_embeddings) or checkpoint.may_stay_unread(name)
    }
    if config.family == "deepseek":
        ignored |= {name for name in available if is_draft_layer(name, config.num_layers)}
    if config.gemma4 is not None:
        ignored |= {name for name in available if is_key_of_sharing_layer(name, config.num_stored_layers)}
    expected: dict[str, Shape] = {}
    for stored in found:
        expected.update(stored.tensors)
    check(expected, available, ignored)
    return found


def declared_parts(config: ModelConfig, ops: Kernels) -> list[tuple[Part, int | None]]:
    """The parts that a model reads from a source, with the columns of their matrix, or None for a vector."""
    source = Survey()
    MODELS[config.family](replace(config, max_len=1), source, ops)  # max_len sizes tables, not weights
    return source.declared


def count_weights(config: ModelConfig, ops: Kernels) -> int:
    """The number of a model's parameters."""
    return sum(num_values(part, cols) for part, cols in declared_parts(config, ops))


def weight_bytes(
    found: Sequence[StoredPart], dtype: str, *, packed: bool = False, tiled: bool = False, quantize: str | None = None
) -> int:
    """Bytes of the weights that `build_model` makes when it does not pack them for quire's own CPU kernels."""

    def num_bytes(stored: StoredPart) -> int:
        cols, part = stored.cols, stored.part
        if packed and stored.quantized and cols is not None:
            return stored.nbytes
        if tiled and cols is not None:
            from quire.weights.code_part import is_mxfp4_expert
            from quire.weights.tiles import format_of

            if is_mxfp4_expert(stored):
                return stored.nbytes
            if format := format_of(part, stored, cols, quantize):
                return format.nbytes(part.rows, part.width(cols))
        return num_values(part, cols) * ITEM_BYTES[dtype]

    return sum(map(num_bytes, found))


def num_values(part: Part, cols: int | None) -> int:
    return part.rows if cols is None else part.rows * part.width(cols)


def counter(total: int, progress: Progress | None) -> Callable[[int], None]:
    """A function that adds up bytes and calls `progress` with the sum and the total."""
    done = 0

    def add(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, total)

    return add
