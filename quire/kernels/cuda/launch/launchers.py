"""The C modules through which Triton launches kernels, built in half of the time.

Triton has the C compiler build one for every kernel and optimise it as far as it can, which often takes longer than
the kernel's own compilation and gains nothing: all that is in it is the unpacking of arguments. `build_quickly` is for
`triton.knobs.build.impl`; a setting that is already there is left alone.
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
    command += [f"-I{each}" for each in headers] + [f"-L{each}" for each in library_dirs]
    command += [f"-l:{each}" if ".so" in each else f"-l{each}" for each in libraries]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return str(module)


def use() -> None:
    from triton import knobs

    if knobs.build.impl is None:
        knobs.build.impl = build_quickly
