"""GPU kernels by Triton's interpreter, on a CPU: what a shape gets wrong is found without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    "script", ["interpreted", "interpreted_speculation exact", "interpreted_speculation", "interpreted_drafter exact"]
)  # fmt: skip
def test_kernels_and_the_runner_on_a_simulated_gpu(script: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", *f"tests.kernels.{script}".split()],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
