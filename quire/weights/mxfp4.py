"""MXFP4 experts: 32 codes of 4 bits share a scale that is a power of two. gpt-oss's are stored so.

In safetensors an expert's matrix is two tensors, `<name>_blocks` and `<name>_scales`. GGUF has the type MXFP4.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quire.layers.source import Part
from quire.quant.code_format import E2M1, CodeFormat, CodeRows
from quire.weights.code_part import CodePart
from quire.weights.safetensors import SafetensorsFiles

GROUP = 32
FORMAT = CodeFormat("table", 4, GROUP, "bf16", table=E2M1)

Bytes = NDArray[np.uint8]


def powers_of_two(exponents: Bytes) -> NDArray[np.float32]:
    """E8M0: 2 ** (e - 127). 255 is NaN."""
    return np.where(exponents == 255, np.nan, np.exp2(exponents.astype(np.float64) - 127)).astype(np.float32)


def of_directory(files: SafetensorsFiles, part: Part, cols: int) -> CodePart:
    """`part` is stacked, and is named after the plain tensor, whose stored rows are those of the blocks."""
    assert part.expert is not None
    index, count = part.expert
    blocks, scales = f"{part.name}_blocks", f"{part.name}_scales"
    groups = (count, part.stored_rows, -(-cols // GROUP))
    part_bytes = part.rows * groups[2] * (GROUP // 2 + 1)

    def read(start: int, stop: int) -> CodeRows:
        runs = part.stored_runs(start, stop)
        packed, exponents = (
            np.concatenate([files.read(name, ("U8",))[index][run.start : run.stop : run.step] for run in runs])
            for name in (blocks, scales)
        )
        packed = packed.reshape(len(packed), -1)
        codes = np.stack((packed & 15, packed >> 4), axis=-1)  # the low half of a byte comes first
        return CodeRows(np.ascontiguousarray(codes.reshape(len(codes), -1)[:, :cols]), powers_of_two(exponents))

    return CodePart(part, cols, {blocks: (*groups, GROUP // 2), scales: groups}, part_bytes, FORMAT, read)


def of_gguf(name: str, part: Part, cols: int, read_rows: Callable[[int, int], Bytes]) -> CodePart:
    """`read_rows(start, stop)` returns the blocks of the part's rows."""

    def read(start: int, stop: int) -> CodeRows:
        blocks = read_rows(start, stop).reshape(stop - start, cols // GROUP, 1 + GROUP // 2)
        packed = blocks[..., 1:]
        codes = np.concatenate((packed & 15, packed >> 4), axis=-1)  # the low halves of all bytes come first
        return CodeRows(np.ascontiguousarray(codes.reshape(len(codes), -1)), powers_of_two(blocks[..., 0]))

    part_bytes = part.rows * (cols // GROUP) * (1 + GROUP // 2)
    return CodePart(part, cols, {name: part.stored_shape(cols)}, part_bytes, FORMAT, read)
