"""Which tiles hold a part of a matrix on a GPU. From headers alone and without torch: `tiled_source.py` fills them."""

from __future__ import annotations

from quire.layers.source import Part
from quire.quant.tile_format import TileFormat, rounded_tile_format
from quire.weights.checkpoint import StoredPart

MIN_CHUNK = 64  # inputs of a tile, at least, for products that are faster than dense ones


def format_of(part: Part, stored: StoredPart, cols: int, quantize: str | None) -> TileFormat | None:
    """The tiles that hold a part; None: it becomes dense. The layers' plain matrices are rounded as `quantize` says."""
    if part.expert is not None:
        return None
    if not stored.quantized:
        return rounded_format(part, part.width(cols), quantize)
    format = stored.tile_format
    return format if format is not None and is_fast(format) else None


def is_fast(format: TileFormat) -> bool:
    """Whether products with such tiles are faster than with the dense matrix. Tables and groups of 32, as GGUF files
    have them, take longer (`python benchmarks/tiles.py`, docs/log.md)."""
    return format.table is None and format.chunk >= MIN_CHUNK


def rounded_format(part: Part, width: int, quantize: str | None) -> TileFormat | None:
    """Embedding, head and experts stay as they are."""
    if quantize is None or part.expert is not None or ".layers." not in part.name:
        return None
    return rounded_tile_format(quantize, width)
