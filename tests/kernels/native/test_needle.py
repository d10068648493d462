"""Needles among 131,072 random keys: caches of 8 bits find as many of them as a bfloat16 cache does."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.kernels.arrays import NumpyArrays
from quire.kernels.cache_spec import KVCacheSpec
from quire.kernels.paging import LayerCache, Paging
from tests.tools.native import kernels_of

pytestmark = pytest.mark.cpu

CONTEXT, HEAD_DIM, BLOCK = 1 << 17, 64, 16
NEEDLES = 500
STRENGTH, NOISE = 1.1, 1.0  # of a key in the query that asks for it, and of what else is in the query


@cache
def needles_found(kind: str) -> int:
    """Queries whose output is nearest to the value of the key that they ask for, of NEEDLES."""
    rng, ops = np.random.default_rng(0), kernels_of()
    keys, values = rng.standard_normal((2, CONTEXT, 1, HEAD_DIM), np.float32)
    keys *= np.exp(rng.normal(scale=0.3, size=HEAD_DIM)).astype(np.float32)  # some dimensions are larger, as real ones
    wanted = rng.choice(CONTEXT, NEEDLES, replace=False)
    queries = STRENGTH * keys[wanted] + NOISE * rng.standard_normal((NEEDLES, 1, HEAD_DIM), np.float32)
    shape = ops.cache_shapes(KVCacheSpec(1, HEAD_DIM), kind, BLOCK)
    assert shape.v is not None
    num_blocks = CONTEXT // BLOCK
    k, v = (NumpyArrays().zeros((num_blocks, *part), shape.dtype) for part in (shape.k, shape.v))
    layer, slots = LayerCache(k, v, 0, BLOCK), np.arange(CONTEXT)
    for start in range(0, CONTEXT, 4096):
        part = slice(start, start + 4096)
        ops.store_kv(keys[part], values[part], layer, slots[part])
    out = ops.attention(queries, layer, reading(NEEDLES, num_blocks), scale=HEAD_DIM**-0.5)
    products: NDArray[np.float32] = np.asarray(out).reshape(NEEDLES, HEAD_DIM) @ values[:, 0].T
    return int((products.argmax(1) == wanted).sum())


def reading(rows: int, num_blocks: int) -> Paging:
    """Rows of one token each, which all read the whole context and store nothing."""
    starts, lengths = np.arange(rows + 1, dtype=np.int32), np.full(rows, CONTEXT, np.int32)
    tables = np.tile(np.arange(num_blocks, dtype=np.int32), (rows, 1))
    slots = np.full(rows, -1)
    return Paging(starts, lengths, [tables], [slots], BLOCK, starts.tolist(), lengths.tolist())


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_needles_are_found_within_a_point_of_bfloat16(kind: str) -> None:
    expected = needles_found("bfloat16")
    assert 0.5 * NEEDLES < expected < 0.98 * NEEDLES  # hard enough to show a difference
    assert abs(needles_found(kind) - expected) <= 0.01 * NEEDLES
