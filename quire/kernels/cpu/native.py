"""The C++ kernels: whether the extension is built, which of its instruction sets the CPU runs, and the thread count.

`find` is called once an engine. Without an extension (no compiler when quire was installed), or on a CPU without AVX2
or NEON, it returns the reason, and torch is needed. `tape.py` and `native_ops.py` call the kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

from quire.kernels.isa import AMX, CPU

NEEDS = {
    "amx": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "amx_tile", "amx_int8"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
    "avxvnni": {"avx2", "fma", "f16c", "avx_vnni"},
    "avx2": {"avx2", "fma", "f16c"},
    "i8mm": {"asimd", "asimddp", "i8mm"},
    "dotprod": {"asimd", "asimddp"},
    "neon": {"asimd"},
}  # best first of each architecture
TILES = ("amx", "i8mm")  # have instructions that need unpacked codes
DENSE_FORMATS = ("f32", "bf16", "f16")  # formats of panels without codes

ROW_COUNTS = (8, 16, 32, 64, 128, 256)
MIN_GAIN = 0.03
ANY_ROWS = 1 << 31

log = logging.getLogger("quire.kernels")


@dataclass(frozen=True, slots=True)
class Native:
    """The extension, one of its instruction sets, and the number of threads."""

    module: ModuleType
    isa: str
    threads: int
    _few_rows: dict[str, int] = field(default_factory=dict)  # by format of panels

    def few_rows(self, format: str) -> int:
        """Up to this many rows that share a panel, codes are unpacked in registers. For more, they are stored unpacked.

        Measured when the first matrix of a format is loaded.
        """
        if multiplies_floats(format) or self.isa in TILES:
            return 0
        if format not in self._few_rows:
            self._few_rows[format] = choose_few_rows(partial(self.module.time_product, self.isa, format))
            log.debug("%s: codes are unpacked in registers for up to %d rows", format, self._few_rows[format])
        return self._few_rows[format]


def multiplies_floats(format: str) -> bool:
    """Whether products with panels of a format read activations as floats. Others read them in int8."""
    return format in DENSE_FORMATS or format.startswith("fp8")


def choose_few_rows(time_product: Callable[[int, bool], int]) -> int:
    """`time_product(rows, in_registers)` measures. The more rows share stored codes, the more it pays to store them."""
    for num_rows in ROW_COUNTS:
        if time_product(num_rows, False) < (1 - MIN_GAIN) * time_product(num_rows, True):
            return num_rows - 1
    return ANY_ROWS


@dataclass(frozen=True, slots=True)
class Missing:
    """Why the extension cannot be used, as a clause."""

    reason: str


def find(cpu: CPU, threads: int | None = None) -> Native | Missing:
    """The extension, with the best instruction set that is built and that this CPU runs."""
    module = load()
    if isinstance(module, Missing):
        return module
    isas = usable(cpu, module.built())
    if not isas:
        least = "NEON" if "neon" in module.built() else "AVX2"
        return Missing(f"quire's own CPU kernels need {least}, which this CPU does not report")
    return Native(module, isas[0], threads or cpu.cores)


def load() -> ModuleType | Missing:
    try:
        return import_module("quire.kernels.cpu._native")
    except ImportError as error:
        note = Path(__file__).with_name("native_missing.txt")
        why = note.read_text().strip().rstrip(".") if note.is_file() else f"they could not be loaded ({error})"
        return Missing(f"quire's own CPU kernels are missing: {why}")


def usable(cpu: CPU, built: list[str]) -> list[str]:
    """The instruction sets that are built and that this CPU runs, best first."""
    fit = [isa for isa, needs in NEEDS.items() if isa in built and needs <= cpu.flags]
    return [isa for isa in fit if isa != "amx" or cpu.amx.status is AMX.RUNS]
