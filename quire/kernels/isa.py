"""Which instruction sets this machine's CPU runs, and the limit that oneDNN inside torch needs.

A virtual machine may advertise AMX and still fault on the first tile instruction, which kills the process. So AMX is
probed in a child process first. Standard library only. The entry points call `prepare` before the first matmul, and
`quire info` prints the result of `read_cpu`. This module has no kernels.
"""

from __future__ import annotations

import functools
import os
import platform
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from quire.config import onednn_max_isa

FLAGS_OF_INTEREST = (
    "avx2",
    "avx_vnni",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "amx_fp16",
    "asimd",
    "asimddp",
    "i8mm",
)
ARM = ("aarch64", "arm64")  # as Linux and macOS name it

# Where Linux states what an Arm CPU has: entries 16 and 26 of the auxiliary vector, and the bit of each flag.
HWCAP, HWCAP2 = 16, 26
ARM_FLAGS = {"asimd": (HWCAP, 1), "asimddp": (HWCAP, 20), "i8mm": (HWCAP2, 13)}
PROBE_TIMEOUT_S = 5.0
REFUSED_STATUS = 3

# Machine code of a function that takes the address of a 64-byte tile configuration in rdi (System V convention).
LOAD_CONFIG = bytes.fromhex("c4e2784907")  # ldtilecfg [rdi]
ZERO_TILES = bytes.fromhex("c4e27b49c0 c4e27b49c8 c4e27b49d0")  # tilezero tmm0, tmm1, tmm2
DOT_INT8 = bytes.fromhex("c4e26b5ec1")  # tdpbssd tmm0, tmm1, tmm2
DOT_BF16 = bytes.fromhex("c4e26a5cc1")  # tdpbf16ps tmm0, tmm1, tmm2
RELEASE_TILES = bytes.fromhex("c4e27849c0")  # tilerelease
RETURN = bytes.fromhex("c3")

# Palette 1; tiles 0, 1 and 2 have 64 bytes in each of 16 rows.
TILE_CONFIG = b"\1".ljust(16, b"\0") + (b"\x40\0" * 3).ljust(32, b"\0") + (b"\x10" * 3).ljust(16, b"\0")

# prctl 4 is PR_SET_DUMPABLE: a fault in the probe leaves no core file. System call 158 is arch_prctl, 0x1023 is
# ARCH_REQ_XCOMP_PERM and 18 the tile data, which a process must request from the kernel.
CHILD = f"""
import ctypes, mmap, sys
code, config, ask = bytes.fromhex(sys.argv[1]), bytes.fromhex(sys.argv[2]), sys.argv[3] == "ask"
libc = ctypes.CDLL(None)
libc.prctl(4, 0)
if ask and libc.syscall(158, 0x1023, 18):
    sys.exit({REFUSED_STATUS})
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(code)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
ctypes.CFUNCTYPE(None, ctypes.c_char_p)(address)(config)
"""


class AMX(StrEnum):
    ABSENT = "absent"
    RUNS = "runs"
    FAULTS = "faults"


@dataclass(frozen=True, slots=True)
class AMXState:
    """Whether tile instructions run on this machine; `detail` is the reason."""

    status: AMX
    detail: str


@dataclass(frozen=True, slots=True)
class CPU:
    """The processor as this process may use it."""

    vendor: str
    model: str
    cores: int  # that affinity and the control group's quota allow this process
    flags: frozenset[str]  # those of FLAGS_OF_INTEREST that are advertised
    amx: AMXState


def tile_code(flags: frozenset[str]) -> bytes:
    """A function with every kind of tile instruction that `flags` advertise and that quire or oneDNN uses."""
    dots = (DOT_INT8 if "amx_int8" in flags else b"") + (DOT_BF16 if "amx_bf16" in flags else b"")
    return LOAD_CONFIG + ZERO_TILES + dots + RELEASE_TILES + RETURN


def run_code(code: bytes, *, ask_for_tiles: bool = True, timeout_s: float = PROBE_TIMEOUT_S) -> AMXState:
    """Execute machine code in a child process. The state says whether it returned."""
    ask = "ask" if ask_for_tiles else "skip"
    command = [sys.executable, "-I", "-S", "-c", CHILD, code.hex(), TILE_CONFIG.hex(), ask]
    try:
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return AMXState(AMX.FAULTS, f"the probe did not come back within {timeout_s:g} s")
    except (OSError, ValueError) as error:
        return AMXState(AMX.FAULTS, f"the probe could not start: {error}")
    return probe_result(child.returncode, child.stderr)


def probe_result(status: int, stderr: str) -> AMXState:
    """The state for a probe's exit status. Any status but 0 counts as a fault: AMX is used only if the probe ran."""
    if status == 0:
        return AMXState(AMX.RUNS, "tile instructions ran in a probe")
    if status < 0:
        return AMXState(AMX.FAULTS, f"a tile instruction died with {signal_name(-status)}")
    if status == REFUSED_STATUS:
        return AMXState(AMX.FAULTS, "the kernel refuses the tile registers to this process")
    last_line = (stderr.strip().splitlines() or [f"exit status {status}"])[-1]
    return AMXState(AMX.FAULTS, f"the probe failed: {last_line}")


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def probe_amx(flags: frozenset[str]) -> AMXState:
    """Probe AMX if it is advertised. The flag alone is not enough: see the module's docstring."""
    if "amx_tile" not in flags:
        return AMXState(AMX.ABSENT, "the CPU does not advertise amx_tile")
    return run_code(tile_code(flags))


def read_cpu(cpuinfo: Path = Path("/proc/cpuinfo"), probe: Callable[[frozenset[str]], AMXState] = probe_amx) -> CPU:
    """Describe the CPU. Without a cpuinfo (not Linux), an x86 CPU has no flags, and AMX is absent."""
    fields = cpuinfo_fields(cpuinfo.read_text(errors="replace")) if cpuinfo.exists() else {}
    advertised = arm_flags() if platform.machine() in ARM else fields.get("flags", "").split()
    flags = frozenset(FLAGS_OF_INTEREST).intersection(advertised)
    return CPU(
        vendor=fields.get("vendor_id", "unknown"),
        model=fields.get("model name") or platform.processor() or platform.machine() or "unknown",
        cores=usable_cores(),
        flags=flags,
        amx=probe(flags),
    )


def arm_flags(auxv: Path = Path("/proc/self/auxv")) -> set[str]:
    """The flags of ARM_FLAGS that this CPU has. Every Arm CPU of Apple has the first two.

    They are what "Features" in /proc/cpuinfo lists. But an emulator (qemu) may show its host's cpuinfo.
    """
    if sys.platform == "darwin":
        return {"asimd", "asimddp"} | ({"i8mm"} if apple_has("FEAT_I8MM") else set())
    if not auxv.exists():
        return set()
    entries = dict(struct.iter_unpack("NN", auxv.read_bytes()))
    return {flag for flag, (entry, bit) in ARM_FLAGS.items() if entries.get(entry, 0) >> bit & 1}


def apple_has(feature: str) -> bool:
    try:
        command = ["/usr/sbin/sysctl", "-n", f"hw.optional.arm.{feature}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S).stdout.strip() == "1"
    except (OSError, subprocess.SubprocessError):
        return False


def cpuinfo_fields(text: str) -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in text.strip().split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    return fields


def usable_cores(cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Cores this process may run on, at least 1. A quota of 2.5 cores counts as 2: spinning threads share no core."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [read_quota(folder / "cpu.max") for folder in own_groups(cgroups, membership)]
    return max(1, int(min([allowed, *(quota for quota in quotas if quota is not None)])))


def own_groups(cgroups: Path, membership: Path) -> list[Path]:
    """The control group (version 2) this process is in and those above it, as folders."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    path = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    names = Path(path).parts
    return [cgroups.joinpath(*names[:depth]) for depth in range(len(names) + 1)]


def read_quota(cpu_max: Path) -> float | None:
    """Cores that a group's cpu.max allows ("250000 100000" is 2.5); None if it sets no limit."""
    try:
        quota, period = cpu_max.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def onednn_limit(cpu: CPU) -> str | None:
    """The highest instruction set that oneDNN may use if AMX is advertised but faults; None if it may use all."""
    if cpu.amx.status is not AMX.FAULTS:
        return None
    for flag, name in (
        ("avx512_fp16", "AVX512_CORE_FP16"),
        ("avx512_bf16", "AVX512_CORE_BF16"),
        ("avx512_vnni", "AVX512_CORE_VNNI"),
        ("avx512f", "AVX512_CORE"),
    ):
        if flag in cpu.flags:
            return name
    return "AVX2"


@functools.cache
def prepare() -> CPU:
    """Describe the CPU and limit oneDNN to instructions that do not fault. A limit set by the user stays.

    Call it before the first matmul: oneDNN reads the variable once, on first use. Torch may be imported before (tested
    with torch 2.13, oneDNN 3.12).
    """
    cpu = read_cpu()
    limit = onednn_limit(cpu)
    if limit is not None and onednn_max_isa() is None:
        os.environ["ONEDNN_MAX_CPU_ISA"] = limit
    return cpu
