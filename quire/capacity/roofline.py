"""Roofline: the seconds of a step from what it reads and multiplies, and from what a machine can read and multiply.

    products  = max(weights read / bytes_per_s, 2 x values x tokens / flops_per_s)
    attention = max(cache read / bytes_per_s, 4 x heads x head_dim x layers x pairs / attention_flops_per_s)
    seconds   = max(products + attention, layer_s x layers) + step_s + row_s x rows

The rates of a GPU that is not measured are its data sheet times the shares that quire reaches on an H200. The rates of
a measured machine are the best that its own steps reach: they only say what bounds a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from quire.capacity.model_size import ModelSize
from quire.capacity.profile import EngineSizes
from quire.capacity.step_cost import Cost, StepShape, decode_shape, prompt_shape
from quire.errors import InvalidParams

SPREAD = 0.25  # of extrapolated seconds, up and down


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does in a second, and what a step costs besides."""

    bytes_per_s: float
    flops_per_s: float
    attention_flops_per_s: float
    step_s: float = 0.0
    row_s: float = 0.0
    layer_s: float = 0.0  # the least that a layer takes


@dataclass(frozen=True, slots=True)
class DataSheet:
    """A GPU: memory as its driver shows it, bytes a second, and 16-bit operations a second without sparsity."""

    name: str
    memory_gib: float
    gb_per_s: float
    tflops: float

    def rates(self) -> Rates:
        """The data sheet times what quire reaches on an H200."""
        flops = 1e12 * self.tflops
        rates = READ_SHARE * 1e9 * self.gb_per_s, PRODUCT_SHARE * flops, ATTENTION_SHARE * flops
        return Rates(*rates, row_s=H200_ROW_S, layer_s=LAYER_S)


# Llama-3-8B's shapes in bfloat16 on one H200 (BENCHMARKS.md): batch 1 reads 3.9 TB/s of 4.8, products of 2,048 to
# 16,000 tokens do 665 to 690 of 989 TFLOP/s, and attention over 8,192 and 16,000 does about 550. A row takes 7 us more.
# A layer is a chain of eight kernels, of at least 2.5 us each: that is assumed, and matters for small models only.
READ_SHARE, PRODUCT_SHARE, ATTENTION_SHARE, H200_ROW_S, LAYER_S = 0.81, 0.68, 0.56, 7e-6, 20e-6

GPUS = {
    sheet.name: sheet
    for sheet in (
        DataSheet("b200", 179.0, 8000, 2250),
        DataSheet("h200", 139.8, 4800, 989),
        DataSheet("h100", 79.2, 3350, 989),
        DataSheet("h100-pcie", 79.2, 2000, 756),
        DataSheet("h20", 95.6, 4000, 148),
        DataSheet("a100", 79.2, 2039, 312),
        DataSheet("a100-40gb", 39.4, 1555, 312),
        DataSheet("a10", 22.1, 600, 125),
        DataSheet("l40s", 44.4, 864, 362),
        DataSheet("l4", 22.1, 300, 121),
        DataSheet("rtx-6000-ada", 47.5, 960, 364),
        DataSheet("a6000", 47.5, 768, 155),
        DataSheet("5090", 31.4, 1792, 209),
        DataSheet("4090", 23.5, 1008, 165),
        DataSheet("3090", 23.6, 936, 71),
    )
}
MEASURED_GPU = "h200"


def find_gpu(name: str) -> DataSheet:
    sheet = GPUS.get(name.lower())
    if sheet is None:
        raise InvalidParams(f"--gpu is {name!r}; give one of {', '.join(GPUS)}.", "gpu")
    return sheet


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of a step if only one thing took time."""

    memory: float
    compute: float
    host: float

    @property
    def bound(self) -> str:
        """Which of them is the largest."""
        return max(("memory", "compute", "host"), key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True, slots=True)
class Roofline:
    """A `Cost` from rates."""

    size: ModelSize
    rates: Rates
    factor: float = 1.0
    windows: tuple[int | None, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "windows", self.size.windows)

    def seconds(self, shape: StepShape) -> float:
        size, rates = self.size, self.rates
        products = max(size.weights_read(shape) / rates.bytes_per_s, size.product_flops(shape) / rates.flops_per_s)
        attention = max(
            size.keys_read(shape) / rates.bytes_per_s, size.attention_flops(shape) / rates.attention_flops_per_s
        )
        layers = max(products + attention, rates.layer_s * size.num_layers)
        return self.factor * (layers + rates.step_s + rates.row_s * shape.sampled)

    def range(self, shape: StepShape) -> tuple[float, float]:
        seconds = self.seconds(shape)
        return (1 - SPREAD) * seconds, (1 + SPREAD) * seconds

    def alternatives(self) -> Sequence[Roofline]:
        return [replace(self, factor=self.factor * share) for share in (1 - SPREAD, 1 + SPREAD)]

    def parts(self, shape: StepShape) -> StepParts:
        size, rates = self.size, self.rates
        return StepParts(
            (size.weights_read(shape) + size.keys_read(shape)) / rates.bytes_per_s,
            size.product_flops(shape) / rates.flops_per_s + size.attention_flops(shape) / rates.attention_flops_per_s,
            rates.layer_s * size.num_layers + rates.step_s + rates.row_s * shape.sampled,
        )


def rates_of(cost: Cost, size: ModelSize, sizes: EngineSizes, step_s: float, row_s: float) -> Rates:
    """The best rates that measured steps reach: bytes of decoding steps, and multiplications of steps with prompts,
    each divided by the seconds that the host does not take."""
    windows = size.windows
    batches = [batch for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if batch <= sizes.max_requests]
    lengths = [length for length in (16, 128, 1024, 4096) if length <= sizes.max_len] or [1]
    counts = {max(1, sizes.max_tokens_per_step // share) for share in (1, 2, 4)}
    decodes = [decode_shape(batch, length, windows) for batch, length in product(batches, lengths)]
    prompts = [prompt_shape(count, 0, windows) for count in counts]

    def best(amounts: list[tuple[float, StepShape]]) -> float:
        return max(amount / device_s(cost, shape, step_s, row_s) for amount, shape in amounts)

    bytes_per_s = best([(size.weights_read(shape) + size.keys_read(shape), shape) for shape in decodes])
    flops_per_s = best([(size.product_flops(shape) + size.attention_flops(shape), shape) for shape in prompts])
    return Rates(bytes_per_s, flops_per_s, flops_per_s, step_s, row_s)


def device_s(cost: Cost, shape: StepShape, step_s: float, row_s: float) -> float:
    """Seconds without the host's, at least a tenth of all."""
    seconds = cost.seconds(shape)
    return max(0.1 * seconds, seconds - step_s - row_s * shape.sampled)
