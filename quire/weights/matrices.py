"""What each matrix of a checkpoint becomes on quire's own CPU kernels, from headers alone. `quire info` prints it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.kernels import select_native
from quire.kernels.cpu.native import Native, multiplies_floats
from quire.weights.loader import declared_parts, opened, survey


def describe_matrices(path: Path, native: Native) -> list[dict[str, Any]]:
    """Name, shape, bytes in the files, panels, their bytes, and in which type activations are multiplied."""
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
            }
            for (part, cols), stored in found
            if cols is not None
        ]
