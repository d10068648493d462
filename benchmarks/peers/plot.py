"""The document of a run as one SVG: prefill and decode of each engine in each cell, for each model.

A bar of quire is the mean of its runs. The line on it is their range.
"""

from __future__ import annotations

from collections.abc import Iterator

from peers.report import Document, rate
from quire.bench.report.chart import WIDE, Bar, bar_chart
from quire.bench.report.picture import picture

FIGURES = {"prefill_tokens_per_s": "prefill", "decode_tokens_per_s": "decode"}
CELLS = "batch x prompt tokens"


def draw(document: Document) -> str:
    return picture([chart for model in document["models"] for chart in charts(model)])


def charts(model: Document) -> Iterator[tuple[str, str]]:
    engines = list(dict.fromkeys(result["engine"] for result in model["results"]))
    for figure, name in FIGURES.items():
        bars = [
            make_bar(engine, [runs(model, figure, label, engine) for label in model["labels"]]) for engine in engines
        ]
        title = f"{model['model']}: {name}"
        yield title, bar_chart(title, model["labels"], bars, CELLS, "tokens/s", width=WIDE)


def make_bar(engine: str, cells: list[list[float]]) -> Bar:
    """The mean of the runs of each cell, and their range if there are several."""
    means = [sum(values) / len(values) if values else None for values in cells]
    return Bar(engine, means, [(min(values), max(values)) if len(values) > 1 else None for values in cells])


def runs(model: Document, figure: str, label: str, engine: str) -> list[float]:
    value = rate(figure, label)
    found = [value(result) for result in model["results"] if result["engine"] == engine]
    return [number for number in found if number is not None]
