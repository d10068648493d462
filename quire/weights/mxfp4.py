"""gpt-oss's experts in MXFP4: a matrix is two tensors of all experts, `<name>_blocks` and `<name>_scales`.

`safetensors_checkpoint.py` calls `of_directory` where a directory has such tensors. GGUF files have the type MXFP4.
"""

from __future__ import annotations

import numpy as np

from quire.layers.source import Part
from quire.quant.code_format import E2M1, CodeFormat, CodeRows
from quire.weights.code_part import CodePart
from quire.weights.safetensors import SafetensorsFiles
from quire.weights.schemes.layouts import check_types, e8m0_values
from quire.weights.schemes.scheme import CodeMatrix, Module, Rows, unpack_nibbles

GROUP = 32


def of_directory(files: SafetensorsFiles, part: Part, cols: int) -> CodePart:
    """`part` is stacked, and is named after the plain tensor, whose stored rows are those of the blocks."""
    assert part.expert is not None
    index, count = part.expert
    module = Module(files, lambda name: "_".join(name.rsplit(".", 1)), part.name, part.stored_rows, cols)
    check_types(module, {"blocks": ("U8",), "scales": ("U8",)})
    groups = (count, part.stored_rows, -(-cols // GROUP))
    tensors = {module.stored_name("blocks"): (*groups, GROUP // 2), module.stored_name("scales"): groups}

    def read(rows: Rows) -> CodeRows:
        blocks = module.read("blocks")[index][rows]
        codes = unpack_nibbles(blocks.reshape(len(blocks), -1))[:, :cols]
        return CodeRows(np.ascontiguousarray(codes), e8m0_values()[module.read("scales")[index][rows]])

    return CodePart(module, CodeMatrix(tensors, CodeFormat("table", 4, GROUP, "bf16", table=E2M1), read), part)
