"""EETQ: int8 codes with a scale for each output, in the order of the registers of GPUs from Turing to Ada.

    weight or qweight [cols, rows] int8, weight_scales [rows] float16

The shape is that of the transposed matrix, the bytes are not in its order: they are codes plus 128, two outputs in turn
with 64 inputs each; in each 16 inputs are 0, 8, 1, 9, 2, 10, ... in the order below. Files made on Volta look the same
and have another order; nothing in them says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.quant.code_format import CodeFormat, CodeRows
from quire.weights.fields import Fields
from quire.weights.safetensors import SafetensorsFiles
from quire.weights.schemes.layouts import check_types
from quire.weights.schemes.scheme import FLOAT_SCALES, CodeMatrix, Module, Rows

TILE = 64  # inputs of one output that are next to each other; outputs are a multiple of it too
# Where the codes of 16 inputs lie. A register holds inputs 0, 8, 1, 9, the next one 2, 10, 3, 11, and so on.
PLACES = np.array([0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15])


@dataclass(frozen=True, slots=True)
class EETQ:
    @classmethod
    def read(cls, fields: Fields) -> EETQ:
        weights = fields.text("weights", "int8")
        if weights != "int8":
            raise fields.unsupported(f"EETQ with weights {weights!r} is not supported; quire reads int8.")
        return cls()

    def may_stay_unread(self, name: str, files: SafetensorsFiles) -> bool:
        return False

    def matrix(self, module: Module) -> CodeMatrix | None:
        kind = "qweight" if module.has("qweight") else "weight"
        if not module.has("weight_scales") and not (module.has(kind) and module.dtype(kind) == "I8"):
            return None
        check_types(module, {kind: ("I8",), "weight_scales": FLOAT_SCALES})
        if module.rows % TILE or module.cols % TILE:
            raise module.bad(f"{module.rows} outputs and {module.cols} inputs are no whole tiles of {TILE}")
        tensors = {
            module.stored_name(kind): (module.cols, module.rows),
            module.stored_name("weight_scales"): (module.rows,),
        }

        def read(rows: Rows) -> CodeRows:
            index = np.arange(module.rows)[rows]
            pairs = module.read(kind).view(np.uint8).reshape(module.rows // 2, module.cols // TILE, 2, TILE)
            stored = pairs[index // 2, :, index % 2].reshape(len(index), -1, len(PLACES))
            codes = np.ascontiguousarray(stored[:, :, PLACES]).reshape(len(index), module.cols)
            return CodeRows(codes, module.read_floats("weight_scales")[index][:, None])

        format = CodeFormat("uint", 8, module.cols, module.scale_type("weight_scales"), zero=128)
        return CodeMatrix(tensors, format, read)
