"""SqueezeLLM: 4-bit codes into a table of 16 values for each output. Files with a sparse part are refused.

qweight [cols / 8, rows] int32, lookup_table [rows, 16]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.layers.source import Shape
from quire.quant.code_format import CodeFormat, CodeRows
from quire.weights.fields import Fields
from quire.weights.safetensors import SafetensorsFiles
from quire.weights.schemes.scheme import FLOAT_SCALES, CodeMatrix, Module, Rows, unpack_bits

SPARSE = ("rows", "cols", "vals", "full_rows", "full_row_indices")


@dataclass(frozen=True, slots=True)
class SqueezeLLM:
    @classmethod
    def read(cls, fields: Fields) -> SqueezeLLM:
        bits = fields.count("wbits" if fields.has("wbits") else "bits", 4)
        if bits != 4:
            raise fields.unsupported(f"{bits}-bit SqueezeLLM is not supported; quire reads 4 bits.")
        return cls()

    def may_stay_unread(self, name: str, files: SafetensorsFiles) -> bool:
        return False

    def matrix(self, module: Module) -> CodeMatrix | None:
        if not module.has("qweight") and not module.has("lookup_table"):
            return None
        if sparse := [kind for kind in SPARSE if module.has(kind)]:
            raise module.unsupported(f"a SqueezeLLM matrix with a sparse part ({sparse[0]}) is not supported")
        if module.cols % 8:
            raise module.bad(f"{module.cols} inputs are no whole words of 4-bit codes")
        module.fits("qweight", (), ("I32",))
        module.fits("lookup_table", (), FLOAT_SCALES)
        tensors: dict[str, Shape] = {
            module.stored_name("qweight"): (module.cols // 8, module.rows),
            module.stored_name("lookup_table"): (module.rows, 16),
        }

        def read(rows: Rows) -> CodeRows:
            codes = unpack_bits(np.ascontiguousarray(module.read("qweight")[:, rows].T).view(np.uint32), 4)
            tables = np.ascontiguousarray(module.read_floats("lookup_table")[rows])
            return CodeRows(codes, np.ones((len(codes), 1), np.float32), tables=tables)

        format = CodeFormat("table", 4, module.cols, module.scale_type("lookup_table"), row_tables=True)
        return CodeMatrix(tensors, format, read)
