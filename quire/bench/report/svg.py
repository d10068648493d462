"""SVG elements as text, scales from values to pixels, and short numbers. All text is escaped here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

CHARACTER = 6.3  # pixels of a character of the text in a chart, on average


def element(tag: str, *children: str, **attributes: str | float | None) -> str:
    """`class_` is written as class, `text_anchor` as text-anchor. Attributes that are None are left out."""
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(coordinate(value), quote=True)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{written}>{''.join(children)}</{tag}>" if children else f"<{tag}{written}/>"


def coordinate(value: str | float) -> str:
    """A number with one decimal at most."""
    if isinstance(value, str):
        return value
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, words: str, style: str | None = None, anchor: str | None = None) -> str:
    return element("text", escape(words), x=x, y=y, class_=style, text_anchor=anchor)


def path(points: Iterable[tuple[float, float]], style: str) -> str:
    """A line through points in pixels."""
    return element("path", d="M" + "L".join(f"{coordinate(x)} {coordinate(y)}" for x, y in points), class_=style)


def text_width(words: str) -> float:
    return CHARACTER * len(words)


def short(value: float | None) -> str:
    """A number with three significant digits, such as 0.123, 4.56, 78.9, 1,230 or 45.6k."""
    if value is None:
        return "-"
    size = abs(value)
    for limit, divisor, unit in (
        (1e15, 1e15, "P"),
        (1e12, 1e12, "T"),
        (1e9, 1e9, "G"),
        (1e6, 1e6, "M"),
        (1e4, 1e3, "k"),
    ):
        if size >= limit:
            return f"{value / divisor:.3g}{unit}"
    return f"{round(value):,}" if size >= 1000 else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values from low to high onto pixels from start to end. Values outside are cut to the ends."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (self._position(each) for each in (self.low, self.high, value))
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return self.start + share * (self.end - self.start)

    def _position(self, value: float) -> float:
        return math.log(max(value, 1e-300)) if self.log else value

    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high)


def linear_scale(values: Sequence[float], start: float, end: float) -> Scale:
    """From zero to a round number that no value exceeds."""
    high = max((value for value in values if value > 0), default=1.0)
    step = linear_ticks(0.0, high)[1]
    return Scale(0.0, step * math.ceil(high / step - 1e-9), start, end)


def log_scale(values: Sequence[float], start: float, end: float) -> Scale:
    """From a round number below all positive values to one above them."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = round_down(min(positive)), round_up(max(positive))
    return Scale(low, high if high > low else 10 * low, start, end, log=True)


def best_scale(values: Sequence[float], start: float, end: float) -> Scale:
    """Logarithmic if the values differ by more than a factor of 30."""
    positive = [value for value in values if value > 0]
    is_wide = len(positive) == len(values) > 0 and max(positive) > 30 * min(positive)
    return (log_scale if is_wide else linear_scale)(values, start, end)


def round_down(value: float) -> float:
    """The largest of 1, 2 and 5 times a power of ten that is not above the value."""
    power = 10.0 ** math.floor(math.log10(value) + 1e-9)
    return max((factor * power for factor in (1, 2, 5) if factor * power <= value * (1 + 1e-9)), default=power)


def round_up(value: float) -> float:
    low = round_down(value)
    if low >= value * (1 - 1e-9):
        return low
    first = round(low / 10.0 ** math.floor(math.log10(low) + 1e-9))
    return low * (2.5 if first == 2 else 2)


def linear_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from `low` on, `most` of them or fewer."""
    step = round_up((high - low) / (most - 1)) if high > low else 1.0
    first = math.ceil(low / step - 1e-9)
    return [step * number for number in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Powers of ten, and 2 and 5 times them if there is room."""
    powers = range(math.floor(math.log10(low) + 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [factor * 10.0**power for power in powers for factor in factors]
        found = [tick for tick in found if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(found) <= most:
            return found
    return found[:: -(-len(found) // most)]
