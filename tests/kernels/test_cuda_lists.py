"""The work lists that the host makes for attention on the GPU. Needs Triton and no GPU."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from quire.core.drafts import Drafts
from quire.core.params import SamplingParams
from quire.core.plan import Plan
from quire.core.request import Request
from quire.engine import gpu_batch
from quire.engine.batch import BufferShape
from quire.engine.buffers import DirectUploader
from quire.engine.gpu_batch import AttentionShape, GpuBuffers
from quire.kernels.cuda.attention import varlen_items
from quire.kernels.cuda.attention.split_kv import PADDING_ROW, UNIT, max_partials, max_splits, split_contexts
from quire.kernels.cuda.attention.verify import num_units
from quire.kernels.torch_arrays import TorchArrays

pytestmark = pytest.mark.cpu


def draw_lengths(rng: random.Random, count: int) -> np.ndarray:
    return np.array([rng.choice([0, 1, rng.randint(1, 300), rng.randint(1, 200_000)]) for _ in range(count)])


@pytest.mark.parametrize("seed", range(4))
def test_splits_cover_each_context_once(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        kv_heads, count, window = rng.choice([1, 3, 8, 64]), rng.randint(1, 200), rng.choice([None, 1, 100, 4096])
        ends = draw_lengths(rng, count)
        firsts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
        capacity = rng.choice([count, max_splits(count, kv_heads)])
        splits = split_contexts(firsts, ends, kv_heads, capacity)
        assert len(splits) <= capacity
        for row in range(count):
            own = splits[splits[:, 0] == row]
            own = own[np.argsort(own[:, 1])]
            assert (own[:, 5] == len(own)).all()
            assert (own[0, 1], own[-1, 2]) == (firsts[row] // UNIT * UNIT, ends[row])
            assert (own[1:, 1] == own[:-1, 2]).all()
            assert (own[:, 6] == ends[row]).all()
        lengths = splits[:, 2] - splits[:, 1]
        assert (lengths[1:] <= lengths[:-1]).all(), "the longest come first"
        cut = splits[splits[:, 5] > 1]
        assert len(set(cut[:, 3])) == len(cut), "two splits share a partial"
        assert (cut[:, 3] < max_partials(kv_heads)).all()


def test_few_rows_are_cut_and_many_only_where_one_is_much_longer() -> None:
    def count(ends: list[int]) -> list[int]:
        splits = split_contexts(np.zeros(len(ends), np.int64), np.array(ends), 8, max_splits(len(ends), 8))
        return np.bincount(splits[:, 0]).tolist()

    assert count([600]) == [10]
    assert count([120_000]) == [33], "one row takes half of the programs"
    assert count([600] * 16) == [4] * 16
    assert count([600] * 80) == [1] * 80
    assert count([500, 700] * 40) == [1] * 80
    assert count([*[600] * 79, 1200]) == [*[1] * 79, 2]
    assert count([*[600] * 127, 1200]) == [1] * 128
    assert count([120_000, *[600] * 79]) == [17, *[1] * 79]


@pytest.mark.parametrize("units", [16, 32, 64])
def test_one_row_is_cut_whatever_its_number_of_heads(units: int) -> None:
    ends = np.array([4096])
    assert len(split_contexts(np.zeros_like(ends), ends, units, max_splits(1, units))) >= 16


def make_buffers(monkeypatch: pytest.MonkeyPatch, kv_heads: int, *, exact: bool) -> GpuBuffers:
    monkeypatch.setattr(gpu_batch, "Upload", lambda most: DirectUploader(TorchArrays("cpu")))
    shape = BufferShape(8192, 512, 1024, (None,), 16, 1000, TorchArrays("cpu"))
    return GpuBuffers(shape, AttentionShape(4, kv_heads, None, uses_items=True, exact=exact))


def make_plan(counts: list[int], length: int) -> Plan:
    plan = Plan(1)
    for row, count in enumerate(counts):
        request = Request(str(row), [7] * length, SamplingParams())
        request.tables = [list(range(length // 16 + 1))]
        plan.requests.append(request)
        plan.starts.append(length - count)
        plan.counts.append(count)
        plan.yields.append(1)
    return plan


@pytest.mark.parametrize("kv_heads", [1, 8, 32, 64])
@pytest.mark.parametrize("num_singles", [1, 10, 70, 127])
@pytest.mark.parametrize("most_rows", [128, 512])
def test_captured_steps_cut_their_rows_as_others_do(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int, num_singles: int, most_rows: int
) -> None:
    buffers = make_buffers(monkeypatch, kv_heads, exact=False)
    plan = make_plan([30, *[1] * num_singles], 700)
    buffers.fill_mixed(plan, 256, most_rows)
    singles, ends_of_rows = np.arange(1, num_singles + 1), np.arange(num_singles + 1)
    for listed, numbers, tokens in (
        (buffers.splits[None], singles, 29 + singles), (buffers.end_splits, ends_of_rows, ends_of_rows)
    ):  # fmt: skip
        rows = len(numbers)
        splits = listed.host[: max_splits(most_rows, kv_heads)]
        used = splits[splits[:, 0] != PADDING_ROW]
        assert (splits[: len(used), 0] != PADDING_ROW).all(), "entries without a row come last"
        ends = np.full(rows, 700)
        expected = split_contexts(np.zeros_like(ends), ends, kv_heads, max_splits(rows, kv_heads))
        expected[:, 7], expected[:, 0] = tokens[expected[:, 0]], numbers[expected[:, 0]]
        assert (used == expected).all()
        assert (used[used[:, 5] > 1, 3] < max_partials(kv_heads)).all(), "a partial outside of the workspace"


@pytest.mark.parametrize("max_queries", [2, 4, 8, 16])
@pytest.mark.parametrize("num_rows", [1, 3, 20, 64, 100])
def test_captured_steps_of_drafts(monkeypatch: pytest.MonkeyPatch, max_queries: int, num_rows: int) -> None:
    """A row has one split or more, or items of `varlen`, with its first token and all its keys."""
    buffers = make_buffers(monkeypatch, 8, exact=False)
    counts = [max_queries, *(row % max_queries + 1 for row in range(1, num_rows))]
    plan, size = make_plan(counts, 700), next(size for size in (16, 32, 1024) if size >= sum(counts))
    plan.yields[:] = counts
    plan.drafts.update((row, Drafts([0] * (count - 1))) for row, count in enumerate(counts) if count > 1)
    samples = buffers.fill_verify(plan, size, max_queries, has_trees=False)
    assert samples.indices == list(range(sum(counts)))
    work = buffers.verify_batch(size, max_queries, has_trees=False).paging.work
    starts = np.cumsum([0, *counts])
    if work.has_others:
        assert not work.has_singles
        items = buffers.items[None].host
        fields = items[1 : 1 + items[0] * varlen_items.ITEM_FIELDS].reshape(-1, varlen_items.ITEM_FIELDS)
        assert {*fields[:, 0]} == {*range(num_rows)}
        return
    splits = work.splits[None].numpy()
    used = splits[splits[:, 0] != PADDING_ROW]
    assert (splits[: len(used), 0] != PADDING_ROW).all(), "entries without a row come last"
    for row in range(num_rows):
        own = used[used[:, 0] == row]
        assert (own[:, 2] - own[:, 1]).sum() == 700
        assert (own[:, 7] == starts[row]).all()
        assert (own[:, 6] == 700).all()
    units = num_units(max_queries, 4, 8, size)
    assert (used[used[:, 5] > 1, 3] < max_partials(units)).all(), "a partial outside of the workspace"


def plan_trees() -> Plan:
    """A tree, a single token and a chain."""
    plan = make_plan([5, 1, 3], 700)
    plan.yields[:] = plan.counts
    plan.drafts.update({0: Drafts([7, 8, 9, 6], [-1, 0, -1, 2]), 2: Drafts([4, 5])})
    return plan


def test_captured_steps_of_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = make_buffers(monkeypatch, 8, exact=False)
    samples = buffers.fill_verify(plan_trees(), 16, 8, has_trees=True)
    work = buffers.verify_batch(16, 8, has_trees=True).paging.work
    assert work.masks[:9].tolist() == [0b1, 0b11, 0b111, 0b1001, 0b11001, 0, 0, 0, 0]
    assert work.has_singles
    assert not work.has_others, "varlen computes no trees"
    assert buffers.positions.host[:9].tolist() == [695, 696, 697, 696, 697, 699, 697, 698, 699]
    assert samples.lengths == [696, 697, 698, 697, 698, 700, 698, 699, 700]
    assert buffers.draft_rows.host[:2].tolist() == [[0, 0, 0, 4, 0, 0], [2, 6, 6, 2, 0, 5]]
    assert buffers.parents.host[[1, 2, 3, 4, 7, 8]].tolist() == [0, 1, 0, 3, 0, 1]


def test_exact_steps_of_drafts_compute_each_token_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = make_buffers(monkeypatch, 8, exact=True)
    buffers.fill_verify(plan_trees(), 16, 8, has_trees=True)
    paging = buffers.verify_batch(16, 8, has_trees=True).paging
    assert [[node for node in path if node >= 0] for path in paging.paths[:9].tolist()] == [
        [0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4], [], [], [], []
    ]  # fmt: skip
    splits = paging.work.splits[None]
    assert splits[:9, 0].tolist() == [0] * 5 + [1] + [2] * 3
    assert splits[:9, 7].tolist() == list(range(9))
    assert (splits[9:16, 0] == PADDING_ROW).all()
    assert paging.work.masks is None


def test_exact_steps_cut_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = make_buffers(monkeypatch, 8, exact=True)
    buffers.fill_mixed(make_plan([*[1] * 10, 30], 700), 256, 128)
    assert buffers.splits[None].host[:10, 0].tolist() == list(range(10))
    assert (buffers.splits[None].host[:10, 5] == 1).all()
    assert (buffers.splits[None].host[10:128, 0] == PADDING_ROW).all()


@pytest.mark.parametrize("seed", range(4))
def test_items_cover_each_tile_once(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        group, kv_heads, page = rng.choice([1, 4, 7]), rng.choice([1, 2, 8]), rng.choice([16, 64])
        window = rng.choice([None, None, 300])
        counts = np.array([rng.choice([0, 2, rng.randint(1, 700)]) for _ in range(rng.randint(1, 20))])
        seq_lens = counts + np.array([rng.choice([0, rng.randint(0, 20_000)]) for _ in counts])
        numbers = varlen_items.plan_items(counts, seq_lens, group, kv_heads, page, window)
        items = numbers[1:].reshape(-1, varlen_items.ITEM_FIELDS)
        assert numbers[0] == len(items) <= varlen_items.max_items(int(counts.sum()), len(counts), group, kv_heads)
        tiles: dict[tuple[int, int], list] = {}
        for item in items:
            tiles.setdefault((item[0], item[1]), []).append(item)
        assert set(tiles) == {
            (row, first) for row, count in enumerate(counts) for first in range(0, count * group, varlen_items.TILE)
        }
        for (row, first), splits in tiles.items():
            context = seq_lens[row] - counts[row]
            last = min((first + varlen_items.TILE - 1) // group, counts[row] - 1)
            lowest = 0 if window is None else max(context + first // group - window + 1, 0)
            splits.sort(key=lambda split: split[4])
            assert [split[4] for split in splits] == list(range(splits[0][5]))
            assert splits[0][2] <= lowest
            assert splits[0][2] % page == 0
            assert splits[-1][3] == context + last + 1
            assert all(a[3] == b[2] for a, b in pairwise(splits))
        partials = [(item[6] + item[4]) for item in items if item[5] > 1]
        assert len(set(partials)) == len(partials), "two splits share a partial"
        assert all((partial + 1) * kv_heads <= varlen_items.MAX_PARTIALS for partial in partials)
