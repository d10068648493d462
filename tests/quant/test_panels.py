"""Matrices in panels: what goes in comes out bit for bit, our own roundings stay in their bounds, memory goes back."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from quire.quant.ggml_types import PANEL_FORMATS, GGMLType
from quire.quant.unpack import UNPACKERS
from tests.tools.native import DENSE, SCALES_AT

native = pytest.importorskip("quire.kernels.cpu._native", reason="the C++ kernels are not built")

pytestmark = pytest.mark.cpu

TABLES = {GGMLType.IQ4_NL: (0,), GGMLType.IQ4_XS: (0,), GGMLType.MXFP4: ()}
HALVES_AT = SCALES_AT | TABLES  # float16 scales
KINDS = list(HALVES_AT)
ROWS = (1, 15, 16, 17, 48, 100)

by_kind = pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
by_type = pytest.mark.parametrize("name", list(DENSE))


def random_blocks(kind: GGMLType, rows: int, cols: int, seed: int = 0) -> Tensor:
    """Rows of blocks of random bytes, except that every float16 scale is finite (subnormal ones among them)."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows, kind.row_bytes(cols)), dtype=torch.uint8, generator=generator)
    blocks = data.view(-1, kind.type_size)
    for at in HALVES_AT[kind]:
        blocks[:, at + 1] &= 0xBF
    return data


def expected_values(kind: GGMLType, data: Tensor, cols: int) -> Tensor:
    out = torch.empty(data.numel() // kind.type_size, kind.block_size)
    UNPACKERS[kind](data.view(-1, kind.type_size), out)
    return out.view(len(data), cols)


def new_panels(kind: GGMLType, rows: int, cols: int) -> native.Panels:
    return native.Panels(PANEL_FORMATS[kind], rows, cols)


def pack_slice(panels: native.Panels, kind: GGMLType, data: Tensor, first: int, count: int) -> None:
    panels.pack_gguf(kind.number, data[first:].data_ptr() if count else 0, first, count)


def unpack(panels: native.Panels, rows: Tensor | None = None) -> Tensor:
    indices = torch.arange(panels.rows) if rows is None else rows
    out = torch.full((len(indices), panels.cols), float("nan"))
    panels.unpack_rows(indices.data_ptr(), len(indices), out.data_ptr())
    return out


def pack_dense(panels: native.Panels, values: Tensor, name: str = "f32") -> native.Panels:
    panels.pack_dense(name, values.data_ptr(), values.stride(0), 0, len(values))
    return panels


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual.view(torch.int32), expected.contiguous().view(torch.int32))


@by_kind
@pytest.mark.parametrize("rows", ROWS)
def test_gguf_blocks_come_out_as_the_same_bits(kind: GGMLType, rows: int) -> None:
    data = random_blocks(kind, rows, 768, seed=rows)
    panels = new_panels(kind, rows, 768)
    pack_slice(panels, kind, data, 0, rows)
    assert_same_bits(unpack(panels), expected_values(kind, data, 768))


@by_kind
def test_one_block_a_row_is_enough(kind: GGMLType) -> None:
    data = random_blocks(kind, 21, kind.block_size)
    panels = new_panels(kind, 21, kind.block_size)
    pack_slice(panels, kind, data, 0, 21)
    assert_same_bits(unpack(panels), expected_values(kind, data, kind.block_size))


@by_kind
def test_slices_in_any_order_make_the_whole(kind: GGMLType) -> None:
    data = random_blocks(kind, 100, 512)
    panels = new_panels(kind, 100, 512)
    for first, count in ((64, 36), (0, 16), (16, 0), (16, 48)):
        pack_slice(panels, kind, data, first, count)
    assert_same_bits(unpack(panels), expected_values(kind, data, 512))


@by_kind
def test_threads_may_pack_slices_at_once(kind: GGMLType) -> None:
    data = random_blocks(kind, 1000, 512)
    panels = new_panels(kind, 1000, 512)
    with ThreadPoolExecutor(4) as threads:
        starts = range(0, 1000, 32)
        list(threads.map(lambda first: pack_slice(panels, kind, data, first, min(32, 1000 - first)), starts))
    assert_same_bits(unpack(panels), expected_values(kind, data, 512))


@by_kind
def test_rows_are_unpacked_in_the_order_asked_for(kind: GGMLType) -> None:
    data = random_blocks(kind, 40, 256)
    panels = new_panels(kind, 40, 256)
    pack_slice(panels, kind, data, 0, 40)
    rows = torch.tensor([39, 0, 17, 17, 16])
    assert_same_bits(unpack(panels, rows), expected_values(kind, data, 256)[rows])


@by_kind
def test_packed_matrices_are_as_large_as_their_bits(kind: GGMLType) -> None:
    panels = new_panels(kind, 64, 1024)
    # The K types' 6-bit scales take a byte each, and scales of tables are float32; nothing else grows.
    tables = {GGMLType.IQ4_NL: 20 / 18, GGMLType.IQ4_XS: 160 / 136, GGMLType.MXFP4: 20 / 17}
    growth = {GGMLType.Q4_K: 148 / 144, GGMLType.Q5_K: 180 / 176, **tables}.get(kind, 1)
    assert panels.nbytes == round(64 * kind.row_bytes(1024) * growth)
    assert panels.nbytes == 4 * panels.stride


def special_values(rows: int, cols: int) -> Tensor:
    """Normal numbers of all sizes, with the ones that rounding gets wrong first."""
    generator = torch.Generator().manual_seed(rows)
    values = torch.randn(rows, cols, generator=generator)
    values *= torch.exp2(torch.randint(-30, 18, (rows, cols), generator=generator).float())
    special = [1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8]  # half way, for float16 and for bfloat16
    special += [65504.0, 65519.0, 65520.0, -65536.0, 3.4e38, float("inf"), float("-inf"), 0.0, -0.0]
    special += [2**-14, 2**-14 - 2**-25, 2**-24, 2**-25, 3 * 2**-25, 2**-26]  # subnormal, or nearly
    flat = values.view(-1)
    flat[: len(special)] = torch.tensor(special)
    return values


@by_type
@pytest.mark.parametrize("source", list(DENSE))
@pytest.mark.parametrize(("rows", "cols"), [(1, 64), (17, 96), (48, 33), (100, 100)])
def test_plain_rows_are_rounded_to_the_nearest(name: str, source: str, rows: int, cols: int) -> None:
    values = special_values(rows, cols).to(DENSE[source])
    panels = pack_dense(native.Panels(name, rows, cols), values, source)
    assert_same_bits(unpack(panels), values.to(DENSE[name]).float())


@pytest.mark.parametrize("number", [0, 1, 30])
def test_gguf_files_with_plain_values_pack_too(number: int) -> None:
    name = {0: "f32", 1: "f16", 30: "bf16"}[number]
    values = special_values(19, 64).to(DENSE[name])
    panels = native.Panels(name, 19, 64)
    panels.pack_gguf(number, values.data_ptr(), 0, 19)
    assert_same_bits(unpack(panels), values.float())


@by_type
def test_nan_stays_nan(name: str) -> None:
    values = torch.full((3, 32), float("nan"))
    assert unpack(pack_dense(native.Panels(name, 3, 32), values)).isnan().all()


@by_type
@pytest.mark.parametrize("target", ["f32", "q8_0", "q4_1"])
def test_rows_may_lie_apart(name: str, target: str) -> None:
    wide = torch.randn(20, 96).to(DENSE[name])
    apart = pack_dense(native.Panels(target, 20, 64), wide[:, :64], name)
    dense = pack_dense(native.Panels(target, 20, 64), wide[:, :64].float().contiguous(), "f32")
    assert_same_bits(unpack(apart), unpack(dense))


def test_own_int8_is_within_half_a_step() -> None:
    values = torch.randn(100, 512, generator=torch.Generator().manual_seed(1)) * 0.05
    actual = unpack(pack_dense(native.Panels("q8_0", 100, 512), values))
    steps = values.view(-1, 32).abs().amax(1, keepdim=True).div(127).half().float()
    assert ((actual - values).view(-1, 32).abs() <= steps * 0.5001).all()
    assert torch.equal(actual, ((actual.view(-1, 32) / steps).round() * steps).view_as(actual))


def plain_int4(values: Tensor) -> Tensor:
    """Sixteen levels from the least to the largest value of each block."""
    blocks = values.view(-1, 32)
    m = blocks.amin(1, keepdim=True).half().float()
    d = ((blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / 15).half().float()
    return (((blocks - m) / d).round().clamp(0, 15) * d + m).view_as(values)


def test_own_int4_beats_plain_rounding_in_every_block() -> None:
    values = torch.randn(64, 1024, generator=torch.Generator().manual_seed(2)) * 0.05
    actual = unpack(pack_dense(native.Panels("q4_1", 64, 1024), values))
    error = (actual - values).view(-1, 32).square().sum(1)
    plain = (plain_int4(values) - values).view(-1, 32).square().sum(1)
    assert (error <= plain * 1.0001).all()
    assert error.sum() < 0.85 * plain.sum()


def test_own_int4_has_sixteen_levels_a_block() -> None:
    values = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    blocks = unpack(pack_dense(native.Panels("q4_1", 32, 64), values)).view(-1, 32)
    assert max(len(block.unique()) for block in blocks) <= 16
    assert min(len(block.unique()) for block in blocks) > 8


@pytest.mark.parametrize("name", ["q8_0", "q4_1"])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, 1e-12])
def test_constant_blocks_are_kept(name: str, value: float) -> None:
    values = torch.full((5, 64), value)
    actual = unpack(pack_dense(native.Panels(name, 5, 64), values))
    assert torch.allclose(actual, values, rtol=2**-10, atol=1e-9)


@pytest.mark.parametrize("name", ["q8_0", "q4_1"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e8])
def test_values_beyond_a_scale_are_refused(name: str, value: float) -> None:
    values = torch.randn(20, 64)
    values[18, 40] = value
    with pytest.raises(ValueError, match="keep this matrix in f32 or bf16"):
        pack_dense(native.Panels(name, 20, 64), values)


@pytest.mark.parametrize(
    ("name", "rows", "cols", "message"),
    [
        ("q4_1", 16, 48, "16 rows and 48 columns .* q4_1: columns come in blocks of 32"),
        ("q6_k", 16, 128, "blocks of 256"),
        ("q8_0", 0, 32, "from 1 to"),
        ("f32", 3, 0, "from 1 to"),
        ("f32", -3, 32, "from 1 to"),
        ("f32", 2**40, 2**40, "from 1 to"),
        ("q2_k", 16, 256, "no panel format 'q2_k'; it is one of q4_0, q4_1"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name: str, rows: int, cols: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.Panels(name, rows, cols)


def test_memory_that_the_system_lacks_is_said_so() -> None:
    with pytest.raises(MemoryError):
        native.Panels("f32", 2**29, 2**29)


@pytest.mark.parametrize(("first", "count"), [(0, 41), (48, 0), (32, 9), (-16, 16), (0, -1), (16, 2**62)])
def test_rows_out_of_range_are_refused(first: int, count: int) -> None:
    data = torch.zeros(40, 64)
    panels = native.Panels("f32", 40, 64)
    with pytest.raises(IndexError, match="the 40 of the matrix"):
        panels.pack_dense("f32", data.data_ptr(), 64, first, count)
    with pytest.raises(IndexError, match="the 40 of the matrix"):
        panels.pack_gguf(0, data.data_ptr(), first, count)


@pytest.mark.parametrize(("first", "count"), [(8, 16), (0, 8), (16, 23)])
def test_parts_of_panels_are_refused(first: int, count: int) -> None:
    with pytest.raises(ValueError, match="multiples of 16"):
        native.Panels("f32", 40, 64).pack_gguf(0, torch.zeros(40, 64).data_ptr(), first, count)


@pytest.mark.parametrize("row", [-1, 40, 2**62])
def test_a_row_that_is_not_there_is_refused_before_anything_is_written(row: int) -> None:
    panels = native.Panels("f32", 40, 64)
    rows, out = torch.tensor([0, row]), torch.full((2, 64), 7.0)
    with pytest.raises(IndexError, match=f"row {row} is not among the 40"):
        panels.unpack_rows(rows.data_ptr(), 2, out.data_ptr())
    assert (out == 7).all()


def test_fewer_than_no_rows_are_refused() -> None:
    rows, out = torch.tensor([0]), torch.empty(1, 64)
    with pytest.raises(ValueError, match="cannot unpack -1 rows"):
        native.Panels("f32", 40, 64).unpack_rows(rows.data_ptr(), -1, out.data_ptr())


def test_sources_that_do_not_fit_the_format_are_refused() -> None:
    data = torch.zeros(16, 256)
    with pytest.raises(ValueError, match="GGUF type 3 do not go into panels of q4_0"):
        native.Panels("q4_0", 16, 256).pack_gguf(3, data.data_ptr(), 0, 16)
    with pytest.raises(ValueError, match="GGUF type 10 "):
        native.Panels("q4_k", 16, 256).pack_gguf(10, data.data_ptr(), 0, 16)
    with pytest.raises(ValueError, match="cannot be quantized to q4_k"):
        native.Panels("q4_k", 16, 256).pack_dense("f32", data.data_ptr(), 256, 0, 16)
    with pytest.raises(ValueError, match="f32, bf16 or f16, not 'f64'"):
        native.Panels("f32", 16, 256).pack_dense("f64", data.data_ptr(), 256, 0, 16)
    with pytest.raises(ValueError, match="255 values apart"):
        native.Panels("f32", 16, 256).pack_dense("f32", data.data_ptr(), 255, 0, 16)
    with pytest.raises(ValueError, match="null"):
        native.Panels("f32", 16, 256).pack_gguf(0, 0, 0, 16)


def test_a_matrix_tells_what_it_is() -> None:
    panels = native.Panels("q4_1", 17, 64)
    assert (panels.format, panels.rows, panels.cols) == ("q4_1", 17, 64)
    assert panels.stride == 2 * (256 + 64)
    assert panels.nbytes == 2 * panels.stride


def test_a_matrix_starts_as_zeros_even_after_others_are_gone() -> None:
    kept = native.Panels("f32", 16, 64)
    for _ in range(3):
        panels = native.Panels("f32", 16, 1024)
        assert (unpack(panels) == 0).all()
        pack_dense(panels, torch.ones(16, 1024))
        del panels
    assert (unpack(kept) == 0).all()


class TestLayout:
    """The bytes themselves: what the products read, which never call the unpacking that the other tests trust."""

    def panel(self, panels: native.Panels, index: int) -> Tensor:
        data = ctypes.string_at(panels.address + index * panels.stride, panels.stride)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def test_four_bit_codes_and_scales_lie_in_lanes(self) -> None:
        data = random_blocks(GGMLType.Q4_1, 19, 64)
        panels = new_panels(GGMLType.Q4_1, 19, 64)
        pack_slice(panels, GGMLType.Q4_1, data, 0, 19)
        blocks = data.view(19, 2, 20)
        for index, rows in ((0, 16), (1, 3)):
            panel, source = self.panel(panels, index), blocks[index * 16 :][:16]
            codes, scales = panel[:512].view(2, 4, 16, 4), panel[512:].view(2, 2, 16, 2)
            assert torch.equal(codes[:, :, :rows], source[:, :, 4:].view(rows, 2, 4, 4).permute(1, 2, 0, 3))
            assert torch.equal(scales[:, :, :rows], source[:, :, :4].reshape(rows, 2, 2, 2).permute(1, 2, 0, 3))
            assert not codes[:, :, rows:].any()
            assert not scales[:, :, rows:].any()

    def test_eight_bit_codes_are_raised_by_128(self) -> None:
        data = random_blocks(GGMLType.Q8_0, 3, 32)
        panels = new_panels(GGMLType.Q8_0, 3, 32)
        pack_slice(panels, GGMLType.Q8_0, data, 0, 3)
        codes = self.panel(panels, 0)[:512].view(8, 16, 4)
        assert torch.equal(codes[:, :3], (data[:, 2:] ^ 128).view(3, 8, 4).permute(1, 0, 2))
        assert not codes[:, 3:].any()

    def test_plain_values_lie_in_lanes(self) -> None:
        values = torch.randn(18, 33)
        panel = self.panel(pack_dense(native.Panels("f32", 18, 33), values), 1)[: 33 * 64].view(torch.float32)
        assert torch.equal(panel.view(33, 16)[:, :2], values[16:].T)
        assert not panel.view(33, 16)[:, 2:].any()


class TestArena:
    # More than the 64 MiB of a usual region, so that each gets one of its own, with a little room behind it.
    LARGE = ("f32", 17_000, 1024)

    def test_matrices_lie_in_the_order_of_construction(self) -> None:
        first = native.Panels(*self.LARGE)
        others = [native.Panels(name, 17, 256) for name in ("q4_1", "f32", "q6_k")]
        for before, after in pairwise([first, *others]):
            assert after.address == before.address + before.nbytes
            assert after.address % 64 == 0
        assert first.address % 2**21 == 0

    def test_regions_go_back_with_their_last_matrix(self) -> None:
        before = native.arena_use()
        matrices = [native.Panels(*self.LARGE) for _ in range(3)]
        assert native.arena_use()[0] == before[0] + 3
        assert native.arena_use()[1] >= before[1] + 3 * matrices[0].nbytes
        matrices.append(native.Panels("f32", 16, 32))
        assert native.arena_use()[0] == before[0] + 3
        del matrices[:3]
        assert native.arena_use()[0] == before[0] + 1
        matrices.clear()
        assert native.arena_use() == before

    def test_threads_get_memory_of_their_own(self) -> None:
        with ThreadPoolExecutor(4) as threads:
            matrices = list(
                threads.map(
                    lambda i: pack_dense(native.Panels("f32", 16, 512), torch.full((16, 512), float(i))), range(64)
                )
            )
        for i, panels in enumerate(matrices):
            assert (unpack(panels) == i).all()
