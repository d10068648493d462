"""The ops of a mixture of experts on a tape: `route` and `experts` of the reference. `native_ops.py` calls them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.kernels.cpu.native import multiplies_floats
from quire.kernels.cpu.tape import Tape, Value
from quire.kernels.cpu.tape_memory import NULL_VIEW, Columns, Storage, padded
from quire.kernels.cpu.tape_ops import Floats, Recorded
from quire.kernels.routing import ExpertWeights, Routing

ROWS_FOR_PADDING = 2  # rows of memory for each gathered row in int8: tiles are padded


def record_route(logits: Value, bias: Floats | None, routing: Routing, factors: Floats | None = None) -> Value:
    """The value has a token's weights, then the numbers of its experts as floats."""
    out = logits.tape.new((2 * routing.top_k,))
    arguments = {
        "logits": logits.read(),
        "bias": 0 if bias is None else bias,
        "factors": 0 if factors is None else factors,
        "routes": out.read(),
        "experts": routing.num_experts,
        "top_k": routing.top_k,
        "softmax": routing.scoring == "softmax",
        "normalize": routing.normalize,
        "factor": routing.factor,
        "groups": routing.num_groups,
        "top_groups": routing.top_groups,
        "group_scores": routing.group_scores,
    }
    logits.tape.put(Recorded("route", arguments))
    return out


@dataclass(frozen=True, slots=True)
class PairRows:
    """Rows for each token and rank, `width` values each: in float32, or in int8 for a product with quantized panels."""

    storage: Storage
    width: int
    is_quantized: bool

    def view(self) -> tuple[int, int]:
        is_there = self.storage.needed and not self.is_quantized
        return (self.storage.memory.address, padded(self.width)) if is_there else NULL_VIEW

    def quantized(self) -> tuple[int, int]:
        is_there = self.storage.needed and self.is_quantized
        return (self.storage.memory.address, self.width) if is_there else NULL_VIEW


def new_rows(tape: Tape, width: int, top_k: int, *, quantized: bool, needed: bool = True) -> tuple[Value, PairRows]:
    """The memory can be reused by the ops after the last reference to the value is dropped."""
    value = tape.new((ROWS_FOR_PADDING * top_k * width if quantized else top_k * padded(width),))
    storage = value.buffer.quantized if quantized else value.buffer.values
    storage.needed = needed
    return value, PairRows(storage, width, quantized)


@dataclass(frozen=True, slots=True)
class ExpertsOp:
    """Gathered rows, inner rows and outputs are memory that only this op uses."""

    weights: ExpertWeights
    top_k: int
    columns: dict[str, Columns | None]
    gathered: PairRows
    inner: PairRows
    rounded: PairRows
    outputs: PairRows
    few_rows: tuple[int, int]

    def emit(self, program: Any) -> None:
        weights, gate_up_bias, down_bias = self.weights, self.weights.gate_up_bias, self.weights.down_bias
        program.experts(
            gate_up=only_panels(weights.gate_up),
            down=only_panels(weights.down),
            num_experts=weights.num_experts,
            top_k=self.top_k,
            **{name: NULL_VIEW if columns is None else columns.view() for name, columns in self.columns.items()},
            gathered=self.gathered.view(),
            quantized=self.gathered.quantized(),
            inner=self.inner.view(),
            inner_quantized=self.rounded.quantized(),
            outputs=self.outputs.view(),
            activation=weights.activation,
            limit=weights.limit,
            gate_up_bias=0 if gate_up_bias is None else gate_up_bias.ctypes.data,
            down_bias=0 if down_bias is None else down_bias.ctypes.data,
            few_rows=self.few_rows[0],
            down_few_rows=self.few_rows[1],
            orders=order_address(weights.gate_up),
            inner_orders=order_address(weights.down),
        )


def order_address(weight: Any) -> int:
    return 0 if weight.expert_orders is None else int(weight.expert_orders.ctypes.data)


def only_panels(weight: Any) -> Any:
    """All experts in panels of one format. `PanelSource.matrix` makes such panels for experts."""
    (panels,) = weight.panels
    return panels


def record_experts(
    x: Value, routes: Value, weights: ExpertWeights, shared: Value | None, shared_gate: Value | None
) -> Value:
    tape, top_k = x.tape, routes.width // 2
    gate_up, down = only_panels(weights.gate_up), only_panels(weights.down)
    has_inner_order = weights.down.expert_orders is not None
    rounds_x, rounds_inner = (not multiplies_floats(panels.format) for panels in (gate_up, down))
    # The values are held until the op is on the tape: then the ops after it may use the memory.
    rows = [
        new_rows(tape, weights.hidden_size, top_k, quantized=rounds_x),
        new_rows(tape, weights.size, top_k, quantized=False, needed=has_inner_order or not (rounds_x and rounds_inner)),
        new_rows(tape, weights.size, top_k, quantized=True, needed=rounds_inner),
        new_rows(tape, weights.hidden_size, top_k, quantized=False),
    ]
    out = tape.new(x.tail)
    columns = {"x": x, "routes": routes, "shared": shared, "shared_gate": shared_gate, "out": out}
    read = {name: None if value is None else value.read() for name, value in columns.items()}
    few_rows = tape.native.few_rows(gate_up.format), tape.native.few_rows(down.format)
    gathered, inner, rounded, outputs = (own for _, own in rows)
    tape.put(ExpertsOp(weights, top_k, read, gathered, inner, rounded, outputs, few_rows))
    return out
