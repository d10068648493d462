"""The C++ kernels: whether the extension is built, which of its instruction sets the CPU runs, and the thread count.

`find` is called once an engine. Without an extension (no compiler when quire was installed), or on a CPU without AVX2
or NEON, it returns the reason, and the torch ops are used. `tape.py` and `native_ops.py` call the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Native:
    """The extension, one of its instruction sets, and the number of threads.

    Products of up to `few_rows` rows unpack codes in registers. Products of more rows store unpacked codes.
    """

    module: ModuleType
    isa: str
    threads: int
    few_rows: int


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
    return Native(module, isas[0], threads or cpu.cores, module.measure_few_rows(isas[0]))


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
