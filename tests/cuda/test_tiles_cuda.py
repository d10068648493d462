"""Matrices of codes on a GPU: every format, any number of rows, exact, and through the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.cuda import gpu  # skips this module where there is no GPU
from tests.cuda.gpu import DEVICE, assert_near

from quire.core.params import SamplingParams  # isort: skip
from quire.core.request import Request
from quire.quant.code_format import E2M1, NF4, CodeFormat
from quire.quant.ggml_types import GGMLType
from quire.quant.gguf_codes import tile_rows
from quire.quant.tile_format import TILE_FORMATS, tile_format
from quire.quant.tile_packing import TileRows
from quire.quant.tile_rounding import NAMES
from quire.quant.tiled import Tiled
from tests.quant.test_tiles import as_tile_rows, draw

pytestmark = pytest.mark.cuda

FORMATS = [
    CodeFormat("uint", 4, 128, "f16", zero=8),
    CodeFormat("uint", 4, 128, "f16", has_zeros=True),
    CodeFormat("uint", 4, 32, "bf16", has_zeros=True),
    CodeFormat("uint", 3, 96, "f16", has_zeros=True),
    CodeFormat("uint", 8, 64, "f16", has_zeros=True),
    CodeFormat("uint", 8, 1 << 20, "f32", zero=128),
    CodeFormat("table", 4, 64, "f32", table=NF4),
    CodeFormat("table", 4, 32, "bf16", table=E2M1),
    CodeFormat("e4m3", 8, 1 << 20, "f32"),
]
NUM_ROWS = (1, 2, 16, 17, 48, 64, 65, 200, 300)
TYPES = [torch.bfloat16, torch.float16]


def on_gpu(rows: TileRows) -> TileRows:
    moved = {name: None if field is None else field.to(DEVICE) for name, field in fields(rows).items()}
    return TileRows(**moved)


def fields(rows: TileRows) -> dict[str, Any]:
    names = ("codes", "scales", "zeros", "minimums", "super_scales", "super_minimums")
    return {name: getattr(rows, name) for name in names}


def make(format: CodeFormat, rows: int, cols: int, dtype: torch.dtype, *, exact: bool = False) -> Tiled:
    tiles = tile_format(format, cols)
    assert tiles is not None
    weight = Tiled(tiles, (rows, cols), "cuda", dtype, exact=exact)
    weight.put(0, on_gpu(as_tile_rows(draw(format, rows, cols))))
    return weight


def make_blocks(kind: GGMLType, rows: int, cols: int, dtype: torch.dtype) -> Tiled:
    data = torch.from_numpy(np.random.default_rng(3).integers(0, 256, (rows, kind.row_bytes(cols)), dtype=np.uint8))
    weight, codes = Tiled(TILE_FORMATS[kind], (rows, cols), "cuda", dtype), fields(tile_rows(kind, data))
    for name in ("scales", "minimums", "super_scales", "super_minimums"):
        if codes[name] is not None and codes[name].is_floating_point():
            codes[name] = 0.01 + torch.rand(codes[name].shape) / 50  # random bytes are no reasonable numbers
    weight.put(0, on_gpu(TileRows(**codes)))
    return weight


def check(weight: Tiled, dtype: torch.dtype) -> None:
    (rows, cols), dense = weight.shape, weight.dense().double()
    index = torch.tensor([rows - 1, 0, 5], device=DEVICE)
    assert_near(weight.rows(index), dense[index], dtype)
    for num_rows in NUM_ROWS:
        x = (torch.randn(num_rows, cols, device=DEVICE) / dense.norm(dim=1).mean()).to(dtype)
        expected = x.double() @ dense.T
        assert_near(weight.matmul(x), expected, dtype)
        gated = weight.gated(x, "silu")
        if gated is not None:
            gate, up = expected.to(dtype).double().chunk(2, -1)
            assert_near(gated, torch.nn.functional.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: f"{format.codes}{format.bits}-{format.group}")
@pytest.mark.parametrize(("rows", "cols"), [(512, 1152), (4096, 4608), (200, 576)])
def test_products_with_codes(rows, cols, format, dtype):
    check(make(format, rows, cols, dtype), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", [*TILE_FORMATS], ids=lambda kind: kind.name)
def test_products_with_blocks_of_gguf_files(kind, dtype):
    check(make_blocks(kind, 1024, 2048, dtype), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("format", [FORMATS[0], FORMATS[1], FORMATS[2], FORMATS[6], FORMATS[8]], ids=lambda f: f.codes)
def test_an_exact_product_does_not_depend_on_the_rows_beside_it(format, dtype):
    weight = make(format, 1000, 1152, dtype, exact=True)
    x = (torch.randn(300, 1152, device=DEVICE) / weight.dense().norm(dim=1).mean()).to(dtype)
    whole = weight.matmul(x)
    assert_near(whole, x.double() @ weight.dense().double().T, dtype)
    for first, count in [(0, 1), (299, 1), (17, 16), (100, 17), (40, 64), (30, 65), (1, 200)]:
        assert torch.equal(weight.matmul(x[first : first + count]), whole[first : first + count]), (first, count)


def answers(client: Any, prompts: list[list[int]], alone: bool) -> list[Any]:
    """Tokens and log probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, ignore_eos=True)
    requests = [
        Request(f"{alone} {nth}", prompt, params, max_tokens=params.max_tokens) for nth, prompt in enumerate(prompts)
    ]
    found: dict[str, Any] = {request.id: [] for request in requests}
    for group in [[request] for request in requests] if alone else [requests]:
        for request in group:
            client.add(request)
        while client.engine.has_work:
            for update in client.step():
                found[update.id] += [] if update.detail is None else update.detail.logprobs or []
    return [(list(request.output), found[request.id]) for request in requests]


@pytest.mark.parametrize("name", NAMES)
def test_an_exact_engine_with_codes_gives_the_same_bits_in_any_batch(name, tmp_path):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 2000, count).tolist() for count in (3, 70, 200, 511)]
    client = gpu.start(tmp_path, quantize=name, exact=True, num_blocks=400, prefix_cache=False)
    try:
        assert answers(client, prompts, alone=False) == answers(client, prompts, alone=True)
    finally:
        client.close()


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_with_codes_answers_and_takes_less_memory(name, tmp_path):
    plain = gpu.start(tmp_path, num_blocks=400)
    plain_bytes = plain.info.weight_bytes
    plain.close()
    client = gpu.start(tmp_path, quantize=name, num_blocks=400)
    try:
        assert client.info.weight_bytes < 0.75 * plain_bytes
        for tokens, _ in answers(client, [[5, 6, 7], [8] * 300], alone=False):
            assert len(tokens) == 12
    finally:
        client.close()
