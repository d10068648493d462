"""A script: products with codes by Triton's interpreter, and models with codes on a simulated GPU.
`test_interpreted.py` runs it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from tests.kernels import ptx, simulated_gpu  # before what imports Triton's kernels

from quire.core.params import SamplingParams  # isort: skip
from quire.core.request import Request
from quire.kernels.cuda.gemm import tiled_dispatch
from quire.kernels.cuda.gemm.tiled import Tile, multiply
from quire.quant.code_format import E2M1, NF4, CodeFormat
from quire.quant.ggml_types import GGMLType
from quire.quant.gguf_codes import tile_rows
from quire.quant.tile_format import TILE_FORMATS, tile_format
from quire.quant.tiled import Tiled
from quire.weights import tiles
from quire.weights.loader import load_model
from tests.quant.test_tiles import as_tile_rows, draw
from tests.tools.oracle import Answer, run
from tests.weights.schemes.packed import METHODS, quantized_model

FORMATS = [
    CodeFormat("uint", 4, 128, "f16", zero=8),
    CodeFormat("uint", 4, 32, "f16", has_zeros=True),
    CodeFormat("uint", 8, 64, "f16", has_zeros=True),
    CodeFormat("uint", 8, 1 << 20, "f32", zero=128),
    CodeFormat("uint", 3, 96, "f16", has_zeros=True),
    CodeFormat("table", 4, 64, "f32", table=NF4),
    CodeFormat("table", 4, 32, "bf16", table=E2M1),
    CodeFormat("e4m3", 8, 1 << 20, "f32"),
]


def make(format: CodeFormat, rows: int, cols: int, *, exact: bool = False) -> Tiled:
    tiles, drawn = tile_format(format, cols), draw(format, rows, cols)
    assert tiles is not None
    weight = Tiled(tiles, (rows, cols), "cpu", torch.float16, exact=exact)
    weight.put(0, as_tile_rows(drawn))
    return weight


def make_blocks(kind: GGMLType, rows: int, cols: int) -> Tiled:
    """Codes are random, and float16 fields small."""
    data = torch.from_numpy(np.random.default_rng(3).integers(0, 256, (rows, kind.row_bytes(cols)), dtype=np.uint8))
    weight = Tiled(TILE_FORMATS[kind], (rows, cols), "cpu", torch.float16)
    codes = tile_rows(kind, data)
    scales = codes.scales if TILE_FORMATS[kind].supers else torch.rand(codes.scales.shape) + 0.5
    small = {
        name: torch.rand(getattr(codes, name).shape) * 0.02
        for name in ("super_scales", "super_minimums")
        if getattr(codes, name) is not None
    }
    if codes.minimums is not None and not TILE_FORMATS[kind].supers:
        small["minimums"] = torch.rand(codes.minimums.shape)
    weight.put(0, replace(codes, scales=scales, **small))
    return weight


def check_products(weight: Tiled, *counts: int) -> None:
    (rows, cols), expected_weight = weight.shape, weight.dense().double()
    index = torch.tensor([rows - 1, 0, 5])
    assert_close(weight.rows(index), expected_weight[index])
    for num_rows in counts:
        x = (torch.randn(num_rows, cols) / expected_weight.norm(dim=1).mean()).half()
        expected = x.double() @ expected_weight.T
        assert_close(weight.matmul(x), expected)
        assert_close(weight._dequantized_product(x), expected)
        if rows % 128 == 0:
            gate, up = expected.half().double().chunk(2, -1)
            gated = weight.gated(x, "gelu")
            assert gated is not None
            assert_close(gated, torch.nn.functional.gelu(gate, approximate="tanh") * up)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    error = (got.double() - expected).norm() / expected.norm()
    assert error < 1e-3, error


def check_tiles_of_programs() -> None:
    """Splits, rounds of several chunks, wide tiles, with an activation and without."""
    weight = make(FORMATS[1], 256, 256)
    x = (torch.randn(5, 256) / weight.dense().norm(dim=1).mean()).half()
    expected = x.double() @ weight.dense().double().T
    gate, up = expected.half().double().chunk(2, -1)
    gated = torch.nn.functional.silu(gate) * up
    for tile in (Tile(64, 4, 3, 1, 4), Tile(128, 8, 3, 4, 2), Tile(64, 4, 3, 4, 2, False), Tile(128, 4, 3, 3)):
        assert_close(multiply(x, weight.matrix, tile), expected)
        assert_close(multiply(x, weight.matrix, tile, "silu"), gated)


def check_exact() -> None:
    """A row has the same bits alone, in any batch, and behind any number of rows: with splits, and in any launches."""
    for format, cols in ((FORMATS[1], 128), (FORMATS[0], 1024)):
        weight = make(format, 100, cols, exact=True)
        x = torch.randn(150, cols).half() / 100
        whole = weight.matmul(x)
        assert_close(whole, x.double() @ weight.dense().double().T)
        for start, stop in ((0, 1), (7, 9), (3, 40), (60, 149)):
            assert torch.equal(weight.matmul(x[start:stop]), whole[start:stop])
    assert tiled_dispatch.choose_tile(64, weight.matrix, None).splits == 2
    tiled_dispatch.MAX_PARTIALS = 2 * 2 * 64 * 64  # room for 64 rows
    assert torch.equal(weight.matmul(x), whole)


def check_methods() -> None:
    """Files of every method hold the values that were packed, and what has no tiles is dense."""
    ops = simulated_gpu.simulated_ops()
    kinds = set()
    with TemporaryDirectory() as folder:
        for method in METHODS:
            quantized, plain = quantized_model(Path(folder) / method.replace(" ", "-"), method)
            models = [load_model(path, dtype="float16", ops=ops).model for path in (quantized, plain)]
            for layer, other in zip(models[0].layers, models[1].layers, strict=True):
                for name in ("gate_up", "down"):
                    weight, expected = (getattr(each.mlp, name).weight for each in (layer, other))
                    kinds.add((method, type(weight)))
                    values = weight.dense()
                    values = values if type(weight) is Tiled else values.half()
                    assert torch.equal(values.half(), expected.dense().half()), method
    tiled = {method for method, kind in kinds if kind is Tiled}
    assert {*METHODS} - tiled <= {"squeezellm", "nvfp4", "compressed nvfp4", "modelopt nvfp4"}, {*METHODS} - tiled
    print(sorted(tiled))


def check_engine(quantize: str, *, exact: bool) -> None:
    """Batches, chunks, prefix hits, preemption and swap change no token; in an exact engine no log probability."""
    config = replace(simulated_gpu.LLAMA, hidden_size=64, intermediate_size=128, num_layers=1, windows=(None,))
    rng = random.Random(0)
    shared = [rng.randrange(97) for _ in range(12)]
    prompts = [shared + [rng.randrange(97) for _ in range(count)] for count in (1, 30)]

    def answer(alone: bool, **options: Any) -> list[Answer]:
        engine = simulated_gpu.build_engine(config, exact=exact, quantize=quantize, **options)
        simulated_gpu.capture_all(engine)
        params = SamplingParams(max_tokens=4, logprobs=1, ignore_eos=True)
        requests = [Request(f"{nth}", prompt, params, max_tokens=4, seed=nth) for nth, prompt in enumerate(prompts)]
        found: dict[str, Answer] = {}
        for group in [[request] for request in requests] if alone else [requests]:
            found |= run(engine, group)
        return [found[request.id] for request in requests]

    expected = answer(True)
    for options in ({}, {"num_blocks": 9, "max_tokens": 16, "num_host_blocks": 8}):
        for got, wanted in zip(answer(False, **options), expected, strict=True):
            assert got == wanted if exact else got[0] == wanted[0]


if __name__ == "__main__":
    simulated_gpu.install()
    ptx.use()
    torch.manual_seed(0)
    for format in FORMATS:
        check_products(make(format, 128, 192 if format.group == 96 else 256), 3)
    check_products(make(FORMATS[0], 100, 272), 1, 17, 70)
    for kind in TILE_FORMATS:
        check_products(make_blocks(kind, 128, 256), 2)
    check_tiles_of_programs()
    check_exact()
    tiles.is_fast = lambda format: True  # type: ignore[assignment]  # groups of 32 and tables too
    check_methods()
    check_engine("int4", exact=True)
