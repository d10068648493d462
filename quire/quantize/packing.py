"""Codes to the integers that files have: GPTQ, AWQ and compressed-tensors words, float8 and NF4 bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.quant.code_format import NF4, e4m3_values

Floats = NDArray[np.float32]
Words = NDArray[np.int32]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NF4_BLOCK = 64
FP8_MAX = 448.0


def pack_words(codes: NDArray[Any], bits: int) -> Words:
    """Codes [n, m], lowest bits first, to words along the last axis. Codes of 3 bits run on from word to word."""
    n, m = codes.shape
    assert m * bits % 32 == 0, (m, bits)
    planes = (codes.astype(np.uint8)[:, :, None] >> np.arange(bits, dtype=np.uint8)) & 1
    packed = np.packbits(planes.reshape(n, m * bits), axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view("<i4")


def pack_down_columns(codes: NDArray[Any], bits: int) -> Words:
    """GPTQ's weights: codes [rows, cols] to words [cols * bits / 32, rows]."""
    return np.ascontiguousarray(pack_words(codes, bits).T)


def pack_awq(codes: NDArray[Any]) -> Words:
    """AWQ's weights and zeros: codes of 4 bits [n, m] to words [n, m / 8] in an order of their own."""
    ordered = codes.reshape(len(codes), -1, 8)[:, :, AWQ_ORDER]
    return pack_words(ordered.reshape(codes.shape), 4)


def to_e4m3(values: Floats) -> NDArray[np.uint8]:
    """To the nearest float8, ties to even. What is too large becomes the largest number."""
    positive = e4m3_values()[:127].astype(np.float32)  # ascending; the code is the index
    middles = (positive[1:] + positive[:-1]) / 2
    magnitudes = np.minimum(np.abs(values), np.float32(FP8_MAX))
    codes = np.searchsorted(middles, magnitudes, side="left").astype(np.uint8)
    at_tie = (codes < 126) & (middles[np.minimum(codes, 125)] == magnitudes) & (codes % 2 == 1)
    codes += at_tie.astype(np.uint8)
    signs: NDArray[np.uint8] = np.signbit(values).astype(np.uint8) << np.uint8(7)
    return codes | signs


def to_nf4(values: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """Codes of the nearest levels [n], and the largest magnitude of each block of 64 [n / 64]."""
    blocks = values.reshape(-1, NF4_BLOCK)
    largest = np.abs(blocks).max(1)
    levels = np.array(NF4, np.float32)
    scaled = np.divide(blocks, largest[:, None], out=np.zeros_like(blocks), where=largest[:, None] > 0)
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, scaled, side="left")
    return codes.astype(np.uint8).ravel(), largest


def pack_nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two codes a byte, the first in the high half."""
    high: NDArray[np.uint8] = codes[0::2] << np.uint8(4)
    return high | codes[1::2]
