"""GPU kernels by Triton's interpreter, on a CPU: what a shape gets wrong is found without a GPU.

The scripts take a minute each, so they run at the same time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = pytest.mark.cpu

SCRIPTS = [
    "interpreted",
    "interpreted_families",
    "interpreted_tiles",
    "interpreted_speculation exact",
    "interpreted_speculation",
    "interpreted_drafter exact",
    "interpreted_experts",
    "interpreted_experts_engine mixture exact",
    "interpreted_experts_engine sinks",
    "interpreted_experts_engine latents exact",
    "interpreted_training",
]


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """One for each script that is tested."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"OMP_NUM_THREADS": "1"}
    wanted = {item.callspec.params["script"] for item in request.session.items if item.fspath == request.node.fspath}  # type: ignore[attr-defined]
    started = {
        script: subprocess.Popen(
            [sys.executable, "-m", *f"tests.kernels.{script}".split()],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for script in SCRIPTS
        if script in wanted
    }
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("script", SCRIPTS)
def test_kernels_and_the_runner_on_a_simulated_gpu(script: str, processes: dict[str, subprocess.Popen[str]]) -> None:
    _, errors = processes[script].communicate()
    assert processes[script].returncode == 0, errors[-2000:]
