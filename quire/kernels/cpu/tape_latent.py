"""The ops of latent attention on a tape, `rope_latent` and `head_linear`. `native_ops.py` calls them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.kernels.cpu.native import multiplies_floats
from quire.kernels.cpu.tape import Value
from quire.kernels.cpu.tape_experts import PairRows, new_rows, only_panels
from quire.kernels.cpu.tape_memory import NULL_VIEW, Columns
from quire.kernels.cpu.tape_ops import Floats, Norm, Recorded


def record_rope_latent(
    q: Value, kv: Value, weight: Floats, eps: float, table: Floats, interleaved: bool
) -> tuple[Value, Value]:
    """In place."""
    assert kv.first == 0
    columns, unused = kv.read(), kv.buffer.quantized
    kv.tape.put(Norm(columns, None, None, weight, None, False, eps, 1, kv.buffer.values, unused))
    for x in (q, kv):
        heads, head_dim = x.tail
        ends = Columns(x.read().storage, x.first + head_dim - table.shape[1])
        arguments = {"x": ends, "heads": heads, "head_dim": head_dim, "table": table}
        x.tape.put(Recorded("rope", {**arguments, "dim": table.shape[1], "interleaved": interleaved}))
    return q, kv


@dataclass(frozen=True, slots=True)
class HeadLinear:
    """An op of the tape. `rounded` is memory for its input in int8, which only this op uses."""

    panels: Any
    heads: int
    x: Columns
    x_head: int
    rounded: PairRows | None
    y: Columns
    y_head: int
    rest: int
    few_rows: int

    def emit(self, program: Any) -> None:
        program.head_linear(
            weight=self.panels,
            heads=self.heads,
            x=self.x.view(),
            x_head=self.x_head,
            quantized=NULL_VIEW if self.rounded is None else self.rounded.quantized(),
            y=self.y.view(),
            y_head=self.y_head,
            rest=self.rest,
            few_rows=self.few_rows,
        )


def record_head_linear(x: Value, weight: Any) -> Value:
    tape, panels, (heads, width) = x.tape, only_panels(weight), x.tail
    rest, rows = width - panels.cols, panels.rows // heads
    is_dense = multiplies_floats(panels.format)
    value, rounded = (None, None) if is_dense else new_rows(tape, panels.cols, heads, quantized=True)
    out = tape.new((heads, rows + rest))
    few_rows = tape.native.few_rows(panels.format)
    tape.put(HeadLinear(panels, heads, x.read(), width, rounded, out.read(), rows + rest, rest, few_rows))
    del value  # its memory is free for the ops after this one
    return out
