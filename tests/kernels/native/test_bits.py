"""Every instruction set gives the same bits. `bits.json` has a digest of what each case computes. The file is the same
on every machine, so the instruction sets of x86-64 and of Arm are compared without meeting.

After a change that is meant to change bits: python -m tests.kernels.native.test_bits > tests/kernels/native/bits.json
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.sampling import IN_PROMPT
from quire.layers.source import Part
from quire.models.registry import MODELS
from quire.quant.dense import Dense
from quire.quant.ggml_types import GGMLType
from quire.quant.weight import Weight
from tests.tools.native import (
    CACHE_TYPES,
    DENSE,
    FITTING,
    MODULE,
    QUANTIZED,
    SCALES_AT,
    NativePagedCache,
    PanelSource,
    RecordedOnTensors,
    each_isa,
    kernels_of,
    mixed,
    native_of,
    ops_of,
    weight_of,
)

pytestmark = pytest.mark.cpu

RECORDED = Path(__file__).with_name("bits.json")
ROWS = (1, 3, 16, 33)  # one row, one tile, several tiles, unpacked panels
STEPS = [[(0, 5), (1, 1)], [(1, 33), (2, 290), (0, 1)], [(0, 1), (1, 1), (2, 1)]]
ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 40},
    "softcap": {"softcap": 1.5},
    "slopes": {"slopes": [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.0078125]},
}


def draw(*shape: int, seed: object = 0) -> Tensor:
    """Numbers of many sizes. They are whole numbers times powers of two, so every machine draws the same bits."""
    rng = np.random.default_rng(crc32(repr((seed, shape)).encode()))
    sizes = np.exp2(rng.integers(-4, 2, shape)).astype(np.float32)
    return torch.from_numpy(rng.integers(-(2**15), 2**15, shape).astype(np.float32) * np.float32(2**-15) * sizes)


def make_panels(format: str, rows: int, cols: int) -> Any:
    panels = MODULE.Panels(format, rows, cols)
    if format in DENSE:
        values = draw(rows, cols, seed=format).to(DENSE[format])
        panels.pack_dense(format, values.data_ptr(), cols, 0, rows)
        return panels
    kind, rng = GGMLType[format.upper()], np.random.default_rng(len(format))
    data = rng.integers(0, 256, (rows * cols // kind.block_size, kind.type_size), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        scales = rng.integers(1, 1 << 10, (len(data), 1)).astype(np.float16) * np.float16(2**-14)
        data[:, at : at + 2] = scales.view(np.uint8)
    panels.pack_gguf(kind.number, data.ctypes.data, 0, rows)
    return panels


def matmul(name: str, format: str) -> Iterable[Tensor]:
    weight = weight_of([make_panels(format, 100, 512)], native_of(name))
    yield weight.dense()
    for rows in ROWS:
        yield weight.matmul(draw(rows, 512))


def elementwise(name: str) -> Iterable[Tensor]:
    ops, x, residual = ops_of(name), draw(7, 150), draw(7, 150, seed=1)
    weight, bias = draw(150, seed=2), draw(150, seed=3)
    yield ops.rms_norm(x, weight, 1e-6)
    yield from ops.rms_norm(x, weight, 1e-6, residual)
    yield from ops.layer_norm(x, weight, bias, 1e-5, residual)
    yield ops.add(x, residual)
    yield ops.silu_mul(x)
    yield ops.gelu_mul(x)
    for activation in ("silu", "gelu", "gelu_tanh", "relu"):
        yield ops.activate(64 * x, activation)


def rope(name: str) -> Iterable[Tensor]:
    positions = torch.tensor([0, 3, 9])
    for interleaved in (False, True):
        q, k = draw(3, 4, 40), draw(3, 2, 40, seed=1)
        yield from ops_of(name).rope(q, k, positions, draw(10, 24, seed=2), interleaved)


def attend(name: str, kind: str, options: dict[str, Any]) -> Iterable[Tensor]:
    """What is stored in blocks of several sizes, attended to by heads of which three share a key head."""
    ops, options = ops_of(name), {"scale": 0.25, **options}
    if "slopes" in options:
        options["slopes"] = torch.tensor(options["slopes"])
    for block_size in (3, 16):
        cache = NativePagedCache(
            ops, kind, kv_heads=2, head_dim=48, num_blocks=200, block_size=block_size, windows=[options.get("window")]
        )
        yield from attention_steps(ops, cache, options)


def attention_steps(ops: Any, cache: NativePagedCache, options: dict[str, Any]) -> Iterable[Tensor]:
    for step in STEPS:
        paging, tokens = cache.step(step), sum(count for _, count in step)
        k, v = draw(tokens, 2, 48, seed="k"), draw(tokens, 2, 48, seed="v")
        ops.store_kv(k, v, cache.layers[0], paging.slot_mapping[0])
        yield ops.attention(4 * draw(tokens, 6, 48, seed="q"), cache.layers[0], paging, **options)


def sample(name: str) -> Iterable[Tensor]:
    """Greedy, all ids, top-k, top-p and min-p. The last setting is the logarithm of min-p times the temperature."""
    settings = [[0, 0, 1, -1e30], [1, 0, 1, -1e30], [0.75, 20, 1, -1e30], [1.5, 0, 0.75, -1e30], [1, 0, 1, -2]]
    rows = torch.tensor(settings, dtype=torch.float64).repeat(8, 1)
    seeds, lengths = torch.arange(len(rows)) * 977, torch.arange(len(rows)) + 5
    yield from ops_of(name).sample(16 * draw(len(rows), 1003), rows, seeds, lengths)


def penalize(name: str) -> Iterable[Tensor]:
    logits, counts = draw(3, 1003), (4 * draw(2, 1003)).int().clamp(min=0)
    counts[1, ::3] += IN_PROMPT
    index, penalties = torch.tensor([[2, 0, 7, 7], [0, 1, -1, 9]]), torch.tensor([[1.25, 0.5, 0.125], [0.5, 0.0, 1.0]])
    ops_of(name).penalize(logits, counts, index, penalties)
    yield logits


class ExactWeights:
    """A `Source` of weights that every machine draws alike."""

    def matrix(self, parts: Sequence[Part], cols: int) -> Weight:
        return Dense(torch.cat([0.25 * draw(part.rows, cols, seed=part.name) for part in parts]))

    def vector(self, parts: Sequence[Part], *, plus_one: bool = False) -> Tensor:
        values = torch.cat([1 + 0.25 * draw(part.rows, seed=part.name) for part in parts])
        return 1.0 + values if plus_one else values


def rotary_table(max_len: int, dim: int) -> Tensor:
    """In float64 and then rounded: torch's own cosines differ in the last bit between machines."""
    angles = [[position * 100.0 ** (-i / dim) for i in range(0, dim, 2)] for position in range(max_len)]
    return torch.tensor([[*map(math.cos, row), *map(math.sin, row)] for row in angles], dtype=torch.float32)


def model_step(name: str, family: str) -> Iterable[Tensor]:
    """Whole models with matrices in several formats, recorded. A soft cap of logits is not part of a step."""
    config, ops = replace(FITTING[family], max_len=512, logit_softcap=None), kernels_of(name)
    source: Any = PanelSource(native_of(name), mixed)
    source.plain = ExactWeights()
    model = MODELS[config.family](config, source, ops)
    for rotary in filter(None, (layer.attention.rotary for layer in model.layers)):
        rotary.table[...] = rotary_table(*rotary.table.shape).numpy()
    windows = sorted(set(config.windows), key=lambda window: window or 0)
    cache = NativePagedCache(
        ops_of(name), "bfloat16", kv_heads=config.num_kv_heads, head_dim=config.head_dim, num_blocks=200,
        groups=[windows.index(window) for window in config.windows], windows=windows,
    )  # fmt: skip
    recorded = RecordedOnTensors(ops, model, cache, 400)
    for step in STEPS:
        paging, positions = cache.step(step), cache.positions(step)
        hidden = recorded((7 * positions + 3) % config.vocab_size, positions, paging, cache.layers)
        yield hidden.clone()
        yield torch.from_numpy(model.head(hidden.numpy()))


Case = Callable[[str], Iterable[Tensor]]
CASES: dict[str, Case] = {
    **{f"matmul {format}": lambda name, format=format: matmul(name, format) for format in (*QUANTIZED, *DENSE)},
    "elementwise": elementwise,
    "rope": rope,
    **{
        f"attention {kind} {which}": lambda name, kind=kind, options=options: attend(name, kind, options)
        for kind in CACHE_TYPES
        for which, options in ATTENTION.items()
    },
    "sample": sample,
    "penalize": penalize,
    **{f"model {family}": lambda name, family=family: model_step(name, family) for family in FITTING},
}


def digest(name: str, case: Case) -> str:
    found = blake2b(digest_size=16)
    for out in case(name):
        assert not out.isnan().any()
        found.update(out.contiguous().numpy().tobytes())
    return found.hexdigest()


@each_isa
@pytest.mark.parametrize("case", CASES)
def test_bits_are_the_recorded_ones(name: str, case: str) -> None:
    assert digest(name, CASES[case]) == json.loads(RECORDED.read_text())[case]


if __name__ == "__main__":
    from tests.tools.native import ISAS

    print(json.dumps({case: digest(ISAS[0], run) for case, run in CASES.items()}, indent=1))
