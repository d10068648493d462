"""Instruction sets are compiled apart: no object file may offer the linker a function that another one shares.

A function that two object files define alike (an inline one that was not inlined, a template of the standard library)
ends up in the extension once, from whichever file; code for AVX-512 would then run on a machine that has none.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

BUILD = Path(__file__).parents[3] / "build"
FOLDERS = (*BUILD.glob("native*"), BUILD / "arm/cmake")
OBJECTS = sorted(path for folder in FOLDERS for path in folder.glob("CMakeFiles/_native.dir/isa_*_*.cpp.o"))

if not OBJECTS or shutil.which("nm") is None:
    pytest.skip("the C++ kernels were not built here, or there is no nm", allow_module_level=True)


def weak_symbols(path):
    listing = subprocess.run(["nm", "-C", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    symbols = [line.split(maxsplit=2)[1:] for line in listing.splitlines()]
    assert symbols, listing
    return [name for kind, name in symbols if kind in "WVu"]


@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: path.name.removeprefix("isa_").removesuffix(".cpp.o"))
def test_shared_functions_stay_out_of_the_objects(path):
    own = f"quire::{path.name.split('_')[1]}::"  # isa_<name>_<part>.cpp.o
    assert [name for name in weak_symbols(path) if own not in name] == []
