"""Mixes: which GGML type each matrix of a GGUF file gets, by the names that llama.cpp gave them (Q4_K_M, ...).

Matrices that cost much when they are rounded (values, down projections, the head) get more bits. A row that is no
multiple of 256 values cannot have a K type and gets the type of 32 values that is next in size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.quant.ggml_types import GGMLType as T

FILE_TYPE_KEY = "general.file_type"
FALLBACKS = {T.Q2_K: T.Q4_0, T.Q3_K: T.Q4_0, T.Q4_K: T.Q5_0, T.Q5_K: T.Q5_1, T.Q6_K: T.Q8_0}


@dataclass(frozen=True, slots=True)
class Raised:
    """A type for some layers of a kind of matrix, and one for the others."""

    first: T
    other: T
    layers: str  # which get the first: "all", "ends" and every third between them, "eighth", "sixteenth", "four", "two"

    def type_of(self, layer: int, num_layers: int) -> T:
        return self.first if self._is_first(layer, num_layers) else self.other

    def _is_first(self, layer: int, num_layers: int) -> bool:
        if self.layers == "ends":
            eighth = num_layers // 8
            return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
        limits = {"all": num_layers, "eighth": num_layers // 8, "sixteenth": num_layers // 16, "four": 4, "two": 2}
        return layer < limits[self.layers]


@dataclass(frozen=True, slots=True)
class Mix:
    """`number` is llama.cpp's for `general.file_type`. `raised` is by the last word of a matrix's name."""

    number: int
    base: T
    head: T = T.Q6_K
    raised: Mapping[str, Raised] = field(default_factory=dict)


def everywhere(type: T) -> Raised:
    return Raised(type, type, "all")


MIXES: dict[str, Mix] = {
    "f16": Mix(1, T.F16, T.F16),
    "q4_0": Mix(2, T.Q4_0),
    "q4_1": Mix(3, T.Q4_1),
    "q8_0": Mix(7, T.Q8_0, T.Q8_0),
    "q5_0": Mix(8, T.Q5_0),
    "q5_1": Mix(9, T.Q5_1),
    "q2_k": Mix(
        10, T.Q2_K,
        raised={"v_proj": everywhere(T.Q4_K), "down_proj": everywhere(T.Q3_K), "o_proj": everywhere(T.Q3_K)},
    ),
    "q3_k_s": Mix(11, T.Q3_K),
    "q3_k_m": Mix(
        12, T.Q3_K,
        raised={
            "v_proj": Raised(T.Q5_K, T.Q4_K, "two"), "down_proj": Raised(T.Q5_K, T.Q4_K, "sixteenth"),
            "o_proj": everywhere(T.Q4_K),
        },
    ),
    "q3_k_l": Mix(13, T.Q3_K, raised=dict.fromkeys(("v_proj", "down_proj", "o_proj"), everywhere(T.Q5_K))),
    "q4_k_s": Mix(
        14, T.Q4_K,
        raised={"v_proj": Raised(T.Q5_K, T.Q4_K, "four"), "down_proj": Raised(T.Q5_K, T.Q4_K, "eighth")},
    ),
    "q4_k_m": Mix(15, T.Q4_K, raised=dict.fromkeys(("v_proj", "down_proj"), Raised(T.Q6_K, T.Q4_K, "ends"))),
    "q5_k_s": Mix(16, T.Q5_K),
    "q5_k_m": Mix(17, T.Q5_K, raised=dict.fromkeys(("v_proj", "down_proj"), Raised(T.Q6_K, T.Q5_K, "ends"))),
    "q6_k": Mix(18, T.Q6_K),
}  # fmt: skip


def type_of(mix: Mix, name: str, layer: int | None, num_layers: int, cols: int, *, tied: bool) -> T:
    """The type of a matrix. A tied embedding is the head too."""
    if layer is None:
        wanted = mix.head if tied or name.startswith("lm_head.") else mix.base
    else:
        raised = mix.raised.get(name.split(".")[-2])
        wanted = mix.base if raised is None else raised.type_of(layer, num_layers)
    if cols % wanted.block_size:
        wanted = FALLBACKS.get(wanted, wanted)
    return T.F16 if cols % wanted.block_size else wanted
