"""Exit heads with random weights, written as directories, models whose last layers change nothing, and engines that
draft with an exit or let requests exit early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.engine.batch import BatchBuffers, BufferShape
from quire.engine.engine import Engine
from quire.engine.self_draft import SelfDraft
from quire.engine.self_speculation import Exit, build_split
from quire.engine.split_steps import SplitSteps
from quire.kernels import Kernels
from quire.kernels.cpu.split import SplitModel
from quire.layers.source import Part
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder
from quire.models.registry import MODELS
from quire.quant.weight import Weight
from quire.speculative.controller import Controller
from quire.speculative.proposer import Proposer
from quire.speculative.step_times import EqualTimes
from quire.weights.exit_head import LoadedExit, load_exit_head
from quire.weights.heads import Target
from tests.tools.heads import Tensors, describe_target, write_head
from tests.tools.native import MODULE, PanelSource, all_of
from tests.tools.tiny import TinyEngine


def exit_config(target: Target, **changes: Any) -> dict[str, Any]:
    return {
        "quire_head": 1,
        "kind": "exit",
        "target": describe_target(target),
        "layer": 1,
        "rank": 32,
        "rms_norm_eps": 1e-5,
        "calibration": [[0.1, 0.2], [0.5, 0.6], [0.9, 0.95]],
    } | changes


def exit_tensors(config: Mapping[str, Any], model: ModelConfig, num_ids: int = 60, seed: int = 0) -> Tensors:
    rng = np.random.default_rng(seed)
    size, rank = model.hidden_size, config["rank"]

    def normal(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape).astype(np.float32)

    return {
        "norm.weight": 1 + 0.1 * normal(size),
        "adapter_down.weight": normal(rank, size) / np.float32(np.sqrt(size)),
        "adapter_up.weight": normal(size, rank) / np.float32(np.sqrt(rank)),
        "out_norm.weight": 4 * (1 + 0.1 * normal(size)),  # so that some tokens are likely
        "draft_ids": np.sort(rng.permutation(model.vocab_size)[:num_ids]).astype(np.int64),
    }


def right_tensors(config: Mapping[str, Any], target: Target) -> Tensors:
    """Those of the exit that is right in a model whose layers after it change nothing."""
    size = target.config.hidden_size
    return {
        "norm.weight": np.ones(size, np.float32),
        "adapter_down.weight": np.ones((config["rank"], size), np.float32),
        "adapter_up.weight": np.zeros((size, config["rank"]), np.float32),
        "out_norm.weight": np.asarray(target.model.norm.weight, np.float32),
        "draft_ids": np.arange(target.config.vocab_size, dtype=np.int64),
    }


def load_exit(directory: Path, target: Target, ops: Kernels, tensors: Tensors | None = None, **changes: Any) -> Exit:
    """An exit of a head with random weights, or with those given."""
    config = exit_config(target, **changes)
    tensors = exit_tensors(config, target.config) if tensors is None else tensors
    head = load_exit_head(write_head(directory, config, tensors), target, ops)
    return Exit(head.layer, head, drafts=True, exits=True)


def untrained(layer: int) -> Exit:
    return Exit(layer, None, drafts=True, exits=False)


class IdentityAfter:
    """A source of panels in which the layers from one on add nothing to the residual."""

    def __init__(self, inner: PanelSource, layer: int) -> None:
        self.inner = inner
        self.layer = layer

    def matrix(self, parts: Sequence[Part], cols: int) -> Weight:
        name = parts[0].name
        adds = name.endswith(("o_proj.weight", "down_proj.weight"))
        if not adds or int(name.split(".")[2]) < self.layer:
            return self.inner.matrix(parts, cols)
        weight: Any = self.inner.matrix(parts, cols)
        (panels,) = weight.panels
        zeros = np.zeros((panels.rows, cols), np.float32)
        empty = MODULE.Panels(panels.format, panels.rows, cols)
        empty.pack_dense("f32", zeros.ctypes.data, cols, 0, panels.rows)
        weight.panels = [empty]
        return weight  # type: ignore[no-any-return]

    def vector(self, parts: Sequence[Part], *, plus_one: bool = False) -> Any:
        return self.inner.vector(parts, plus_one=plus_one)

    def scalar(self, value: float) -> Any:
        return self.inner.scalar(value)


def identity_model(config: ModelConfig, ops: Kernels, layer: int) -> Decoder:
    """A model whose layers from `layer` on change nothing."""
    assert ops.native is not None
    source: Any = IdentityAfter(PanelSource(ops.native, all_of("q8_0")), layer)
    return MODELS[config.family](config, source, ops)


def build_engine(
    config: ModelConfig,
    model: Decoder,
    ops: Kernels,
    found: Exit,
    proposers: Sequence[Proposer] = (),
    *,
    tap_layers: Sequence[int] = (),
    **settings: Any,
) -> tuple[Engine, SplitSteps, SelfDraft | None]:
    """An engine that asks the exit for drafts before each step and verifies all of them, if it drafts."""
    max_requests, max_tokens = settings.pop("max_requests", 8), settings.pop("max_tokens", 96)
    tiny = TinyEngine(config, model=model, ops=ops, max_requests=max_requests, max_tokens=max_tokens, **settings)
    assert ops.native is not None
    split_model = SplitModel(model, tiny.layers, ops.native, max_tokens, found.layer, tap_layers)
    block_size, windows = tiny.scheduler.kv.block_size, tuple(tiny.scheduler.kv.windows)
    shape = BufferShape(
        max_tokens, max_requests, config.max_len, windows, block_size, config.vocab_size, ops.arrays
    )  # fmt: skip
    split, drafter = build_split(
        found, model, split_model, BatchBuffers(shape), ops, max_requests, tiny.scheduler.reserve
    )  # fmt: skip
    tiny.runner.split = split
    controller = None
    if drafter is not None:
        controller = Controller(proposers, max_tokens, config.vocab_size, 12.0, [drafter])
        controller.times, controller._clock = EqualTimes(12.0), lambda: 0.0
    engine = Engine(tiny.scheduler, tiny.runner, None, controller, has_exit=found.exits)  # type: ignore[arg-type]
    return engine, split, drafter


__all__ = [
    "LoadedExit", "build_engine", "exit_config", "exit_tensors", "identity_model", "load_exit", "right_tensors",
    "untrained",
]  # fmt: skip
