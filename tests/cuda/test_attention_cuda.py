"""Attention on the GPU against the reference, on caches whose unused slots are NaN, or for kernels that need finite
numbers the largest there is: what must not be seen shows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.cuda.gpu import DEVICE, DTYPES, assert_near  # skips this module where there is no GPU

from quire.kernels import reference  # isort: skip
from quire.kernels.cuda import ops
from quire.kernels.cuda.rope import MOST
from quire.kernels.paging import LayerCache, Paging
from tests.tools.paged import PagedCache
from tests.tools.trees import draw_parents, draw_paths, paths_of

pytestmark = pytest.mark.cuda

Steps = list[list[tuple[int, int]]]
MIXED: Steps = [[(0, 5), (1, 1)], [(1, 130), (2, 40), (0, 1)], [(0, 1), (1, 1), (2, 1)], [(2, 1), (1, 300), (0, 7)]]
WITH_CONTEXT: Steps = [[(0, 1024), (1, 512)], [(0, 600), (1, 512), (2, 3)], [(1, 1024), (0, 1)]]
FEW_AFTER_MANY: Steps = [
    [(0, 2300), (1, 40)],
    [(0, 17), (1, 100)],
    [(0, 150)],
    [(1, 2), (0, 2)],
    [(0, 1), (1, 1500)],
    [(1, 9)],
]
MANY: Steps = [
    [(row, row * 7 % 90 + 1) for row in range(70)],
    [(row, 1) for row in range(70)],
    [(3, 130), *((row, 1) for row in range(4, 70))],
]
DRAFTS: Steps = [
    [(row, row * 53 % 300 + 40) for row in range(9)],
    [(0, 2), (1, 1), (2, 2)],
    [(0, 6), (3, 16), (4, 1), (5, 9), (1, 3)],
    [(row, row % 4 + 1) for row in range(9)],
    [(7, 8)],
    [(2, 5), (8, 90), (1, 1), (3, 16)],
    [(row, 16) for row in range(9)],
]
MANY_DRAFTS: Steps = [[(row, row * 7 % 90 + 1) for row in range(70)], [(row, row % 5 + 1) for row in range(70)]]
LONG_DRAFTS: Steps = [[(0, 5000), (1, 3000), (2, 64)], [(0, 6)], [(1, 16), (0, 3), (2, 2)], [(2, 4), (0, 1)]]
LONG: Steps = [[(0, 700), (1, 513), (2, 513)], [(0, 1), (1, 1), (2, 1)], [(0, 600), (2, 1)]]


def on_gpu(paging: Paging) -> Paging:
    def move(x: torch.Tensor) -> torch.Tensor:
        return x.to(DEVICE)

    return Paging(
        move(paging.query_starts), move(paging.seq_lens), [move(table) for table in paging.block_tables],
        [move(slots) for slots in paging.slot_mapping], paging.block_size, paging.host_query_starts,
        paging.host_seq_lens,
        None if paging.paths is None else move(paging.paths),
    )  # fmt: skip


def check(
    steps: Steps, *, heads: int = 4, kv_heads: int = 2, dim: int = 64, dtype: torch.dtype = torch.bfloat16,
    window: int | None = None, softcap: float | None = None, with_slopes: bool = False, block_size: int = 16,
    trees: bool = False, seed: int = 0, kept: torch.dtype | None = None, packed: bool = False,
) -> None:  # fmt: skip
    """Store step by step on both sides, and compare what each step gives."""
    torch.manual_seed(seed)
    paged = PagedCache(
        kv_heads=kv_heads,
        head_dim=dim,
        windows=[window],
        num_blocks=1000,
        block_size=block_size,
        dtype=dtype,
        seed=seed,
    )
    plain = paged.layers[0]
    slopes = torch.rand(heads, device=DEVICE) if with_slopes else None
    options = {"scale": dim**-0.5, "window": window, "slopes": slopes, "softcap": softcap}
    for rows in steps:
        tokens = sum(count for _, count in rows)
        is_tree = trees and max(count for _, count in rows) < 64
        paging = on_gpu(paged.step(rows, draw_paths([count for _, count in rows], seed) if is_tree else None))
        q, k, v = (torch.randn(tokens, n, dim, device=DEVICE).to(dtype) for n in (heads, kv_heads, kv_heads))
        reference.store_kv(k.cpu(), v.cpu(), plain, paging.slot_mapping[0].cpu())
        own = LayerCache(*(x.transpose(1, 2).to(DEVICE, kept or dtype) for x in (plain.k, plain.v)), 0, block_size)
        own = LayerCache(poison(own.k.contiguous()), poison(own.v.contiguous()), 0, block_size)
        if packed:
            own = side_by_side(own)
        whole = LayerCache(*(x.to(dtype).transpose(1, 2).contiguous() for x in (own.k, own.v)), 0, block_size)
        expected = reference.attention(q, whole, paging, **options)
        assert_near(ops.attention(q, own, paging, **options), expected, dtype)


def poison(kept: torch.Tensor) -> torch.Tensor:
    """A cache of half precision holds no NaN: its writers see to that."""
    return kept.nan_to_num(MOST[kept.dtype]) if kept.dtype in (torch.bfloat16, torch.float16) else kept


def side_by_side(cache: LayerCache) -> LayerCache:
    """The same in blocks that hold keys, values and another layer's part, as mixed layouts have them."""
    parts = cache.k.view(torch.uint8), cache.v.view(torch.uint8)
    sizes = [part[0].numel() for part in parts]
    whole = torch.full((len(cache.k), sum(sizes) + 256), 255, dtype=torch.uint8, device=cache.k.device)
    views = []
    for view, part in zip(whole.split([*sizes, 256], dim=1), parts, strict=False):
        view.copy_(part.flatten(1))
        views.append(view.view(cache.k.dtype).view(cache.k.shape))
    return LayerCache(views[0], views[1], cache.group, cache.block_size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps", [MIXED, LONG, WITH_CONTEXT], ids=["mixed", "long", "with context"])
def test_any_mix_of_rows(steps, dtype):
    check(steps, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps", [MIXED, LONG, WITH_CONTEXT], ids=["mixed", "long", "with context"])
@pytest.mark.parametrize(("dim", "window"), [(64, None), (128, 30), (80, None)])
def test_blocks_that_hold_more(dim, window, steps, dtype):
    check(steps, dtype=dtype, dim=dim, window=window, packed=True)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 4, 16), (9, 3, 64), (8, 1, 80), (32, 8, 128), (40, 1, 64), (4, 2, 256)]
)
def test_heads(heads, kv_heads, dim):
    check(MIXED, heads=heads, kv_heads=kv_heads, dim=dim)


@pytest.mark.parametrize("options", [{}, {"window": 1200}, {"with_slopes": True}, {"trees": True}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_programs_share_a_context(options, dtype):
    check(FEW_AFTER_MANY, dtype=dtype, **options)
    check(FEW_AFTER_MANY, dtype=dtype, heads=9, kv_heads=3, dim=80, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 40}, {"with_slopes": True}, {"softcap": 4.0}, {"kept": torch.float8_e4m3fn}, {"block_size": 5}],
    ids=str,
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"),
    [(32, 8, 128, torch.bfloat16), (16, 16, 64, torch.float16), (24, 8, 80, torch.bfloat16)],
)
def test_many_rows(heads, kv_heads, dim, dtype, options):
    check(MANY, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, **options)


@pytest.mark.parametrize("kept", [torch.float8_e4m3fn, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cache_of_another_type(kept, dtype):
    check(MIXED, dtype=dtype, kept=kept)
    check([*MIXED, *WITH_CONTEXT], heads=32, kv_heads=8, dim=128, dtype=dtype, kept=kept)


@pytest.mark.parametrize("window", [1, 9, 64, 200])
@pytest.mark.parametrize("dim", [64, 256])
def test_window(window, dim):
    check(MIXED, window=window, dim=dim)


@pytest.mark.parametrize("options", [{"with_slopes": True}, {"softcap": 4.0}, {"softcap": 9.0, "window": 30}])
def test_scoring(options):
    check(MIXED, **options)


@pytest.mark.parametrize("options", [{}, {"window": 11}, {"with_slopes": True}], ids=["plain", "window", "slopes"])
def test_trees(options):
    check([[(0, 40), (1, 3)]])
    check([[(0, 7), (1, 12), (2, 1)]], trees=True, **options)


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"window": 40}, {"window": 3}, {"with_slopes": True}, {"with_slopes": True, "window": 100},
        {"softcap": 4.0}, {"kept": torch.float8_e4m3fn}, {"block_size": 5}, {"packed": True},
    ],
    ids=str,
)  # fmt: skip
def test_rows_of_a_few_queries(options, trees):
    check(DRAFTS, heads=32, kv_heads=8, dim=128, trees=trees, **options)


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("options", [{}, {"window": 40, "with_slopes": True}], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"),
    [
        (4, 2, 64, torch.float16), (9, 3, 80, torch.bfloat16), (16, 1, 64, torch.bfloat16),
        (4, 2, 256, torch.bfloat16), (4, 2, 64, torch.float32),
    ],
)  # fmt: skip
def test_heads_of_rows_of_a_few_queries(heads, kv_heads, dim, dtype, options, trees):
    check(DRAFTS, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, trees=trees, **options)


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("options", [{}, {"window": 1200}, {"with_slopes": True}], ids=str)
@pytest.mark.parametrize("steps", [MANY_DRAFTS, LONG_DRAFTS], ids=["many", "long"])
def test_splits_of_rows_of_a_few_queries(steps, options, trees):
    check(steps, heads=32, kv_heads=8, dim=128, trees=trees, **options)
    check(steps, heads=9, kv_heads=3, dim=64, dtype=torch.float16, trees=trees, **options)


def test_trees_of_many_nodes_and_chains_beside_them():
    torch.manual_seed(0)
    paged = PagedCache(kv_heads=2, head_dim=64, windows=[None], num_blocks=200, block_size=16, dtype=torch.bfloat16)
    plain, rows = paged.layers[0], [(0, 64), (1, 20), (2, 33), (3, 1), (4, 70)]
    for step in ([(0, 100), (1, 7), (2, 300), (3, 40)], rows):
        counts = [count for _, count in step]
        paging = on_gpu(paged.step(step))
        k, v = (torch.randn(sum(counts), 2, 64).bfloat16() for _ in "kv")
        reference.store_kv(k, v, plain, paging.slot_mapping[0].cpu())
    parents = [draw_parents(count - 1, random.Random(3)) if row in (0, 2) else None for row, count in enumerate(counts)]
    paging = replace(paging, paths=paths_of(counts, parents).to(DEVICE))
    q = torch.randn(sum(counts), 8, 64, device=DEVICE).bfloat16()
    own = LayerCache(*(poison(x.transpose(1, 2).contiguous().to(DEVICE)) for x in (plain.k, plain.v)), 0, 16)
    whole = LayerCache(*(x.transpose(1, 2).contiguous() for x in (own.k, own.v)), 0, 16)
    expected = reference.attention(q, whole, paging, scale=0.125)
    assert_near(ops.attention(q, own, paging, scale=0.125), expected, torch.bfloat16)


@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_block_sizes(block_size):
    check([[(0, 33), (1, 1)], [(0, 1), (1, 40)]], block_size=block_size)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "turned", "window", "interleaved", "dtype"),
    [
        (4, 2, 32, 32, None, True, torch.bfloat16), (9, 3, 64, 64, 20, False, torch.float16),
        (6, 1, 80, 32, None, False, torch.float32), (6, 1, 80, 32, None, True, torch.bfloat16),
        (32, 8, 128, 128, None, False, torch.bfloat16), (4, 2, 256, 256, None, False, torch.bfloat16),
        (4, 2, 256, 256, 70, False, torch.bfloat16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("contexts", [[700], [16, 1, 65, 130, 64, 300], [*range(1, 30)], [*range(1, 80)]], ids=len)
def test_new_tokens_are_turned_and_stored_on_the_way(
    heads, kv_heads, dim, turned, window, contexts, interleaved, dtype
):
    torch.manual_seed(len(contexts))
    paged = PagedCache(
        kv_heads=kv_heads, head_dim=dim, windows=[window], num_blocks=1000, block_size=16, dtype=dtype, seed=1
    )
    plain = paged.layers[0]
    before = [(row, length - 1) for row, length in enumerate(contexts) if length > 1]
    if before:
        tokens = sum(count for _, count in before)
        k, v = (torch.randn(tokens, kv_heads, dim).to(dtype) for _ in "kv")
        reference.store_kv(k, v, plain, paged.step(before).slot_mapping[0])
    paging = on_gpu(paged.step([(row, 1) for row in range(len(contexts))]))
    qkv = torch.randn(len(contexts), heads + 2 * kv_heads, dim, device=DEVICE).to(dtype)
    q, k, v = qkv.split_with_sizes([heads, kv_heads, kv_heads], dim=1)
    angles, positions = torch.randn(1000, turned, device=DEVICE), paging.seq_lens.long() - 1
    whole = LayerCache(plain.k.to(DEVICE), plain.v.to(DEVICE), 0, 16)
    own = LayerCache(whole.k.transpose(1, 2).contiguous(), whole.v.transpose(1, 2).contiguous(), 0, 16)
    turned_q, turned_k = reference.rope(q, k, positions, angles, interleaved)
    reference.store_kv(turned_k, v, whole, paging.slot_mapping[0])
    expected = reference.attention(turned_q, whole, paging, scale=dim**-0.5, window=window)
    got = ops.fused.rope_attention(q, k, v, positions, angles, interleaved, own, paging, scale=dim**-0.5, window=window)
    assert_near(got, expected, dtype)
    block, offset = paging.slot_mapping[0] // 16, paging.slot_mapping[0] % 16
    assert_near(own.k[block, :, offset], whole.k[block, offset], dtype)
    assert torch.equal(own.v[block, :, offset], whole.v[block, offset])


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic(seed):
    rng = random.Random(seed)
    steps: Steps = []
    for _ in range(4):
        sequences = rng.sample(range(6), rng.randint(1, 6))
        steps.append([(sequence, rng.choice([1, 1, 1, 2, 17, 128, 129, 250])) for sequence in sequences])
    kv_heads = rng.choice([1, 2, 3])
    check(
        steps, heads=kv_heads * rng.choice([1, 3, 4]), kv_heads=kv_heads, dim=rng.choice([32, 64, 96, 128]),
        window=rng.choice([None, None, 40]), seed=seed, dtype=rng.choice(DTYPES),
    )  # fmt: skip
