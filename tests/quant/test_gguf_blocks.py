"""Unpacking must agree with the format's reference implementation bit for bit."""

import gguf
import numpy as np
import pytest
import torch

from quire.errors import UnsupportedModel
from quire.quant import gguf_blocks
from quire.quant.ggml_types import GGMLType
from quire.quant.gguf_blocks import GGUFBlocks
from quire.quant.unpack import UNPACKERS

pytestmark = pytest.mark.cpu

TYPES = list(UNPACKERS)
ids = [kind.name for kind in TYPES]


def random_blocks(kind: GGMLType, rows: int = 24, cols: int = 512, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, kind.row_bytes(cols)), dtype=np.uint8)


def reference(kind: GGMLType, data: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.dequantize(data, gguf.GGMLQuantizationType[kind.name])


def assert_same_bits(actual: torch.Tensor, expected: np.ndarray) -> None:
    """NaN stands for any NaN: which payload survives arithmetic is the processor's choice. Zeros keep their sign."""
    ours = actual.numpy()
    assert ours.shape == expected.shape
    both_nan = np.isnan(ours) & np.isnan(expected)
    same = ours.view(np.uint32) == np.ascontiguousarray(expected).view(np.uint32)
    assert (same | both_nan).all(), np.argwhere(~(same | both_nan))[:4]
    assert both_nan.mean() < 0.5


@pytest.mark.parametrize("kind", TYPES, ids=ids)
@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_unpack_to_the_reference_bits(kind: GGMLType, seed: int) -> None:
    data = random_blocks(kind, seed=seed)
    assert_same_bits(GGUFBlocks(kind, torch.from_numpy(data), 512).dense(), reference(kind, data))


@pytest.mark.parametrize("kind", TYPES, ids=ids)
def test_matrices_larger_than_a_slice_unpack_the_same(kind: GGMLType) -> None:
    data = random_blocks(kind, rows=2100, cols=256)
    assert_same_bits(GGUFBlocks(kind, torch.from_numpy(data), 256).dense(), reference(kind, data))


def finite_blocks(kind: GGMLType, rows: int, cols: int, seed: int = 0) -> GGUFBlocks:
    """Blocks whose scales are small: random bytes, with the high bytes of every float16 that matters tamed."""
    data = torch.from_numpy(random_blocks(kind, rows, cols, seed))
    blocks = data.view(-1, kind.type_size)
    halves = {GGMLType.Q4_1: (0, 2), GGMLType.Q8_0: (0,), GGMLType.Q4_K: (0, 2), GGMLType.Q6_K: (208,)}[kind]
    for at in halves:
        blocks[:, at + 1] = (blocks[:, at + 1] & 0x83) | 0x18
    return GGUFBlocks(kind, data, cols)


SOME = [GGMLType.Q4_1, GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.Q6_K]
some_ids = [kind.name for kind in SOME]


@pytest.mark.parametrize("kind", SOME, ids=some_ids)
def test_matmul_is_that_of_the_dense_matrix(kind: GGMLType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_blocks, "SLICE_VALUES", 2000)
    weight, x = finite_blocks(kind, rows=30, cols=512), torch.randn(2, 3, 512)
    expected = x @ weight.dense().T
    assert weight.matmul(x).shape == (2, 3, 30)
    torch.testing.assert_close(weight.matmul(x), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    assert weight.matmul(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", SOME, ids=some_ids)
def test_rows_are_those_of_the_dense_matrix(kind: GGMLType) -> None:
    weight, index = finite_blocks(kind, rows=30, cols=256), torch.tensor([7, 0, 29, 7])
    assert torch.equal(weight.rows(index), weight.dense()[index])
    half = GGUFBlocks(kind, weight.blocks, 256, torch.bfloat16)
    assert torch.equal(half.rows(index), weight.dense().bfloat16()[index])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_into_fills_a_slice_and_nothing_else(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_blocks, "SLICE_VALUES", 2000)
    weight = finite_blocks(GGMLType.Q4_1, rows=30, cols=256)
    out = torch.full((50, 256), 7.0, dtype=dtype)
    weight.dense_into(out[10:40])
    assert torch.equal(out[10:40], weight.dense().to(dtype))
    assert (out[:10] == 7).all()
    assert (out[40:] == 7).all()
    wide = torch.full((30, 300), 7.0, dtype=dtype)
    weight.dense_into(wide[:, 20:276])
    assert torch.equal(wide[:, 20:276], weight.dense().to(dtype))
    assert (wide[:, :20] == 7).all()


def test_types_without_an_unpacker_are_named() -> None:
    data = torch.zeros(1, GGMLType.Q8_1.row_bytes(32), dtype=torch.uint8)
    with pytest.raises(UnsupportedModel, match=r"Q8_1.*Q4_K"):
        GGUFBlocks(GGMLType.Q8_1, data, 32)


def test_the_type_table_is_the_reference_s() -> None:
    sizes = {kind.name: (int(kind), *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGML_QUANT_SIZES}
    assert {kind.name: kind.value for kind in GGMLType} == {name: sizes[name] for name in GGMLType.__members__}
