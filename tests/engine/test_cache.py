"""Cache layout and size: which layer lives where, how many blocks there are, and the line that says so."""

import pytest
import torch

from quire.engine.cache import BlockShape, CacheTensors, block_bytes, lay_out
from quire.engine.memory import GIB, CacheSize, Room, describe, readable, size_cache
from quire.errors import NotEnoughMemory

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")


def size(**options) -> CacheSize:
    defaults = {
        "block_bytes": 1000, "block_size": 16, "windows": (None,), "max_tokens_per_step": 32, "num_blocks": None,
        "kv_memory": None, "max_len": 160,
        "max_len_wanted": None, "max_requests": 4, "room": Room(GIB, 4 * GIB),
    }  # fmt: skip
    return size_cache(**(defaults | options))


def test_layers_of_one_kind_are_one_group() -> None:
    layout = lay_out([None] * 5)
    assert layout.windows == (None,)
    assert layout.places == tuple((0, slot) for slot in range(5))


def test_mixed_layers_form_groups_as_large_as_the_rarest_kind() -> None:
    layout = lay_out([8, 8, None, 8, 8, None, 8])
    assert layout.num_slots == 2
    assert layout.windows == (8, 8, 8, None)
    assert layout.places == ((0, 0), (0, 1), (3, 0), (1, 0), (1, 1), (3, 1), (2, 0))


def test_layers_of_one_group_never_share_storage() -> None:
    windows = [8, 8, None, 8, 8, None, 8]
    cache = CacheTensors(
        lay_out(windows), CacheSize(3, 4, 0, 12, 3), BlockShape((4, 2, 8), (4, 2, 8), torch.float32), CPU
    )
    for a, first in enumerate(cache.layers):
        for second in cache.layers[a + 1 :]:
            assert first.group != second.group or first.k.data_ptr() != second.k.data_ptr()
        assert not first.k.any()
        assert first.k.shape == (4, 4, 2, 8)


def test_blocks_are_copied_in_order() -> None:
    cache = CacheTensors(
        lay_out([None]), CacheSize(3, 1, 0, 3, 3), BlockShape((1, 1, 1), (1, 1, 1), torch.float32), CPU
    )
    cache.layers[0].k[1] = 5.0
    cache.copy_blocks([(1, 2), (2, 3)])
    assert cache.layers[0].k.flatten().tolist() == [0.0, 5.0, 5.0, 5.0]


def test_block_bytes() -> None:
    assert (
        block_bytes(lay_out([None] * 3), BlockShape((16, 2, 64), (16, 2, 64), torch.bfloat16))
        == 2 * 3 * 16 * 2 * 64 * 2
    )


def test_no_more_blocks_than_all_requests_could_use() -> None:
    assert size(kv_memory=1.0).num_blocks == 4 * 10
    assert size(kv_memory=1.0, windows=(None, None)).num_blocks == 4 * 2 * 10


def test_without_a_wish_the_cache_takes_its_share() -> None:
    assert size(room=Room(12_345, 50_000)).num_blocks == 12
    assert size(room=Room(12_345, 50_000), num_blocks=20).num_blocks == 20


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
        size(room=Room(1000, 29_000, is_gpu=True), **options)
    assert size(room=Room(1000, 30_000, is_gpu=True), **options).num_blocks == 30


@pytest.mark.parametrize("options", [{"num_blocks": 30}, {"kv_memory": 30_000 / GIB}, {"kv_memory": 500.0}], ids=str)
def test_a_wish_that_the_machine_cannot_fulfil_is_refused_with_numbers(options) -> None:
    """Also if all requests together could not use as much: it was asked for."""
    expected = (
        r"^A cache of .* was asked for, but beside the weights the machine has 28\.3 KiB free\. Lower kv_memory or"
    )
    with pytest.raises(NotEnoughMemory, match=expected):
        size(room=Room(1000, 29_000), **options)


def test_a_gpu_that_is_full_is_not_helped_by_a_wish() -> None:
    with pytest.raises(NotEnoughMemory, match=r"End other programs on the GPU, take a smaller model, or lower max_len"):
        size(room=Room(0, 0, is_gpu=True))


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
