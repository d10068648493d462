"""What each matrix of a checkpoint becomes on quire's own kernels, from headers alone. `quire info` prints it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.kernels import select_native
from quire.kernels.cpu.native import Native, multiplies_floats
from quire.layers.source import Part
from quire.weights.checkpoint import StoredPart
from quire.weights.loader import declared_parts, opened, survey
from quire.weights.tiles import format_of


def describe_matrices(path: Path, native: Native) -> list[dict[str, Any]]:
    """Name, shape, bytes in the files; on a CPU panels, their bytes, and in which type activations are multiplied; on a
    GPU tiles or the dense matrix, and their bytes, in types of 16 bits."""
    ops = select_native(native)
    with opened(path) as (config, checkpoint):
        declared = declared_parts(config, ops)
        found = zip(declared, survey(config, checkpoint, ops), strict=True)
        return [
            {
                "name": part.name,
                "shape": [part.rows, part.width(cols)],
                "file_bytes": stored.nbytes,
                "panels": stored.panel_format,
                "bytes": native.module.Panels(stored.panel_format, part.rows, part.width(cols)).nbytes,
                "activations": "float32" if multiplies_floats(stored.panel_format) else "int8",
                **on_gpu(part, stored, cols),
            }
            for (part, cols), stored in found
            if cols is not None
        ]


def on_gpu(part: Part, stored: StoredPart, cols: int) -> dict[str, Any]:
    format, width = format_of(part, stored, cols, None), part.width(cols)
    if format is None:
        return {"gpu": "dense", "gpu_bytes": 2 * part.rows * width}
    return {"gpu": format.name, "gpu_bytes": format.nbytes(part.rows, width)}
