"""Matrices that quantization packages wrote: every backend has the values that the package dequantizes them to.

`make_fixtures.py` made the files. A digest stands for the values, which are larger than the codes.
"""

from __future__ import annotations

import json
import shutil
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from quire.kernels.cpu.native import Missing, load
from quire.kernels.cpu.tape import address
from quire.layers.source import Part
from quire.weights.code_part import CodePart
from quire.weights.safetensors import SafetensorsFiles
from quire.weights.safetensors_checkpoint import SafetensorsCheckpoint
from quire.weights.schemes.read import read_scheme
from quire.weights.survey import check

pytestmark = pytest.mark.cpu

MODULE: Any = load()
FIXTURES = sorted(Path(__file__).with_name("fixtures").glob("*.safetensors"))
NAME = "model.layers.0.mlp.up_proj.weight"
# bitsandbytes rounds twice: code times scale, and that times 1 / 127.
ROUNDED_TWICE = {"llm-int8"}
PANELS = {
    "ct-fp8": "fp8-row", "ct-fp8-block": "fp8-g32", "ct-fp8-tensor": "fp8-row", "fp8-block": "fp8-g32",
    "ct-int3": "int3z-g32", "ct-int4": "int4-g32", "ct-int4-zeros": "int4z-g32", "ct-int8-packed": "int8-row",
    "ct-w8a8": "int8-row", "ct-w8a8-zeros": "int8z-row", "ct-w8a8-tensor": "int8-row", "llm-int8": "int8-row",
    "fp4": "fp4-row", "fp4-double": "fp4-g64", "nf4": "nf4-row", "nf4-double": "nf4-g64", "nf4-across-rows": "nf4-g32",
    "mxfp4": "mxfp4-g32", "nvfp4": "nvfp4-g16",
}  # fmt: skip

each_fixture = pytest.mark.parametrize("path", FIXTURES, ids=[path.stem for path in FIXTURES])


def digest(values: NDArray[np.float32]) -> str:
    return blake2b(np.ascontiguousarray(values + np.float32(0)).tobytes(), digest_size=16).hexdigest()


def opened(path: Path, folder: Path) -> tuple[SafetensorsCheckpoint, Part, int, dict[str, str]]:
    shutil.copyfile(path, folder / "model.safetensors")
    with safe_open(path, framework="numpy") as file:
        about = file.metadata()
    rows, cols = json.loads(about["shape"])
    scheme = read_scheme({"quantization_config": json.loads(about["quantization_config"])})
    return SafetensorsCheckpoint(SafetensorsFiles(folder), scheme=scheme), Part(NAME, rows), cols, about


@each_fixture
def test_values_are_those_of_the_package(path: Path, tmp_path: Path) -> None:
    checkpoint, part, cols, about = opened(path, tmp_path)
    stored = checkpoint.find(part, cols)
    assert isinstance(stored, CodePart)
    available = checkpoint.shapes
    check(stored.tensors, available, {name for name in available if checkpoint.may_stay_unread(name)})
    values = stored.values(0, part.rows)
    if path.stem in ROUNDED_TWICE:
        codes, scales = checkpoint.files.read(stored.module.stored_name("weight")), stored.module.read_floats("SCB")
        values = codes.astype(np.float32) * scales[:, None] * np.float32(7.874015718698502e-3)
        np.testing.assert_array_max_ulp(stored.values(0, part.rows), values, 1)
    np.testing.assert_array_equal(values.ravel()[:8], np.array(json.loads(about["first"]), np.float32))
    assert digest(values) == about["digest"]
    assert digest(np.concatenate([stored.values(first, first + 8) for first in range(0, part.rows, 8)])) == digest(
        stored.values(0, part.rows)
    )


@each_fixture
@pytest.mark.skipif(isinstance(MODULE, Missing), reason="the C++ kernels are not built")
def test_panels_keep_the_codes(path: Path, tmp_path: Path) -> None:
    checkpoint, part, cols, _ = opened(path, tmp_path)
    stored = checkpoint.find(part, cols)
    assert isinstance(stored, CodePart)
    panels = MODULE.Panels(stored.panel_format, part.rows, cols)
    for task in stored.pack(panels, 0, None):  # type: ignore[arg-type]
        task()
    index, out = np.arange(part.rows), np.empty((part.rows, cols), np.float32)
    panels.unpack_rows(address(index), part.rows, address(out))
    assert panels.format == PANELS[path.stem]
    assert digest(out) == digest(stored.values(0, part.rows))


@each_fixture
def test_torch_keeps_the_codes(path: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    checkpoint, part, cols, _ = opened(path, tmp_path)
    stored = checkpoint.find(part, cols)
    assert isinstance(stored, CodePart)
    weight = checkpoint.weight([part], cols, "cpu", torch.float32)
    assert weight is not None
    values = stored.values(0, part.rows)
    assert digest(weight.dense().numpy()) == digest(values)
    assert digest(weight.rows(torch.tensor([3, 1])).numpy()) == digest(values[[3, 1]])
    assert weight.nbytes < 0.65 * 4 * values.size
    x = torch.randn(3, cols)
    torch.testing.assert_close(weight.matmul(x), x @ torch.from_numpy(values).T)
