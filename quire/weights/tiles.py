"""Which tiles hold a part of a matrix on a GPU. From headers alone and without torch: `tiled_source.py` fills them."""

from __future__ import annotations

from quire.layers.source import Part
from quire.quant.tile_format import TileFormat, rounded_tile_format
from quire.weights.checkpoint import StoredPart


def format_of(part: Part, stored: StoredPart, cols: int, quantize: str | None) -> TileFormat | None:
    """The tiles that hold a part; None: it becomes dense. The layers' plain matrices are rounded as `quantize` says."""
    if part.expert is not None:
        return None
    return stored.tile_format if stored.quantized else rounded_format(part, part.width(cols), quantize)


def rounded_format(part: Part, width: int, quantize: str | None) -> TileFormat | None:
    """Embedding, head and experts stay as they are."""
    if quantize is None or part.expert is not None or ".layers." not in part.name:
        return None
    return rounded_tile_format(quantize, width)
