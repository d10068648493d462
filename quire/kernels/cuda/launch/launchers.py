"""Faster builds of Triton's launchers, the C modules that launch kernels.

Triton builds a launcher for every kernel at -O3, which often takes longer than the kernel's own compilation. A launcher
only unpacks arguments, so -O1 is enough. `use` sets `triton.knobs.build.impl` to `build_quickly`, if it is not set.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path


def build_quickly(
    name: str,
    source: str,
    folder: str,
    library_dirs: Iterable[str],
    include_dirs: Iterable[str],
    libraries: Iterable[str],
) -> str:
    """The path of the extension module `name`, made of one C file, in `folder`."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("Triton needs a C compiler. Install gcc, or name one in the environment variable CC.")
    module = Path(folder) / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    headers = [*include_dirs, folder, sysconfig.get_path("include", "posix_prefix")]
    command = [compiler, source, "-O1", "-shared", "-fPIC", "-w", "-Wno-psabi", "-o", str(module)]
    command += [f"-I{path}" for path in headers] + [f"-L{path}" for path in library_dirs]
    command += [f"-l:{library}" if ".so" in library else f"-l{library}" for library in libraries]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return str(module)


def use() -> None:
    from triton import knobs

    if knobs.build.impl is None:
        knobs.build.impl = build_quickly
