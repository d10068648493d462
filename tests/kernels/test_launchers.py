"""The builder that Triton is given for its C modules; it needs a C compiler, and neither Triton nor a GPU."""

from __future__ import annotations

import importlib.util
import subprocess

import pytest

from quire.kernels.cuda.launch.launchers import build_quickly

pytestmark = pytest.mark.cpu

SOURCE = """
#include <Python.h>
#include <math.h>
#include "own.h"

static PyObject *root(PyObject *self, PyObject *x) { return PyFloat_FromDouble(sqrt(PyFloat_AsDouble(x)) + OWN); }
static PyMethodDef methods[] = {{"root", root, METH_O, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "rooted", "", -1, methods};
PyMODINIT_FUNC PyInit_rooted(void) { return PyModule_Create(&module); }
"""


def test_a_module_is_built_and_works(tmp_path):
    (tmp_path / "headers").mkdir()
    (tmp_path / "headers" / "own.h").write_text("#define OWN 1\n")
    (tmp_path / "rooted.c").write_text(SOURCE)
    libraries = ["m", "libm.so.6"]  # by name, and by file
    path = build_quickly(
        "rooted", str(tmp_path / "rooted.c"), str(tmp_path), ["/usr/lib"], [str(tmp_path / "headers")], libraries
    )
    spec = importlib.util.spec_from_file_location("rooted", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.root(9.0) == 4.0


def test_what_does_not_compile_is_an_error(tmp_path):
    (tmp_path / "wrong.c").write_text("int x = ;")
    with pytest.raises(subprocess.CalledProcessError):
        build_quickly("wrong", str(tmp_path / "wrong.c"), str(tmp_path), [], [], [])


def test_a_machine_without_a_compiler_is_told_so(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="needs a C compiler"):
        build_quickly("none", "none.c", str(tmp_path), [], [], [])
