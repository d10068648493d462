"""Draws the tables of prefill and decode of a section of BENCHMARKS.md: the plot of the README.

    python benchmarks/plot_tables.py "The default model, on an AMD EPYC (Zen 5)" > docs/peers.svg

The numbers are those of the tables. `cpu_peers.py --plot` draws a run itself.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from peers.plot import CELLS

from quire.bench.report.chart import WIDE, Bar, bar_chart
from quire.bench.report.picture import picture

BENCHMARKS = Path(__file__).parents[1] / "BENCHMARKS.md"
NUMBER = re.compile(r"[\d,.]+")
OWN_RANGE = re.compile(r"\(([\d,.]+) to ([\d,.]+)\)")


def tables(section: str) -> dict[str, list[list[str]]]:
    """The rows of each table of prefill or decode, by its title; the header is the first row."""
    text = BENCHMARKS.read_text(encoding="utf-8")
    heading = f"### {section}\n"
    if heading not in text:
        sys.exit(f"BENCHMARKS.md has no section {section!r}")
    body = text.split(heading)[1].split("\n### ")[0]
    found = {}
    for block in re.findall(r"(?:^\|.*\n)+", body, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        if rows[0][0] in ("prefill, tokens/s", "decode, tokens/s"):
            found[rows[0][0]] = [rows[0], *(row for row in rows[2:] if not row[0].startswith("**"))]
    return found


def number(text: str) -> float:
    return float(text.replace(",", ""))


def make_bar(row: list[str]) -> Bar:
    """A row of a table: the engine, its weights, and a cell for each column."""
    cells = row[2:]
    values = [number(found[0]) if (found := NUMBER.match(cell)) else None for cell in cells]
    ranges = [(number(found[1]), number(found[2])) if (found := OWN_RANGE.search(cell)) else None for cell in cells]
    return Bar(row[0], values, ranges)


def draw(section: str) -> str:
    charts = []
    for title, (header, *rows) in tables(section).items():
        name = title.split(",")[0].capitalize()
        charts.append(
            (name, bar_chart(name, header[2:], [make_bar(row) for row in rows], CELLS, "tokens/s", width=WIDE))
        )
    return picture(charts)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(draw(sys.argv[1]), end="")
