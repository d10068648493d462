"""Precompilation of GPU kernels by child processes, while this process imports torch and loads weights.

Compiling takes as long as loading and holds the GIL for most of it, so it is not done in a thread. The children fill
Triton's cache on disk; a second start finds the kernels there. This module loads no torch. `client.py` starts the
children and `build.py` waits for them.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from quire.config import EngineConfig, parse_speculate
from quire.engine.precompile_codes import find_codes
from quire.errors import QuireError
from quire.kernels.cuda_driver import find_capability
from quire.kernels.isa import usable_cores
from quire.models.config import ExpertsConfig, ModelConfig
from quire.weights.config import read_config

log = logging.getLogger("quire.engine")

MAX_PROCESSES = 8
CORES_EACH = 2
TIMEOUT_S = 60.0


class Precompilation:
    """The child processes. Each compiles a share of the kernels."""

    def __init__(self, children: Sequence[subprocess.Popen[bytes]] = ()) -> None:
        self._children = list(children)

    def wait(self) -> None:
        """Wait until all have exited. Kernels that they did not compile are compiled at their first launch."""
        deadline_s = time.monotonic() + TIMEOUT_S
        failures = {failure for child in self._children if (failure := self._end(child, deadline_s))}
        self._children.clear()
        for failure in sorted(failures):
            log.warning("Compiling kernels ahead failed, so the start takes longer: %s", failure)

    def _end(self, child: subprocess.Popen[bytes], deadline_s: float) -> str:
        """Wait for one child. Returns its error, or an empty string."""
        try:
            _, errors = child.communicate(timeout=max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            return f"it took more than {TIMEOUT_S:g} s and was killed."
        return last_line(errors) if child.returncode else ""

    def cancel(self) -> None:
        """Kill the children."""
        for child in self._children:
            child.kill()
            child.communicate()
        self._children.clear()


def precompile(config: EngineConfig, path: Path) -> Precompilation:
    """Start the children, if quire's GPU kernels are used and there are enough cores."""
    count = min(MAX_PROCESSES, usable_cores() // CORES_EACH)
    if config.device == "cpu" or config.kernels == "torch" or count < 2:
        return Precompilation()
    capability = find_capability()
    if capability is None:
        return Precompilation()
    with suppress(QuireError):  # build_engine raises it again
        model = json.dumps(describe(config, read_config(path), capability, path)).encode()
        return Precompilation(start_children(model, count))
    return Precompilation()


def start_children(model: bytes, count: int) -> list[subprocess.Popen[bytes]]:
    """All of them or none: each has a share of the kernels."""
    children: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(count):
            children.append(start_child(model, index, count))
    except OSError as error:
        log.warning("Kernels are not compiled ahead, so the start takes longer: %s", error)
        Precompilation(children).cancel()
        return []
    return children


def describe(
    config: EngineConfig, model: ModelConfig, capability: tuple[int, int], path: Path | None = None
) -> dict[str, object]:
    """The fields of `Model` in `kernels/cuda/launch/precompile.py`."""
    codes, has_plain = find_codes(config, model, path)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if capability >= (8, 0) else "float16"
    return {
        "capability": capability,
        "dtype": dtype,
        "kv_dtype": dtype if config.kv_dtype == "auto" else config.kv_dtype,
        "block_size": config.block_size,
        "exact": config.exact,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rotary_dim": model.rope.dim,
        "interleaved": model.rope.interleaved,
        "vocab_size": model.vocab_size,
        "activation": model.activation,
        "scale": model.scale,
        "windows": sorted(set(model.windows), key=str),
        "attention_softcap": model.attention_softcap,
        "logit_softcap": model.logit_softcap,
        "rotates": model.structure.rotates,
        "has_slopes": model.structure.slopes is not None,
        "has_sinks": model.attention_sinks,
        "mixture": describe_experts(model.experts),
        "latent": None if model.latent is None else asdict(model.latent),
        "gated": model.structure.gated,
        "layer_norm": model.structure.norm == "layer",
        "norm_bias": model.structure.norm_bias,
        "codes": codes if dtype != "float32" else [],
        "plain": has_plain or dtype == "float32",
        "speculates": config.speculate != "off" and (config.exact or bool(parse_speculate(config.speculate))),
    }


def describe_experts(experts: ExpertsConfig | None) -> dict[str, object] | None:
    """The fields of `Mixture` there."""
    if experts is None:
        return None
    return asdict(experts.routing) | {
        "size": experts.intermediate_size,
        "shared_size": experts.shared_size,
        "shared_gate": experts.shared_gate,
        "has_correction": experts.has_correction,
        "bias": experts.bias,
        "activation": experts.activation,
        "limit": experts.limit,
    }


def start_child(model: bytes, index: int, count: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "quire.kernels.cuda.launch.precompile", str(index), str(count)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
    )
    assert child.stdin is not None
    with suppress(BrokenPipeError):
        child.stdin.write(model)
        child.stdin.close()
    child.stdin = None
    return child


def last_line(text: bytes) -> str:
    return text.decode(errors="replace").strip().rpartition("\n")[2]
