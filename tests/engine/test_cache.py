"""Cache layout and size: which layer lives where, how many blocks there are, and the line that says so."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from quire.engine.cache import CacheLayout, CacheTensors, lay_out, shape_blocks
from quire.engine.memory import GIB, CacheSize, MemoryBudget, describe, readable, size_cache
from quire.errors import NotEnoughMemory
from quire.kernels import select_torch
from quire.kernels.cache_spec import BlockShape, CacheSpec, KVCacheSpec, StateSpec
from quire.kernels.torch_arrays import TorchArrays
from tests.tools.mixed_specs import LARGE, LATENT, MIXED_SPECS, SMALL, WINDOW

pytestmark = pytest.mark.cpu

HOST = TorchArrays("cpu")
CPU = "cpu"


def size(**options) -> CacheSize:
    defaults = {
        "block_bytes": 1000, "block_size": 16, "windows": (None,), "max_tokens_per_step": 32, "num_blocks": None,
        "kv_memory": None, "max_len": 160,
        "max_len_wanted": None, "max_requests": 4, "budget": MemoryBudget(GIB, 4 * GIB),
    }  # fmt: skip
    return size_cache(**(defaults | options))


BLOCK = BlockShape((4, 2, 8), (4, 2, 8), "float32")


def layout_of(windows: Sequence[int | None], block: BlockShape = BLOCK) -> CacheLayout:
    return lay_out([KVCacheSpec(1, 1, window=window) for window in windows], [block] * len(windows))


def mixed_layout(specs: Sequence[CacheSpec], block_size: int = 16) -> CacheLayout:
    return lay_out(specs, shape_blocks(specs, select_torch(CPU), "bfloat16", block_size))


def places(layout: CacheLayout) -> list[tuple[int, int]]:
    return [(place.group, place.k.plane) for place in layout.layers]


def test_layers_of_one_kind_are_one_group() -> None:
    layout = layout_of([None] * 5)
    assert layout.windows == (None,)
    assert places(layout) == [(0, slot) for slot in range(5)]


def test_mixed_layers_form_groups_as_large_as_the_rarest_kind() -> None:
    layout = layout_of([8, 8, None, 8, 8, None, 8])
    assert layout.stacks == ((2, 256), (2, 256))
    assert layout.windows == (8, 8, 8, None)
    assert places(layout) == [(0, 0), (0, 1), (3, 0), (1, 0), (1, 1), (3, 1), (2, 0)]


def test_layers_of_one_shape_have_blocks_that_lie_one_after_the_other() -> None:
    """Keys of all slots and then values of all slots: so they have been since there were groups."""
    cache = CacheTensors(layout_of([8, 8, None, 8, 8, None, 8]), CacheSize(3, 4, 0, 12, 3), HOST)
    keys, values = cache._stacks
    for layer, (_, slot) in zip(cache.layers, places(layout_of([8, 8, None, 8, 8, None, 8])), strict=True):
        for view, part in ((layer.k, keys), (layer.v, values)):
            assert view.is_contiguous()
            assert view.data_ptr() == part.data_ptr() + slot * 4 * 256


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("name", MIXED_SPECS)
def test_layers_of_any_shape_have_memory_of_their_own(name: str, block_size: int) -> None:
    """Each block is given to one group, and each of its layers writes a number there. All must be found again."""
    specs = MIXED_SPECS[name]
    layout = mixed_layout(specs, block_size)
    cache = CacheTensors(layout, CacheSize(2 * len(layout.groups), block_size, 0, 12, 3), HOST)
    for part in cache._stacks:
        assert not part.any()
    owned = [(layer, block) for layer in cache.layers for block in range(layer.group + 1, 2 * len(layout.groups) + 1)]
    owned = [(layer, block) for layer, block in owned if (block - 1) % len(layout.groups) == layer.group]
    for number, (layer, block) in enumerate(owned):
        layer.k[block], expected_k = 2 * number, 2 * number
        if layer.v.data_ptr() != layer.k.data_ptr():
            layer.v[block] = expected_k + 1
    for number, (layer, block) in enumerate(owned):
        has_values = layer.v.data_ptr() != layer.k.data_ptr()
        assert layer.k[block].eq(2 * number).all()
        assert layer.v[block].eq(2 * number + has_values).all()
        assert layer.k[0].eq(0).all()


@pytest.mark.parametrize("name", MIXED_SPECS)
def test_layers_get_the_shapes_that_they_declared(name: str) -> None:
    specs = MIXED_SPECS[name]
    cache = CacheTensors(mixed_layout(specs), CacheSize(3, 16, 0, 12, 3), HOST)
    for spec, layer in zip(specs, cache.layers, strict=True):
        if isinstance(spec, StateSpec):
            assert layer.k.shape == layer.v.shape == (4, *spec.shape)
            continue
        assert layer.k.shape == (4, 16, spec.num_kv_heads, spec.head_dim)
        assert layer.v.shape == (4, 16, spec.num_kv_heads, spec.value_dim or spec.head_dim)
        assert layer.k.dtype == (torch.float32 if spec.dtype == "float32" else torch.bfloat16)
        assert layer.k[0].is_contiguous()


def test_a_latent_has_no_values_of_its_own() -> None:
    cache = CacheTensors(mixed_layout([LATENT] * 2), CacheSize(1, 16, 0, 12, 3), HOST)
    assert mixed_layout([LATENT] * 2).block_bytes == 2 * 16 * 576 * 2
    cache.layers[1].k[:] = torch.arange(576)
    assert cache.layers[1].v[1, 3, 0].tolist() == torch.arange(512).bfloat16().tolist()


@pytest.mark.parametrize(
    ("specs", "num_groups", "share"),
    [
        ([LARGE] * 3 + [SMALL] * 2, 1, 0.0),
        ([LATENT, LARGE] * 3, 1, 0.0),
        ([WINDOW, WINDOW, LARGE] * 2, 3, 0.0),
        ([WINDOW] * 22 + [LARGE] * 4, 7, 0.051),
        ([WINDOW, WINDOW, LATENT] * 5, 6, 0.133),
        ([WINDOW] * 29 + [LARGE] * 5 + [SMALL] * 2, 6, 0.075),
        ([LARGE] * 12 + [StateSpec((1 << 19,), "bfloat16")] * 36, 37, 0.2),
    ],
    ids=["draft", "latents", "windows", "gemma 3 1b", "latents and windows", "windows and draft", "states"],
)
def test_little_is_wasted(specs: list[CacheSpec], num_groups: int, share: float) -> None:
    layout = mixed_layout(specs)
    assert len(layout.groups) == num_groups
    assert layout.padding <= share + 1e-9


def test_groups_that_do_not_grow_come_last() -> None:
    layout = mixed_layout(MIXED_SPECS["all kinds"])
    assert (layout.windows, layout.num_encoder_groups, layout.num_state_groups) == ((None, 512), 1, 1)
    assert [place.group for place in layout.layers] == [0, 1, 3, 2, 0]


@pytest.mark.parametrize("name", MIXED_SPECS)
def test_copies_take_all_that_a_block_holds(name: str) -> None:
    cache = CacheTensors(mixed_layout(MIXED_SPECS[name], 4), CacheSize(3, 4, 0, 12, 3), HOST)
    for part in cache._stacks:
        part.random_(0, 100)
    before = [(layer.k.clone(), layer.v.clone()) for layer in cache.layers]
    cache.copy_blocks([(1, 2), (2, 3)])
    for layer, (k, v) in zip(cache.layers, before, strict=True):
        for now, then in ((layer.k, k), (layer.v, v)):
            assert [torch.equal(now[block], then[min(block, 1)]) for block in range(4)] == [True] * 4


def test_layers_of_one_group_never_share_storage() -> None:
    cache = CacheTensors(layout_of([8, 8, None, 8, 8, None, 8]), CacheSize(3, 4, 0, 12, 3), HOST)
    for a, first in enumerate(cache.layers):
        for second in cache.layers[a + 1 :]:
            assert first.group != second.group or first.k.data_ptr() != second.k.data_ptr()
        assert not first.k.any()
        assert first.k.shape == (4, 4, 2, 8)


def test_blocks_are_copied_in_order() -> None:
    block = BlockShape((1, 1, 1), (1, 1, 1), "float32")
    cache = CacheTensors(layout_of([None], block), CacheSize(3, 1, 0, 3, 3), HOST)
    cache.layers[0].k[1] = 5.0
    cache.copy_blocks([(1, 2), (2, 3)])
    assert cache.layers[0].k.flatten().tolist() == [0.0, 5.0, 5.0, 5.0]


@pytest.mark.parametrize("name", MIXED_SPECS)
@pytest.mark.parametrize("block_size", [1, 4])
def test_tokens_move_in_all_layers_of_their_group(name: str, block_size: int) -> None:
    """Latents share their memory with their values. Encoder tokens and states do not move."""
    layout = mixed_layout(MIXED_SPECS[name], block_size)
    num_moved = len(layout.windows)
    size = CacheSize(3 * num_moved + 3, block_size, 0, 12, 3)
    cache = CacheTensors(layout, size, HOST, move_kv=select_torch(CPU).move_kv)
    for part in cache._stacks:
        part.random_(0, 100)
    # Groups have disjoint blocks. The second move's target is the first one's source.
    first = [block_size * (1 + 3 * group) for group in range(num_moved)]
    moves = [[(slot + 1, slot), (slot + 2, slot + 1)] for slot in first]
    before = [(layer.k.clone(), layer.v.clone()) for layer in cache.layers]
    cache.move_tokens(moves)
    for layer, tensors in zip(cache.layers, before, strict=True):
        for now, then in zip((layer.k, layer.v), tensors, strict=True):
            expected = then.clone()
            for source, target in moves[layer.group] if layer.group < len(moves) else []:
                expected[divmod(target, block_size)] = then[divmod(source, block_size)]
            block = 1 + 3 * min(layer.group, num_moved)
            own = slice(block, block + 3)
            assert torch.equal(now.nan_to_num()[own], expected.nan_to_num()[own])


def test_a_layer_that_shares_is_another_one() -> None:
    """It has no memory of its own, and its tokens move once: moved twice, slot 3 would hold what slot 7 held."""
    own = [KVCacheSpec(1, 16, window=8), KVCacheSpec(2, 32)]
    layout = mixed_layout([*own, *(replace(spec, shares=2) for spec in own)])
    assert layout.layers == mixed_layout(own).layers * 2
    assert layout.stored == layout.layers[:2]
    assert layout.padding == mixed_layout(own).padding
    cache = CacheTensors(layout, CacheSize(4, 16, 0, 64, 1), HOST, move_kv=select_torch(CPU).move_kv)
    assert cache.layers[2] is cache.layers[0]
    assert cache.stored_layers == cache.layers[:2]
    cache.layers[0].k[0] = torch.arange(16, dtype=torch.bfloat16)[:, None, None]
    cache.move_tokens([[(5, 3), (7, 5)], []])
    assert cache.layers[2].k[0, [3, 5, 7], 0, 0].tolist() == [5, 7, 7]


def test_a_source_that_was_overwritten_is_a_mistake() -> None:
    cache = CacheTensors(layout_of([None]), CacheSize(3, 4, 0, 12, 3), HOST, move_kv=select_torch(CPU).move_kv)
    with pytest.raises(AssertionError):
        cache.move_tokens([[(6, 5), (5, 4)]])


def test_block_bytes() -> None:
    block = BlockShape((16, 2, 64), (16, 2, 64), "bfloat16")
    assert layout_of([None] * 3, block).block_bytes == 2 * 3 * 16 * 2 * 64 * 2


def test_no_more_blocks_than_all_requests_could_use() -> None:
    assert size(kv_memory=1.0).num_blocks == 4 * 10
    assert size(kv_memory=1.0, windows=(None, None)).num_blocks == 4 * 2 * 10


def test_without_a_wish_the_cache_takes_its_share() -> None:
    assert size(budget=MemoryBudget(12_345, 50_000)).num_blocks == 12
    assert size(budget=MemoryBudget(12_345, 50_000), num_blocks=20).num_blocks == 20


def test_memory_bounds_the_blocks_and_with_them_the_longest_request() -> None:
    small = size(kv_memory=5_000 / 2**30)
    assert (small.num_blocks, small.max_len) == (5, 80)


def test_windows_need_less_and_so_let_longer_requests_in() -> None:
    assert size(num_blocks=5, windows=(17,)).max_len == 160
    assert size(num_blocks=9, windows=(None, 17)).max_len == 80
    assert size(num_blocks=9, windows=(None, None)).max_len == 64


@pytest.mark.parametrize("options", [{"num_blocks": 5, "max_len_wanted": 100}, {"kv_memory": 1e-9}], ids=str)
def test_too_little_memory_is_said_with_numbers(options) -> None:
    with pytest.raises(
        NotEnoughMemory, match=r"enough for \d+ tokens.* Raise kv_memory or num_blocks, or lower max_len"
    ):
        size(**options)


@pytest.mark.parametrize("options", [{"num_blocks": 30}, {"kv_memory": 30_000 / GIB}], ids=str)
def test_a_wish_that_a_gpu_cannot_fulfil_is_refused_with_numbers(options) -> None:
    expected = (
        r"A cache of 29\.3 KiB \(30 blocks\) was asked for, but .* has 28\.3 KiB free\. Lower kv_memory or num_blocks"
    )
    with pytest.raises(NotEnoughMemory, match=expected):
        size(budget=MemoryBudget(1000, 29_000, is_gpu=True), **options)
    assert size(budget=MemoryBudget(1000, 30_000, is_gpu=True), **options).num_blocks == 30


@pytest.mark.parametrize("options", [{"num_blocks": 30}, {"kv_memory": 30_000 / GIB}, {"kv_memory": 500.0}], ids=str)
def test_a_wish_that_the_machine_cannot_fulfil_is_refused_with_numbers(options) -> None:
    """Also if all requests together could not use as much: it was asked for."""
    expected = (
        r"^A cache of .* was asked for, but beside the weights the machine has 28\.3 KiB free\. Lower kv_memory or"
    )
    with pytest.raises(NotEnoughMemory, match=expected):
        size(budget=MemoryBudget(1000, 29_000), **options)


def test_a_gpu_that_is_full_is_not_helped_by_a_wish() -> None:
    with pytest.raises(NotEnoughMemory, match=r"End other programs on the GPU, take a smaller model, or lower max_len"):
        size(budget=MemoryBudget(0, 0, is_gpu=True))


def test_the_line_at_start() -> None:
    def line(max_requests: int, step_bytes: int = 0) -> str:
        ops, cache = "torch in float32 on cpu", size(num_blocks=30)
        return describe("m", "llama", ops, 3 * 2**20, step_bytes, cache, "float32", max_requests)

    assert line(64) == (
        "m (llama), torch in float32 on cpu: weights 3.0 MiB, float32 cache up to 29.3 KiB in 30 blocks of 16 tokens; "
        "longest request 160 tokens; 64 requests at once, 3 of the longest"
    )
    assert line(2).endswith("; 2 requests at once, 2 of the longest")
    assert "weights 3.0 MiB, steps and graphs up to 2.00 GiB, float32 cache" in line(2, 2 << 30)
    assert readable(5) == "5 B"
    assert readable(3 * 2**30) == "3.00 GiB"
