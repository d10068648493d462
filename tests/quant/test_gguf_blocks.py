"""Unpacking must agree with the format's reference implementation bit for bit."""

import gguf
import numpy as np
import pytest
import torch

from quire.errors import UnsupportedModel
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
    data = random_blocks(kind, rows=1100, cols=256)
    assert_same_bits(GGUFBlocks(kind, torch.from_numpy(data), 256).dense(), reference(kind, data))
