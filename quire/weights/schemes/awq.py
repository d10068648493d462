"""AWQ, gemm layout: 4-bit codes and zeros packed along the outputs, eight in a word, in the order of a GPU's registers.

qweight [cols, rows / 8] int32, qzeros [groups, rows / 8] int32, scales [groups, rows]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.quant.code_format import CodeFormat, CodeRows
from quire.weights.fields import Fields
from quire.weights.safetensors import SafetensorsFiles
from quire.weights.schemes.scheme import FLOAT_SCALES, CodeMatrix, Module, Rows

INTEGERS = ("I32", "U32")
PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7], np.uint32)  # of outputs 0 to 7 in a word


@dataclass(frozen=True, slots=True)
class AWQ:
    group: int | None

    @classmethod
    def read(cls, fields: Fields) -> AWQ:
        bits, version = fields.count("bits" if fields.has("bits") else "w_bit"), fields.text("version", "gemm").lower()
        if bits != 4:
            raise fields.unsupported(f"{bits}-bit AWQ is not supported; quire reads 4 bits.")
        if version != "gemm":
            raise fields.unsupported(f"AWQ of version {version!r} is not supported; quire reads gemm.")
        if not fields.flag("zero_point", True):
            raise fields.unsupported("AWQ without zero_point is not supported.")
        group = fields.count("group_size" if fields.has("group_size") else "q_group_size", -1, least=-1)
        if group == 0:
            raise fields.bad("group_size is 0, and must be -1 or above 0")
        return cls(None if group == -1 else group)

    def may_stay_unread(self, name: str, files: SafetensorsFiles) -> bool:
        return False

    def matrix(self, module: Module) -> CodeMatrix | None:
        if not any(module.has(kind) for kind in ("qweight", "qzeros", "scales")):
            return None
        group = self.group or module.cols
        groups = module.num_groups(group)
        if module.rows % 8:
            raise module.bad(f"{module.rows} outputs are no whole words of 4-bit codes")
        needed: dict[str, tuple[tuple[int, int], tuple[str, ...]]] = {
            "qweight": ((module.cols, module.rows // 8), INTEGERS),
            "qzeros": ((groups, module.rows // 8), INTEGERS),
            "scales": ((groups, module.rows), FLOAT_SCALES),
        }
        for kind, what in needed.items():
            module.fits(kind, *what)
        format = CodeFormat("uint", 4, group, module.scale_type("scales"), has_zeros=True)

        def read(rows: Rows) -> CodeRows:
            index = np.arange(module.rows)[rows]
            scales = np.ascontiguousarray(module.read_floats("scales")[:, rows].T)
            return CodeRows(columns(module.read("qweight"), index), scales, columns(module.read("qzeros"), index))

        return CodeMatrix({module.stored_name(k): shape for k, (shape, _) in needed.items()}, format, read)


def columns(words: NDArray[Any], index: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The codes of the outputs in `index`: [n, words] -> [len(index), n]."""
    chosen = np.ascontiguousarray(words[:, index // 8].T).view(np.uint32)
    return ((chosen >> (4 * PLACES[index % 8])[:, None]) & 15).astype(np.uint8)
