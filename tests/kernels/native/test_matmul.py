"""Products with matrices in panels: against float64 with activations rounded as the kernels round them, loosely against
the unrounded product, and bit for bit against themselves whatever shares the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu.native import ANY_ROWS, ROW_COUNTS, TILES, Native, choose_few_rows, multiplies_floats
from quire.kernels.cpu.tape import Tape
from quire.layers.mlp import GatedMLP
from tests.tools.native import (
    DENSE,
    GROUPED,
    MODULE,
    QUANTIZED,
    THREADS,
    PanelSource,
    TensorSource,
    all_of,
    draw,
    each_isa,
    kernels_of,
    mixed,
    native_of,
    ops_of,
    random_panels,
    rounded_activations,
    tensor_kernels_of,
    weight_of,
)

pytestmark = pytest.mark.cpu

FORMATS = [*QUANTIZED, *GROUPED, *DENSE]
NF4_TOLERANCE = 4e-3  # products multiply the bytes of csrc/tables.h
IN_INT8 = [format for format in FORMATS if not multiplies_floats(format)]
each_format = pytest.mark.parametrize("format", FORMATS)


def panel_weight(format: str, rows: int, cols: int, name: str, threads: int = 2, seed: int = 0) -> Any:
    return weight_of([random_panels(format, rows, cols, seed)], native_of(name, threads))


def as_multiplied(x: Tensor, format: str) -> Tensor:
    return x.double() if multiplies_floats(format) else rounded_activations(x)


def close(out: Tensor, x: Tensor, dense: Tensor, format: str, tolerance: float = 1e-5) -> None:
    """Relative to the sizes of what was summed, not to their sum."""
    tolerance = max(tolerance, NF4_TOLERANCE if format.startswith("nf4") else 0)
    seen, dense = as_multiplied(x, format), dense.double()
    bound = tolerance * (seen.norm(dim=1, keepdim=True) * dense.norm(dim=1)) + 1e-30
    assert ((out.double() - seen @ dense.T).abs() <= bound).all()


def columns(format: str) -> list[int]:
    return [256, 512] if format.endswith("_k") else [32, 64, 96, 256, 512]


@each_isa
@each_format
@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 31, 33, 100, 513])
def test_shapes(name: str, format: str, outputs: int) -> None:
    for cols in columns(format):
        weight = panel_weight(format, outputs, cols, name, seed=cols)
        dense = weight.dense()
        for rows in (1, 2, 13, 40):
            x = draw(rows, cols, seed=rows)
            close(weight.matmul(x), x, dense, format)


@each_isa
@pytest.mark.parametrize("format", IN_INT8)
def test_where_codes_are_unpacked_changes_no_bit(name: str, format: str) -> None:
    """With AMX and i8mm there is no choice: the same product twice."""
    panels, x = random_panels(format, 100, 256), draw(70, 256)
    always, never = (weight_of([panels], native_of(name, few_rows=few_rows)) for few_rows in (70, 0))
    assert torch.equal(always.matmul(x), never.matmul(x))


@pytest.mark.parametrize(("gains_from", "few_rows"), [(8, 7), (64, 63), (256, 255), (512, ANY_ROWS)])
def test_where_codes_are_unpacked_is_chosen_by_durations(gains_from: int, few_rows: int) -> None:
    def time_product(rows: int, in_registers: bool) -> int:
        return 100 * rows if in_registers else 98 * rows if rows < gains_from else 90 * rows

    assert choose_few_rows(time_product) == few_rows


@each_isa
def test_durations_are_measured_once_for_each_format(name: str) -> None:
    native = Native(MODULE, name, 2)
    assert all(
        0 < MODULE.time_product(name, format, 16, stored) < 1e9 for format in QUANTIZED for stored in (False, True)
    )
    if name not in TILES:
        assert native.few_rows("q6_k") in {*(rows - 1 for rows in ROW_COUNTS), ANY_ROWS}
    assert [native.few_rows("q6_k") for _ in range(20)] == [native.few_rows("q6_k")] * 20
    assert native.few_rows("bf16") == 0


@each_isa
@pytest.mark.parametrize("format", ["q4_1", "q8_0", "q4_k", "q6_k", "f32"])
def test_rows_divided_among_threads_bit_for_bit(name: str, format: str) -> None:
    """In a program, threads with at least 16 rows each compute their own rows. A norm writes what a product reads."""
    x, scale = draw(101, 256, seed=3), draw(256, seed=4)
    panels = [random_panels(format, 96, 256, seed) for seed in (1, 2)]
    expected = None
    for threads, rows in [(1, 101), (2, 32), (2, 33), (2, 47), (3, 48), (3, 101), (5, 80), (5, 95), (5, 101)]:
        tape = Tape(native_of(name, threads, few_rows=40), rows)
        value = tape.new((256,))
        value.read()
        normed, _ = tape.norm(value, scale.numpy(), 1e-5, None)
        gated = tape.gate(tape.matmul(normed, [random_panels(format, 512, 256, 5)]), "silu")
        out = tape.matmul(gated, panels)
        out.read()
        tape.finish()
        tape.result(value, rows)[...] = x[:rows].numpy()
        tape.run(None, None, None, rows)
        result = tape.result(out, rows).copy()
        expected = result if expected is None else expected
        assert result.tobytes() == expected[:rows].tobytes(), (threads, rows)


@each_isa
@each_format
def test_any_number_of_rows_bit_for_bit(name: str, format: str) -> None:
    """A row's product is the same beside none, few or hundreds, and on any number of threads."""
    x = draw(600, 256)
    weights = [weight_of([random_panels(format, 100, 256)], native_of(name, threads)) for threads in THREADS]
    expected = torch.cat([weights[0].matmul(row[None]) for row in x[:100]])
    close(expected, x[:100], weights[0].dense(), format)
    for rows in (*range(1, 41), 64, 100, 600):
        out = weights[rows % 3].matmul(x[:rows])
        assert torch.equal(out[:100], expected[:rows]), rows
    for weight in weights:
        assert torch.equal(weight.matmul(x[60:163])[:40], expected[60:])


@each_isa
@each_format
def test_many_rows_over_wide_matrices(name: str, format: str) -> None:
    """More activations than pass over a panel at a time."""
    x = draw(700, 2048)
    weight = panel_weight(format, 40, 2048, name)
    out = weight.matmul(x)
    close(out, x, weight.dense(), format)
    assert torch.equal(out[650:], weight.matmul(x[650:]))
    assert torch.equal(out[699:], weight.matmul(x[699:]))


@each_isa
@pytest.mark.parametrize("format", IN_INT8)
def test_rounding_activations_costs_little(name: str, format: str) -> None:
    x, weight = draw(9, 512), panel_weight(format, 64, 512, name)
    dense = weight.dense().double()
    error = weight.matmul(x).double() - x.double() @ dense.T
    assert (error.abs() <= 0.01 * x.double().norm(dim=1, keepdim=True) * dense.norm(dim=1)).all()
    assert error.abs().max() > 0


@each_isa
@pytest.mark.parametrize("format", IN_INT8)
@pytest.mark.parametrize("codes", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_codes_do_not_overflow(name: str, format: str, codes: int, sign: float) -> None:
    for rows in (1, 30):
        weight = weight_of([random_panels(format, 33, 256, codes=codes)], native_of(name))
        x = sign * torch.ones(rows, 256)
        close(weight.matmul(x), x, weight.dense(), format, tolerance=1e-6)
        x[:, ::2] *= -1
        close(weight.matmul(x), x, weight.dense(), format, tolerance=1e-6)


@each_isa
@each_format
def test_zeros_and_sizes_of_all_kinds(name: str, format: str) -> None:
    weight = panel_weight(format, 40, 512, name)
    x = draw(6, 512)
    x[1] = 0.0
    x[2, 32:96] = 0.0
    x[3] *= 1e30
    x[4] *= 1e-30
    x[5] *= torch.logspace(-20, 20, 512)
    out = weight.matmul(x)
    assert not out[1].any()
    close(out, x, weight.dense(), format)


@each_isa
@pytest.mark.parametrize("format", ["q4_0", "q4_1", "q8_0", "q6_k", "f32"])
@pytest.mark.parametrize("size", [1e-37, 1e-38, 1e-40, 1e-45])
def test_activations_near_nothing(name: str, format: str, size: float) -> None:
    """The inverse of so small a scale is beyond float32: int8 makes zeros of it, and nothing else."""
    weight = panel_weight(format, 16, 256, name)
    x = torch.full((3, 256), size)
    x[:, ::3] = 0.0
    out = weight.matmul(x)
    assert out.abs().max() < 1e-34
    assert format == "f32" or not out.any()


@each_isa
@each_format
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("count", [1, 512], ids=["one", "all"])
def test_what_is_not_finite_shows_in_its_row_only(name: str, format: str, bad: float, count: int) -> None:
    weight = panel_weight(format, 40, 512, name)
    for rows in (4, 30):
        x = draw(rows, 512)
        expected = weight.matmul(x)
        for column in (3, 20):  # in either half of a block
            x[1] = draw(512, seed=1)
            x[1, column : column + count] = bad
            out = weight.matmul(x)
            assert not out[1].isfinite().any()
            others = [row for row in range(rows) if row != 1]
            assert torch.equal(out[others], expected[others])


@each_isa
@pytest.mark.parametrize("rows", [1, 7, 50])
def test_parts_of_different_formats_side_by_side(name: str, rows: int) -> None:
    formats = ["q4_k", "f32", "q6_k", "q8_0", "bf16"]
    parts = [random_panels(format, 33 + index, 256, seed=index) for index, format in enumerate(formats)]
    weight, x = weight_of(parts, native_of(name)), draw(rows, 256)
    assert weight.shape == (33 + 34 + 35 + 36 + 37, 256)
    assert weight.nbytes == sum(part.nbytes for part in parts)
    singles = [weight_of([part], native_of(name)) for part in parts]
    assert torch.equal(weight.matmul(x), torch.cat([single.matmul(x) for single in singles], dim=1))
    assert torch.equal(weight.dense(), torch.cat([single.dense() for single in singles]))


@each_isa
def test_no_rows_and_rows_that_are_not_contiguous(name: str) -> None:
    weight = panel_weight("q4_1", 20, 64, name)
    assert weight.matmul(draw(0, 64)).shape == (0, 20)
    apart = draw(5, 128)[:, ::2]
    assert torch.equal(weight.matmul(apart), weight.matmul(apart.contiguous()))


def build_mlps(name: str, format: str, **options: Any) -> list[GatedMLP]:
    """One to record, and the same to be run op by op on tensors."""
    panels = PanelSource(native_of(name), mixed if format == "mixed" else all_of(format))
    shape = {"hidden_size": 64, "intermediate_size": 96, "bias": True, **options}
    return [
        GatedMLP(source, ops, "mlp", **shape)
        for source, ops in ((panels, kernels_of(name)), (TensorSource(panels), tensor_kernels_of(name)))
    ]


@each_isa
@pytest.mark.parametrize("format", ["q8_0", "q4_1", "f32", "bf16", "mixed"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_gated_products(name: str, format: str, activation: str, bias: bool) -> None:
    """Product, bias, gate and rounding in one op give what the ops give one by one."""
    mlp, plain = build_mlps(name, format, activation=activation, bias=bias)
    for threads, rows in ((1, 1), (2, 5), (5, 40), (2, 100)):
        x = 3 * draw(rows, 64, seed=rows)
        ops = ops_of(name, threads)
        (gated,) = ops._at_once(lambda value: mlp.activate(mlp.gate_up(value)), (x,))
        assert torch.equal(gated, plain.activate(plain.gate_up(x)))
        (out,) = ops._at_once(mlp, (x,))
        assert torch.equal(out, plain(x))
        expected = as_multiplied(x, "q8_0" if format == "mixed" else format) @ plain.gate_up.weight.dense().double().T
        gate, up = (expected if plain.gate_up.bias is None else expected + plain.gate_up.bias).chunk(2, dim=-1)
        gelu = torch.nn.functional.gelu(gate, approximate="tanh")
        shaped = (torch.nn.functional.silu(gate) if activation == "silu" else gelu) * up
        torch.testing.assert_close(gated.double(), shaped, atol=2e-5, rtol=2e-5)


@each_isa
@pytest.mark.parametrize("size", [48, 80, 10])
def test_gates_that_are_not_whole_blocks(name: str, size: int) -> None:
    """Such sizes are gated by an op of their own; only plain formats can hold the product behind them."""
    (mlp, plain), x = build_mlps(name, "f32", intermediate_size=size), draw(7, 64)
    (out,) = ops_of(name)._at_once(mlp, (x,))
    assert torch.equal(out, plain(x))


@each_isa
def test_bias_over_parts(name: str) -> None:
    parts = [random_panels(format, 32, 64, seed=index) for index, format in enumerate(("q8_0", "f32", "q4_1"))]
    weight, bias, x = weight_of(parts, native_of(name)), draw(96, seed=5), draw(11, 64)
    (out,) = ops_of(name)._at_once(lambda value: weight.matmul(value) + bias.numpy(), (x,))
    assert torch.equal(out, weight.matmul(x) + bias)


@each_isa
def test_a_value_is_rounded_once_for_all_who_read_it(name: str) -> None:
    """Two products of one value, the first of which leaves int8 behind for the second."""
    first, second = panel_weight("q8_0", 32, 64, name, seed=1), panel_weight("q4_1", 32, 64, name, seed=2)
    x = draw(9, 64)
    outs = ops_of(name)._at_once(lambda value: (first.matmul(value), second.matmul(value)), (x,))
    assert torch.equal(outs[0], first.matmul(x))
    assert torch.equal(outs[1], second.matmul(x))


class TestFusing:
    """Ops that are joined while they are written down must not claim memory that is still read, or read too early."""

    def check(self, name: str, work: Callable[[Any], Any], width: int = 64) -> None:
        x = draw(40, width)
        found, expected = ops_of(name, 5)._at_once(work, (x,)), work(x)
        for out, value in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
            assert torch.equal(out, value)

    def weight(self, name: str, rows: int, cols: int, seed: int = 0) -> Any:
        return panel_weight("q8_0", rows, cols, name, seed=seed)

    @each_isa
    def test_a_gate_as_wide_as_what_nobody_holds_any_more(self, name: str) -> None:
        ops, gate_up, down = ops_of(name), self.weight(name, 128, 64), self.weight(name, 64, 64, 1)
        self.check(name, lambda x: down.matmul(ops.silu_mul(gate_up.matmul(ops.rms_norm(x, torch.ones(64), 1e-5)))))

    @each_isa
    def test_a_gate_long_after_its_product(self, name: str) -> None:
        """What comes between uses memory that the gate is given afterwards."""
        ops, gate_up, other = ops_of(name), self.weight(name, 128, 64), self.weight(name, 64, 64, 1)

        def work(x: Any) -> Any:
            raw = gate_up.matmul(x)
            between = other.matmul(other.matmul(x))
            return ops.silu_mul(raw), between

        self.check(name, work)

    @each_isa
    def test_a_product_that_no_op_reads_is_refused(self, name: str) -> None:
        weight = self.weight(name, 64, 64)

        def work(x: Any) -> Any:
            weight.matmul(x)
            return x

        with pytest.raises(AssertionError, match="no op reads"):
            self.check(name, work)

    @each_isa
    def test_a_sum_that_is_multiplied(self, name: str) -> None:
        """A residual is changed in place, so its int8 of before must not be used after."""
        ops, weight = ops_of(name), self.weight(name, 64, 64)

        def work(x: Any) -> Any:
            residual = ops.rms_norm(x, torch.ones(64), 1e-5)
            _, total = ops.rms_norm(weight.matmul(x), torch.ones(64), 1e-5, residual)
            return weight.matmul(total)

        self.check(name, work)


@each_isa
@pytest.mark.parametrize("kind", ["q4_1", "q8_0", "f32"])
@pytest.mark.parametrize("outputs", [1, 17, 64, 100, 515])
def test_best_is_the_first_largest_product(kind: str, outputs: int, name: str) -> None:
    for threads in (1, 2, 5):
        weight = panel_weight(kind, outputs, 64, name, threads)
        x = draw(40, 64)
        x[3] = 0.0  # all products equal
        x[5, 7] = float("nan")
        logits = weight.matmul(x)
        rows = [5, 3, 0, 39, 3, *range(10, 30)]
        found, values = weight.argmax(x, rows)
        for row, index, value in zip(rows, found, values, strict=True):
            if row == 5:
                assert value != value
                continue
            assert index == int(logits[row].argmax())
            assert value == float(logits[row].max())
    assert weight.argmax(x, []) == ([], [])
