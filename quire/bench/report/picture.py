"""Charts below each other as one SVG file, for a README. It has its own style and follows the scheme of the reader."""

from __future__ import annotations

import re
from collections.abc import Sequence

from quire.bench.report.page import read
from quire.bench.report.svg import element, text

PADDING, HEADING = 16.0, 22.0
VIEW_BOX = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')


def picture(charts: Sequence[tuple[str, str]]) -> str:
    """Each chart with its title above it."""
    shapes: list[str] = []
    width, y = 0.0, PADDING
    for title, svg in charts:
        found = VIEW_BOX.search(svg)
        assert found, "a chart has a view box"
        chart_width, height = map(float, found.groups())
        shapes.append(text(PADDING, y + 12, title, "title"))
        shapes.append(
            svg.replace(
                "<svg ", f'<svg x="{PADDING:g}" y="{y + HEADING:g}" width="{chart_width:g}" height="{height:g}" ', 1
            )
        )
        width, y = max(width, chart_width + 2 * PADDING), y + HEADING + height + PADDING
    style = read("chart.css") + ".title { font-size: 14px; font-weight: 600; } .ground { fill: var(--card); }"
    return (
        element(
            "svg",
            f"\n<style>{style}</style>\n",
            element("rect", width=width, height=y, rx=8, class_="ground"),
            "\n".join(["", *shapes, ""]),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {width:g} {y:g}",
            width=width,
            height=y,
            class_="chart",
        )
        + "\n"
    )
