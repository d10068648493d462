"""Attention of the C++ kernels: against the reference over the same (rounded) keys and values, and bit for bit against
itself, however a query comes to be computed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.cpu.native_ops import NativeOps
from tests.tools.native import (
    THREADS,
    NativePagedCache,
    draw,
    each_cache_type,
    each_isa,
    kept,
    ops_of,
)
from tests.tools.paged import PagedCache

pytestmark = pytest.mark.cpu

Step = list[tuple[int, int]]


class Pair:
    """Sequences of random q, k and v, stored and attended to by the kernels and by the reference."""

    def __init__(
        self,
        ops: NativeOps,
        kind: str = "float32",
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        window: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.ops, self.kind, self.window = ops, kind, window
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.generator = torch.Generator().manual_seed(seed)
        shape = {"kv_heads": kv_heads, "head_dim": head_dim, "windows": [window], "seed": seed, **options}
        self.own, self.plain = NativePagedCache(ops, kind, **shape), PagedCache(**shape)

    def draw(self, tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, self.head_dim, generator=self.generator)

    def check(self, step: Step, **options: Any) -> None:
        tokens = sum(count for _, count in step)
        q, k, v = self.draw(tokens, self.heads), self.draw(tokens, self.kv_heads), self.draw(tokens, self.kv_heads)
        options = {"scale": self.head_dim**-0.5, "window": self.window, **options}
        paging = self.own.step(step)
        self.ops.store_kv(k, v, self.own.layers[0], paging.slot_mapping[0])
        out = self.ops.attention(q, self.own.layers[0], paging, **options)
        paging = self.plain.step(step)
        reference.store_kv(kept(k, self.kind), kept(v, self.kind), self.plain.layers[0], paging.slot_mapping[0])
        expected = reference.attention(q, self.plain.layers[0], paging, **options)
        torch.testing.assert_close(out, expected, atol=3e-6, rtol=3e-6)


MIXED: list[Step] = [[(0, 5), (1, 1)], [(1, 3), (2, 9), (0, 1)], [(0, 1), (1, 1), (2, 1)], [(2, 1), (1, 6), (0, 0)]]


@each_isa
@each_cache_type
@pytest.mark.parametrize("seed", range(20))
def test_anything_beside_anything(name: str, kind: str, seed: int) -> None:
    """Shapes, options and rows drawn at random, in steps that go on where the last one ended."""
    rng = random.Random(seed)
    kv_heads, shared = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 7])
    heads = kv_heads * shared
    pair = Pair(
        ops_of(name, rng.choice(THREADS)),
        kind,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=rng.choice([16, 32, 48, 64, 80, 128, 256]),
        window=rng.choice([None, None, 1, 7, 64, 200]),
        block_size=rng.choice([1, 3, 4, 16, 32]),
        num_blocks=700,
        seed=seed,
    )
    options = {
        "softcap": rng.choice([None, None, 1.5]),
        "slopes": draw(heads, seed=seed).abs() * 0.1 if rng.random() < 0.3 else None,
    }
    for _ in range(4):
        sequences = rng.sample(range(4), rng.randint(1, 4))
        step = [(sequence, rng.choice([0, 1, 1, 1, 2, 15, 40, 90])) for sequence in sequences]
        pair.check([*step, (9, 1)], **options)


@each_isa
@each_cache_type
@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 32])
def test_block_sizes(name: str, kind: str, block_size: int) -> None:
    pair = Pair(ops_of(name), kind, block_size=block_size)
    for step in MIXED:
        pair.check(step)


@each_isa
@each_cache_type
@pytest.mark.parametrize("head_dim", [16, 48, 96, 112, 256, 512])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (4, 2), (6, 2), (7, 1), (14, 2), (13, 1)])
def test_head_shapes(name: str, kind: str, head_dim: int, heads: int, kv_heads: int) -> None:
    pair = Pair(ops_of(name), kind, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=16)
    for step in MIXED[:3]:
        pair.check(step)


@each_isa
@each_cache_type
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("block_size", [16, 5])
def test_long_contexts(name: str, kind: str, threads: int, block_size: int) -> None:
    """Up to and across the borders of 64 and 256 keys, by single tokens and by chunks, beside short rows."""
    pair = Pair(ops_of(name, threads), kind, heads=6, kv_heads=2, head_dim=32, block_size=block_size, num_blocks=400)
    for step in ([(0, 63), (1, 255)], [(0, 1), (1, 1)], [(0, 1), (1, 1), (2, 3)], [(0, 190), (1, 254)]):
        pair.check(step)
    for step in ([(0, 1), (1, 1)], [(0, 2), (2, 1), (1, 1)], [(1, 300)], [(1, 1)], [(0, 1), (1, 1), (2, 1)]):
        pair.check(step)


@each_isa
@each_cache_type
@pytest.mark.parametrize("window", [1, 2, 3, 5, 64, 100])
@pytest.mark.parametrize("block_size", [4, 16])
def test_windows(name: str, kind: str, window: int, block_size: int) -> None:
    pair = Pair(ops_of(name), kind, window=window, block_size=block_size, num_blocks=200)
    for step in [*MIXED, [(0, 1), (2, 11), (1, 2)], [(0, 300)], [(0, 1), (1, 70)], [(0, 1), (1, 1)]]:
        pair.check(step)


@each_isa
@each_cache_type
@pytest.mark.parametrize("window", [None, 3])
def test_alibi_and_softcap(name: str, kind: str, window: int | None) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])
    for options in ({"slopes": slopes}, {"softcap": 0.4}, {"slopes": slopes, "softcap": 0.4}):
        pair = Pair(ops_of(name), kind, window=window)
        for step in MIXED:
            pair.check(step, **options)


@each_isa
@each_cache_type
def test_scores_far_apart(name: str, kind: str) -> None:
    """Weights of many orders of magnitude: the highest score must be found before anything is raised to it."""
    pair = Pair(ops_of(name), kind, block_size=16, num_blocks=100)
    pair.check([(0, 300)])
    k = 30 * draw(1, 2, 16)
    for at, sign in ((0, 1.0), (1, -1.0)):
        paging, plain = pair.own.step([(0, 1)]), pair.plain.step([(0, 1)])
        v, q = draw(1, 2, 16, seed=at), draw(1, 4, 16, seed=7)
        pair.ops.store_kv(sign * k, v, pair.own.layers[0], paging.slot_mapping[0])
        reference.store_kv(kept(sign * k, kind), kept(v, kind), pair.plain.layers[0], plain.slot_mapping[0])
        out = pair.ops.attention(q, pair.own.layers[0], paging, scale=1.0)
        expected = reference.attention(q, pair.plain.layers[0], plain, scale=1.0)
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def run_steps(
    ops: NativeOps, kind: str, length: int, steps: list[Step], *, heads: int = 6, block_size: int = 16, **options: Any
) -> Tensor:
    """Outputs of sequence 0, token by token, computed in steps that may have others in them. [length, heads, dim]"""
    window = options.get("window")
    shape = {"kv_heads": 2, "head_dim": 32, "num_blocks": 3000 // block_size}
    cache = NativePagedCache(ops, kind, block_size=block_size, windows=[window], **shape)
    found = []
    for step in steps:
        paging = cache.step(step)
        own = {sequence: cache.lengths[sequence] - count for sequence, count in step}
        q, k, v = (torch.cat([tokens(sequence, n, own[sequence])[i] for sequence, n in step]) for i in range(3))
        ops.store_kv(k[:, :2], v[:, :2], cache.layers[0], paging.slot_mapping[0])
        out = ops.attention(q[:, :heads].contiguous(), cache.layers[0], paging, scale=0.2, **options)
        for (sequence, _), part in zip(step, out.split([count for _, count in step]), strict=True):
            found += [part] if sequence == 0 else []
    result = torch.cat(found)
    assert len(result) == length
    return result


STREAMS: dict[int, Tensor] = {}


def tokens(sequence: int, count: int, start: int) -> Tensor:
    """q, k and v of a sequence's tokens, [3, count, 26, 32]"""
    if sequence not in STREAMS:
        STREAMS[sequence] = draw(3, 700, 26, 32, seed=sequence)
    return STREAMS[sequence][:, start : start + count]


def chunks(length: int, size: int, ahead: int = 0) -> list[Step]:
    """`ahead` tokens at once, the others in chunks."""
    first: list[Step] = [[(0, ahead)]] if ahead else []
    return first + [[(0, min(size, length - start))] for start in range(ahead, length, size)]


def company(steps: list[Step], seed: int) -> list[Step]:
    """The same steps with other rows before and behind."""
    rng = random.Random(seed)
    joined: list[Step] = []
    for step in steps:
        joined.append([(number, rng.choice([0, 1, 1, 4, 20])) for number in range(1, 6) if rng.random() < 0.7])
        joined[-1].insert(rng.randint(0, len(joined[-1])), step[0])
    return joined


@each_isa
@each_cache_type
@pytest.mark.parametrize(
    ("heads", "options"),
    [(2, {}), (6, {}), (26, {}), (14, {"window": 70}), (14, {"softcap": 1.5})],
    ids=["two", "six", "many", "window", "softcap"],
)
def test_bit_for_bit(name: str, kind: str, heads: int, options: dict[str, Any]) -> None:
    """Alone and in company, in chunks of any size, on any threads, from blocks that are read where they lie (16) and
    from such that are copied (5)."""
    length = 330
    expected = run_steps(ops_of(name, 1), kind, length, chunks(length, length), heads=heads, **options)
    ways = [
        (2, 16, chunks(length, length)),
        (5, 16, chunks(length, length)),
        (1, 5, chunks(length, 100)),
        (2, 16, chunks(length, 17)),
        (5, 32, chunks(length, 40)),
        (2, 16, chunks(length, 3, ahead=240)),
        (1, 5, chunks(length, 1, ahead=310)),
        (1, 16, company(chunks(length, 60), seed=1)),
        (2, 5, company(chunks(length, 150), seed=2)),
        (5, 16, company(chunks(length, 1, ahead=315), seed=3)),
    ]
    for number, (threads, block_size, steps) in enumerate(ways):
        out = run_steps(ops_of(name, threads), kind, length, steps, heads=heads, block_size=block_size, **options)
        assert torch.equal(out, expected), number


@each_isa
@each_cache_type
def test_bit_for_bit_token_by_token_over_a_long_context(name: str, kind: str) -> None:
    """Single tokens behind 600 keys are shared by chunks among threads; alone on one thread they are not."""
    length = 620
    expected = run_steps(ops_of(name, 1), kind, length, chunks(length, length))
    for threads in THREADS:
        out = run_steps(ops_of(name, threads), kind, length, chunks(length, 1, ahead=600))
        assert torch.equal(out, expected), threads


@each_isa
@each_cache_type
def test_what_is_not_a_number_stays_in_its_row(name: str, kind: str) -> None:
    ops = ops_of(name)
    cache = NativePagedCache(ops, kind, kv_heads=2, head_dim=16, block_size=16)
    paging = cache.step([(0, 20), (1, 20)])
    k, v, q = draw(40, 2, 16), draw(40, 2, 16, seed=1), draw(40, 4, 16, seed=2)
    ops.store_kv(k, v, cache.layers[0], paging.slot_mapping[0])
    expected = ops.attention(q, cache.layers[0], paging, scale=0.25)
    q[10] = float("nan")
    k[5] = v[5] = float("nan")
    ops.store_kv(k, v, cache.layers[0], paging.slot_mapping[0])
    out = ops.attention(q, cache.layers[0], paging, scale=0.25)
    assert out[5:20].isnan().all()
    assert torch.equal(out[20:], expected[20:])
