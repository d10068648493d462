"""The document of a run as one SVG: prefill and decode of each engine in each cell, for each model. No dependencies.

A bar of quire is the mean of its runs. The line on it is their range.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from peers.report import Document, rate

COLOURS = ("#1b6ca8", "#e08e45", "#6a994e", "#a44a63", "#7a6fb0")
BAR, GAP, HEIGHT, LEFT, TOP = 26, 28, 180, 24, 64
FIGURES = (("prefill_tokens_per_s", "prefill, tokens/s"), ("decode_tokens_per_s", "decode, tokens/s"))
STYLE = "text { font: 11px sans-serif; fill: #333; } .title { font-size: 13px; font-weight: bold; }"


def draw(document: Document) -> str:
    engines = list(dict.fromkeys(result["engine"] for model in document["models"] for result in model["results"]))
    panels = [(model, *figure) for model in document["models"] for figure in FIGURES]
    group = BAR * len(engines) + GAP
    columns = max((len(model["labels"]) for model in document["models"]), default=1)
    width, height = max(LEFT + columns * group, 640), TOP + len(panels) * (HEIGHT + 72)
    shapes = [f'<rect width="{width}" height="{height}" fill="white"/>', *legend(engines)]
    for number, (model, figure, title) in enumerate(panels):
        shapes += panel(model, figure, title, engines, base=TOP + number * (HEIGHT + 72) + HEIGHT + 24)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *shapes, "</svg>\n"])


def legend(engines: list[str]) -> Iterator[str]:
    for number, engine in enumerate(engines):
        x = LEFT + 125 * number
        yield f'<rect x="{x}" y="16" width="12" height="12" fill="{COLOURS[number % len(COLOURS)]}"/>'
        yield text(x + 18, 26, engine)


def panel(model: Document, figure: str, title: str, engines: list[str], base: float) -> Iterator[str]:
    """Bars on the baseline `base`, one group for each cell, with a common scale."""
    cells = [[runs(model, figure, label, engine) for engine in engines] for label in model["labels"]]
    top = max((value for cell in cells for values in cell for value in values), default=1.0)
    scale = HEIGHT * 0.9 / top
    yield text(LEFT, base - HEIGHT - 8, f"{model['model']}: {title}", "title")
    for place, (label, cell) in enumerate(zip(model["labels"], cells, strict=True)):
        x = LEFT + place * (BAR * len(engines) + GAP)
        yield text(x, base + 16, label)
        for number, values in enumerate(cell):
            yield from bar(x + number * BAR, base, values, scale, COLOURS[number % len(COLOURS)])


def bar(x: float, base: float, values: list[float], scale: float, colour: str) -> Iterator[str]:
    if not values:
        yield text(x + BAR / 2, base - 4, "-", anchor="middle")
        return
    mean = sum(values) / len(values)
    height = mean * scale
    yield f'<rect x="{x}" y="{base - height:.1f}" width="{BAR - 3}" height="{height:.1f}" fill="{colour}"/>'
    if len(values) > 1:
        middle = x + (BAR - 3) / 2
        ends = f'y1="{base - max(values) * scale:.1f}" y2="{base - min(values) * scale:.1f}"'
        yield f'<line x1="{middle}" x2="{middle}" {ends} stroke="#111" stroke-width="1.5"/>'
    yield text(x + (BAR - 3) / 2, base - max(values) * scale - 4, f"{mean:.0f}", anchor="middle")


def runs(model: Document, figure: str, label: str, engine: str) -> list[float]:
    value = rate(figure, label)
    found = [value(result) for result in model["results"] if result["engine"] == engine]
    return [number for number in found if number is not None]


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'
