"""Charts as SVG: lines, dots, grouped bars, and requests over time. Colours come from the style sheet of the page.

A mark with a tip shows it under the pointer. Charts are drawn in pixels of a fixed width, and the page scales them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from quire.bench.report.svg import Scale, best_scale, element, linear_scale, log_scale, path, short, text, text_width

WIDTH, WIDE, HEIGHT = 440, 900, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 18, 8, 40
LEGEND = 20.0  # height of a line above the area
NUM_COLOURS = 8
LANE = 9  # height of a request in a Gantt chart

Point = tuple[float, float]
ScaleKind = Literal["linear", "log", "best"]
SCALES: dict[ScaleKind, Callable[[Sequence[float], float, float], Scale]] = {
    "linear": linear_scale,
    "log": log_scale,
    "best": best_scale,
}


@dataclass(frozen=True, slots=True)
class Mark:
    """A dot with a text under the pointer, and one beside it."""

    x: float
    y: float
    tip: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """A line, dots, or both. `colour` is an index; None is the colour of limits."""

    name: str
    line: Sequence[Point] = ()
    marks: Sequence[Mark] = ()
    colour: int | None = 0
    dashed: bool = False

    @property
    def style(self) -> str:
        return colour_class(self.colour) + (" dashed" if self.dashed else "")

    @property
    def entry(self) -> Entry:
        return Entry(self.name, self.style, is_line=bool(self.line))

    @property
    def points(self) -> list[Point]:
        return [*self.line, *((mark.x, mark.y) for mark in self.marks)]


@dataclass(frozen=True, slots=True)
class Axis:
    label: str
    kind: ScaleKind = "linear"
    ticks: Sequence[float] | None = None
    show: Callable[[float], str] = short
    low: float | None = None
    high: float | None = None

    def scale(self, values: Sequence[float], start: float, end: float) -> Scale:
        bounds = [bound for bound in (self.low, self.high) if bound is not None]
        return SCALES[self.kind]([*values, *bounds], start, end)


@dataclass(frozen=True, slots=True)
class Bar:
    """One series of bars, a value for each group. None is a missing bar. A range is a line on its bar."""

    name: str
    values: Sequence[float | None]
    ranges: Sequence[tuple[float, float] | None] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """A request in a Gantt chart: it was sent, its first token came, it ended. Seconds."""

    sent_s: float
    first_s: float | None
    ended_s: float
    tip: str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """A name in a legend, with the class of its mark."""

    name: str
    style: str
    is_line: bool = False


@dataclass(slots=True)
class Canvas:
    """An area for marks, with what has been drawn."""

    width: float
    height: float
    top: float = TOP
    left: float = LEFT
    shapes: list[str] = field(default_factory=list)

    @property
    def right(self) -> float:
        return self.width - RIGHT

    @property
    def base(self) -> float:
        return self.height - BOTTOM

    def svg(self, label: str) -> str:
        return element(
            "svg",
            *self.shapes,
            viewBox=f"0 0 {self.width:g} {self.height:g}",
            role="img",
            aria_label=label,
            class_="chart wide" if self.width > WIDTH else "chart",
        )


def colour_class(colour: int | None) -> str:
    return "limit" if colour is None else f"c{colour % NUM_COLOURS}"


def line_chart(title: str, series: Sequence[Series], x: Axis, y: Axis, *, width: float = WIDTH) -> str:
    """Lines and dots over two axes."""
    canvas = Canvas(width, HEIGHT)
    draw_header(canvas, y.label, [each.entry for each in series if each.name])
    points = [point for each in series for point in each.points]
    x_scale = x.scale([point[0] for point in points], canvas.left, canvas.right)
    y_scale = y.scale([point[1] for point in points], canvas.base, canvas.top)
    draw_y_axis(canvas, y, y_scale)
    draw_x_axis(canvas, x, x_scale)
    for each in series:
        if each.line:
            canvas.shapes.append(path([(x_scale(a), y_scale(b)) for a, b in each.line], f"line {each.style}"))
    for each in series:
        canvas.shapes += draw_marks(canvas, each, x_scale, y_scale)
    return canvas.svg(title)


def draw_marks(canvas: Canvas, series: Series, x_scale: Scale, y_scale: Scale) -> Iterator[str]:
    for mark in series.marks:
        x, y = x_scale(mark.x), y_scale(mark.y)
        yield element("circle", cx=x, cy=y, r=3.5, class_=f"dot {series.style}", data_tip=mark.tip)
        if mark.label:
            is_right = x + 8 + text_width(mark.label) > canvas.right
            yield text(x - 7 if is_right else x + 7, y + 4, mark.label, "value", "end" if is_right else None)


def draw_header(canvas: Canvas, y_label: str, entries: Sequence[Entry]) -> None:
    """The legend, if there are several entries, and below it what the y axis shows."""
    height = draw_legend(canvas, entries) if len(entries) > 1 else 0.0
    if y_label:
        height += LEGEND
        canvas.shapes.append(text(2, height - 4, y_label, "label"))
    grow(canvas, height)


def draw_legend(canvas: Canvas, entries: Sequence[Entry]) -> float:
    """Names with their colours. Returns the height that they take."""
    x, y = 2.0, LEGEND - 4.0
    for entry in entries:
        name = shorten(entry.name, 44)
        if x > 2 and x + 19 + text_width(name) > canvas.right:
            x, y = 2.0, y + LEGEND
        if entry.is_line:
            canvas.shapes.append(path([(x, y - 4), (x + 14, y - 4)], f"line {entry.style}"))
        else:
            canvas.shapes.append(element("circle", cx=x + 7, cy=y - 4, r=4, class_=f"dot {entry.style}"))
        canvas.shapes.append(text(x + 19, y, name))
        x += 19 + text_width(name) + 16
    return y + 4


def grow(canvas: Canvas, pixels: float) -> None:
    """Room above the area."""
    canvas.top += pixels
    canvas.height += pixels


def shorten(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def draw_y_axis(canvas: Canvas, axis: Axis, scale: Scale) -> None:
    """Lines across the area, each with its value."""
    for value in axis.ticks if axis.ticks is not None else scale.ticks():
        y = scale(value)
        canvas.shapes.append(path([(canvas.left, y), (canvas.right, y)], "grid"))
        canvas.shapes.append(text(canvas.left - 6, y + 4, axis.show(value), "tick", "end"))


def draw_x_axis(canvas: Canvas, axis: Axis, scale: Scale) -> None:
    canvas.shapes.append(path([(canvas.left, canvas.base), (canvas.right, canvas.base)], "axis"))
    for value in axis.ticks if axis.ticks is not None else scale.ticks():
        x = scale(value)
        canvas.shapes.append(path([(x, canvas.base), (x, canvas.base + 4)], "axis"))
        canvas.shapes.append(text(x, canvas.base + 17, axis.show(value), "tick", "middle"))
    canvas.shapes.append(text(canvas.right, canvas.height - 6, axis.label, "label", "end"))


def bar_chart(
    title: str, groups: Sequence[str], bars: Sequence[Bar], x_label: str, y_label: str, *, width: float = WIDTH
) -> str:
    """Groups of bars, one bar of each series in a group."""
    canvas = Canvas(width, HEIGHT)
    draw_header(canvas, y_label, [Entry(bar.name, colour_class(number)) for number, bar in enumerate(bars)])
    values = [value for bar in bars for value in bar.values if value is not None]
    scale = linear_scale(values, canvas.base, canvas.top + 14)
    draw_y_axis(canvas, Axis(""), scale)
    group_width = (canvas.right - canvas.left) / max(1, len(groups))
    bar_width = min(44.0, 0.76 * group_width / max(1, len(bars)))
    for place, group in enumerate(groups):
        middle = canvas.left + (place + 0.5) * group_width
        canvas.shapes.append(text(middle, canvas.base + 17, group, "tick", "middle"))
        for number, bar in enumerate(bars):
            value, x = bar.values[place], middle + (number - len(bars) / 2) * bar_width
            tip = ", ".join(filter(None, (f"{short(value)} {y_label}", bar.name, f"{x_label} {group}")))
            canvas.shapes += draw_bar(canvas, value, x, bar_width, scale, number, tip)
            if bar.ranges and (ends := bar.ranges[place]):
                line = [(x + bar_width / 2, scale(end)) for end in ends]
                canvas.shapes.append(path(line, "axis"))
    canvas.shapes.append(path([(canvas.left, canvas.base), (canvas.right, canvas.base)], "axis"))
    canvas.shapes.append(text(canvas.right, canvas.height - 6, x_label, "label", "end"))
    return canvas.svg(title)


def draw_bar(
    canvas: Canvas, value: float | None, x: float, width: float, scale: Scale, colour: int, tip: str
) -> Iterator[str]:
    """A bar with its value above it, if there is room."""
    middle = x + width / 2
    if value is None:
        yield text(middle, canvas.base - 4, "-", "value", "middle")
        return
    y = scale(value)
    yield element(
        "rect", x=x + 1, y=y, width=max(1.0, width - 2), height=max(0.5, canvas.base - y),
        class_=f"bar {colour_class(colour)}", data_tip=tip,
    )  # fmt: skip
    if text_width(short(value)) <= width + 10:
        yield text(middle, y - 4, short(value), "value", "middle")


def gantt(title: str, spans: Sequence[Span], duration_s: float | None = None) -> str:
    """Requests in the order of sending, the time to the first token light and the rest full."""
    spans = sorted(spans, key=lambda span: span.sent_s)
    lane = max(2.0, min(LANE, 520 / max(1, len(spans))))
    canvas = Canvas(WIDE, TOP + lane * len(spans) + BOTTOM + 4)
    styles = {"until the first token": "c0 faint", "answer": "c0"}
    if any(span.failed for span in spans):
        styles["failed"] = "bad"
    draw_header(canvas, "", [Entry(name, style) for name, style in styles.items()])
    longest = max((span.ended_s for span in spans), default=1.0) if duration_s is None else duration_s
    scale = Scale(0.0, max(longest, 1e-9), canvas.left, canvas.right)
    for tick in scale.ticks():
        canvas.shapes.append(path([(scale(tick), canvas.top), (scale(tick), canvas.base)], "grid"))
    for number, span in enumerate(spans):
        canvas.shapes += draw_span(span, canvas.top + number * lane, lane, scale)
    draw_x_axis(canvas, Axis("seconds"), scale)
    canvas.shapes.append(text(canvas.left - 6, canvas.top + 8, "first", "tick", "end"))
    canvas.shapes.append(text(canvas.left - 6, canvas.base - 2, "last", "tick", "end"))
    return canvas.svg(title)


def draw_span(span: Span, y: float, lane: float, scale: Scale) -> Iterator[str]:
    """Bars of a request from its sending on."""
    first_s = span.ended_s if span.first_s is None else span.first_s
    if span.failed:
        parts = [("bad", span.sent_s, span.ended_s)]
    else:
        parts = [("c0 faint", span.sent_s, first_s), ("c0", first_s, span.ended_s)]
    for style, begin_s, end_s in parts:
        x, least = scale(begin_s), 3.0 if span.failed else 0.5  # a request may fail at once
        yield element(
            "rect", x=x, y=y, width=max(least, scale(end_s) - x), height=lane - (2 if lane > 5 else 0.4),
            class_=f"bar {style}", data_tip=span.tip,
        )  # fmt: skip
