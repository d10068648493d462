"""Log probabilities and beam candidates of the C++ kernels, against numpy in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.tools.native import ISAS, MODULE, each_isa

pytestmark = pytest.mark.cpu

SIZES = (1, 15, 16, 17, 300, 49152, 151_669)
NAN, INF = float("nan"), float("inf")

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class Logprobs(NamedTuple):
    logprobs: Floats  # [rows]
    ranks: Ints  # [rows]
    top_tokens: Ints  # [rows, num_top]
    top_logprobs: Floats  # [rows, num_top]


class Beams(NamedTuple):
    tokens: Ints  # [rows, count]
    logprobs: Floats  # [rows, count]
    ranks: Ints  # [rows, count]
    top_tokens: Ints  # [rows, num_top]
    top_logprobs: Floats  # [rows, num_top]


def view(rows: Floats) -> tuple[int, int]:
    assert rows.strides[1] == rows.itemsize
    return rows.ctypes.data, rows.strides[0] // rows.itemsize


def logprobs(logits: Floats, tokens: Ints, num_top: int, isa: str = ISAS[0], threads: int = 1) -> Logprobs:
    rows, size = logits.shape
    out = Logprobs(
        np.zeros(rows, np.float32), np.zeros(rows, np.int64),
        np.zeros((rows, num_top), np.int64), np.zeros((rows, num_top), np.float32),
    )  # fmt: skip
    addresses = [each.ctypes.data for each in out]
    MODULE.logprobs(isa, threads, view(logits), rows, size, tokens.ctypes.data, num_top, *addresses)
    return out


def beam_candidates(
    logits: Floats, banned: Floats | None, count: int, num_top: int, isa: str = ISAS[0], threads: int = 1
) -> Beams:
    rows, size = logits.shape
    out = Beams(
        np.zeros((rows, count), np.int64), np.zeros((rows, count), np.float32), np.zeros((rows, count), np.int64),
        np.zeros((rows, num_top), np.int64), np.zeros((rows, num_top), np.float32),
    )  # fmt: skip
    addresses = [each.ctypes.data for each in out]
    bans = (0, 0) if banned is None else view(banned)
    MODULE.beam_candidates(isa, threads, view(logits), bans, rows, size, count, num_top, *addresses)
    return out


def log_softmax(logits: Floats) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide = wide - wide.max(1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(1, keepdims=True))


def all_logprobs(logits: Floats, isa: str) -> Floats:
    """The kernel's log probability of every token, [rows, size]."""
    rows, size = logits.shape
    found = logprobs(logits, np.zeros(rows, np.int64), size, isa)
    out = np.empty((rows, size), np.float32)
    np.put_along_axis(out, found.top_tokens, found.top_logprobs, 1)
    return out


def likeliest(values: Floats, count: int) -> Ints:
    """Largest first, of equals the lower id."""
    return np.argsort(-values, axis=1, kind="stable")[:, :count]


def make_logits(rows: int, size: int, kind: str, seed: int = 0) -> Floats:
    """Rows that lie further apart than they are long."""
    rng = np.random.default_rng(seed)
    padded = rng.normal(0, 2.5, (rows, size + 3)).astype(np.float32)
    padded[:, size:] = 1e30
    logits = padded[:, :size]
    logits[:, rng.integers(0, size, 4)] += 9
    if kind == "ties":
        logits[:] = np.round(logits)
    if kind == "banned":
        logits[rng.random((rows, size)) < 0.7] = -INF
        logits[:, size // 2] = 1.5
    if kind == "far":  # many logits that differ have the same log probability in float32
        logits[:] = rng.normal(0, 1e-5, (rows, size))
        logits[:, size - 1] = 40.0
    if kind == "large":
        logits *= 1e30
    return logits


@each_isa
@pytest.mark.parametrize("kind", ["normal", "ties", "banned", "far", "large"])
@pytest.mark.parametrize("size", SIZES)
def test_logprobs_are_those_of_the_definition(name: str, size: int, kind: str) -> None:
    logits = make_logits(3, size, kind)
    every = all_logprobs(logits, name)
    exact = log_softmax(logits)
    assert np.array_equal(np.isneginf(every), np.isneginf(logits))
    np.testing.assert_allclose(every, exact, atol=2e-6, rtol=1.2e-7)
    for num_top in {0, 1, min(20, size), size}:
        tokens = np.random.default_rng(num_top).integers(0, size, 3)
        found = logprobs(logits, tokens, num_top, name)
        own = np.take_along_axis(every, tokens[:, None], 1)
        assert np.array_equal(found.logprobs, own[:, 0])
        assert np.array_equal(found.ranks, (every > own).sum(1) + 1)
        top = likeliest(every, num_top)
        assert np.array_equal(found.top_tokens, top)
        assert np.array_equal(found.top_logprobs, np.take_along_axis(every, top, 1))


@each_isa
@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("size", [17, 49152])
def test_a_row_depends_on_no_other_and_not_on_the_threads(name: str, size: int, rows: int, threads: int) -> None:
    logits, tokens = make_logits(rows, size, "normal"), np.arange(rows) % size
    together = logprobs(logits, tokens, 5, name, threads)
    beams = beam_candidates(logits, logits, 6, 5, name, threads)
    for row in range(rows):
        alone = logprobs(logits[row : row + 1].copy(), tokens[row : row + 1], 5, name)
        for ours, expected in zip(together, alone, strict=True):
            assert np.array_equal(ours[row : row + 1], expected)
        for ours, expected in zip(beams, beam_candidates(logits[row : row + 1], logits, 6, 5, name), strict=True):
            assert np.array_equal(ours[row : row + 1], expected)


@each_isa
def test_rows_without_a_finite_maximum_have_no_logprobs(name: str) -> None:
    logits = np.full((4, 37), -2.0, np.float32)
    logits[0, 30] = NAN
    logits[1] = -INF
    logits[2, 3] = INF
    logits[3, 5] = 4.0
    found = logprobs(logits, np.array([30, 0, 4, 5]), 3, name)
    assert np.isnan(found.logprobs).tolist() == [True, True, True, False]
    assert found.ranks.tolist() == [1, 1, 1, 1]
    assert found.top_tokens.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [5, 0, 1]]
    assert np.isnan(found.top_logprobs[:3]).all()
    assert np.isfinite(found.top_logprobs[3]).all()
    banned = logits.copy()
    banned[:, 7] = -INF
    beams = beam_candidates(logits, banned, 37, 2, name)
    assert beams.tokens[:, -1].tolist() == [36, 36, 36, 7]  # NaN is after banned tokens
    assert beams.tokens[:3, 0].tolist() == [7, 0, 7]
    assert np.isneginf(beams.logprobs).sum(1).tolist() == [1, 37, 1, 1]
    assert (beams.ranks[:3] == 1).all()


@each_isa
@pytest.mark.parametrize("kind", ["normal", "ties", "banned", "far"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_top", [0, 3])
def test_beam_candidates_are_the_likeliest_that_are_not_banned(name: str, size: int, kind: str, num_top: int) -> None:
    logits = make_logits(3, size, kind)
    every, rng = all_logprobs(logits, name), np.random.default_rng(1)
    count, num_top = min(8, size), min(num_top, size)
    for share in (None, 0.0, 0.3, 0.9999, 1.0):
        banned = None if share is None else logits.copy()
        if banned is not None:
            banned[rng.random(banned.shape) < share] = -INF
            banned[np.isfinite(banned)] += 3.0  # a processor may change the others
        allowed = every if banned is None else np.where(np.isneginf(banned), np.float32(-INF), every)
        found = beam_candidates(logits, banned, count, num_top, name)
        tokens = likeliest(allowed, count)
        values = np.take_along_axis(allowed, tokens, 1)
        assert np.array_equal(found.tokens, tokens)
        assert np.array_equal(found.logprobs, values)
        ranks = np.broadcast_to(np.arange(1, count + 1), (3, count))
        if num_top and banned is not None:
            ranks = (every[:, None, :] > values[:, :, None]).sum(2) + 1
        assert np.array_equal(found.ranks, ranks)
        top = likeliest(every, num_top)
        assert np.array_equal(found.top_tokens, top)
        assert np.array_equal(found.top_logprobs, np.take_along_axis(every, top, 1))


def test_tokens_and_counts_that_do_not_exist_are_refused() -> None:
    logits = make_logits(2, 10, "normal")
    for token in (-1, 10):
        with pytest.raises(IndexError, match=f"token {token} is not below 10"):
            logprobs(logits, np.array([0, token]), 1)
    with pytest.raises(ValueError, match="11 of 10 tokens"):
        logprobs(logits, np.array([0, 1]), 11)
    with pytest.raises(ValueError, match="12 of 10 tokens"):
        beam_candidates(logits, None, 12, 1)
