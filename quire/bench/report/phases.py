"""The section of `bench phases`: the roofline, prefill and decode over batches and lengths, measured and predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from quire.bench.report.chart import WIDE, Axis, Mark, Point, Series, line_chart
from quire.bench.report.page import Figure, Section, Table
from quire.bench.report.result import Result, labelled
from quire.bench.report.svg import short
from quire.bench.serve.report import number

MAX_LINES = 5
DOTS = "Dots are measured, dashed is the fitted cost."
Row = dict[str, Any]


def phases(results: Sequence[Result]) -> Iterator[Section]:
    """A section for each result: their scenarios need not be the same."""
    for result in results:
        document = result.document
        rows, limits, error = document["rows"], document["limits"], document["error"]
        texts = [
            f"Limits of this machine: memory is read at {number(limits['read_gb_per_s'])} GB/s ({limits['read_by']}); "
            f"products do {short(limits['gflop_per_s'])} GFLOP/s ({limits['products_by']}). Both are the best of many "
            "short runs.",
            "A step counts its multiplications and additions, and the bytes that it has to read: weights once, and the "
            "keys and values of decoding rows. What caches hold is counted too, so a small model may exceed the limit.",
            f"Of steps that were not fitted the predicted time is {100 * error['median']:.1f}% off in the median and "
            f"{100 * error['p95']:.1f}% at the 95th percentile.",
        ]
        figures = [roofline(rows, limits), *speed_figures(rows), accuracy(rows)]
        yield Section(labelled(results, "Prefill and decode", result.name), texts, figures, [table(rows)])


def roofline(rows: Sequence[Row], limits: dict[str, Any]) -> Figure:
    """Multiplications a second over multiplications a byte, below what memory and products allow."""
    dots = [work_series("prefill", rows, 0), work_series("decode", rows, 1)]
    fitted = [predicted_series("prefill", rows, 0), predicted_series("decode", rows, 1)]
    xs = [point[0] for series in dots for point in series.points]
    series = [limit_series(xs, limits), *fitted, *dots]
    x, y = Axis("FLOP a byte that is read", "log"), Axis("GFLOP/s", "log")
    title = "Roofline"
    note = "A dot is a batch size and a prompt length. Dashed: the fitted cost of steps with one length over batches."
    return Figure(title, line_chart(title, [each for each in series if each.points], x, y, width=WIDE), note, wide=True)


def limit_series(xs: Sequence[float], limits: dict[str, Any]) -> Series:
    """From the left: memory's limit rises to the ridge, then products' limit is flat."""
    read, peak = limits["read_gb_per_s"], limits["gflop_per_s"]
    ridge = peak / read
    low, high = min([*xs, ridge / 2]), max([*xs, 2 * ridge])
    return Series("limits: memory, products", [(low, low * read), (ridge, peak), (high, peak)], colour=None)


def work_series(phase: str, rows: Sequence[Row], colour: int) -> Series:
    marks = []
    for row in rows:
        if work := row[f"{phase}_work"]:
            x, y = position(work, work["seconds"])
            name = describe(phase, row)
            marks.append(
                Mark(x, y, f"{name}\n{short(y)} GFLOP/s, {short(x)} FLOP a byte\n{short(1e3 * work['seconds'])} ms")
            )
    return Series(phase, (), marks, colour)


def describe(phase: str, row: Row) -> str:
    return f"{phase}, batch {row['batch']}, prompts of {row['prompt_tokens']:,}"


def predicted_series(phase: str, rows: Sequence[Row], colour: int) -> Series:
    """The steps of one length over batches, at the seconds that the cost predicts."""
    key = "predicted_ms" if phase == "decode" else "predicted_prefill_ms"
    known = [row for row in rows if row[f"{phase}_work"] and row[key] is not None]
    length = most_frequent([row["prompt_tokens"] for row in known])
    points = [position(row[f"{phase}_work"], row[key] / 1e3) for row in known if row["prompt_tokens"] == length]
    return Series("", sorted(points), colour=colour, dashed=True)


def position(work: dict[str, float], seconds: float) -> Point:
    return work["flop"] / work["bytes"], work["flop"] / seconds / 1e9


def most_frequent(values: Sequence[int]) -> int:
    """The smallest of those that occur most often."""
    return min(values, key=lambda value: (-values.count(value), value), default=0)


def speed_figures(rows: Sequence[Row]) -> Iterator[Figure]:
    prompts, batches = Axis("tokens in each prompt", "log"), Axis("batch", "log")
    prefill = [
        (row["batch"], row["prompt_tokens"], row["prefill_tokens_per_s"], row["predicted_prefill_ms"]) for row in rows
    ]
    lines = [
        curve(f"batch {batch}", [(x, y, prefill_rate(batch, x, ms)) for b, x, y, ms in prefill if b == batch], number)
        for number, batch in enumerate(spread(sorted({row["batch"] for row in rows})))
    ]
    title = "Prefill"
    yield Figure(
        title,
        line_chart(title, flat(lines), prompts, Axis("tokens/s")),
        "Dots are measured, dashed is the fitted cost.",
    )
    lengths = spread(sorted({row["prompt_tokens"] for row in rows}))
    decode = [
        (row["prompt_tokens"], row["batch"], row["decode_step_ms"], row["predicted_ms"])
        for row in rows
        if row["decode_step_ms"] is not None
    ]
    lines = [
        curve(f"prompts of {length:,}", [(x, y, ms) for n, x, y, ms in decode if n == length], number)
        for number, length in enumerate(lengths)
    ]
    yield Figure("A step of decoding", line_chart("A step of decoding", flat(lines), batches, Axis("ms")), DOTS)
    lines = [
        curve(
            f"prompts of {length:,}", [(x, 1e3 * x / y, 1e3 * x / ms) for n, x, y, ms in decode if n == length], number
        )
        for number, length in enumerate(lengths)
    ]
    yield Figure("Decode", line_chart("Decode", flat(lines), batches, Axis("tokens/s, all requests together")), DOTS)


def prefill_rate(batch: int, prompt_tokens: int, ms: float | None) -> float | None:
    return None if not ms else 1e3 * batch * prompt_tokens / ms


def spread(values: Sequence[int]) -> list[int]:
    """At most MAX_LINES of them, from the first to the last."""
    count = min(MAX_LINES, len(values))
    return [values[round(index * (len(values) - 1) / max(1, count - 1))] for index in range(count)]


def curve(name: str, points: Sequence[tuple[float, float | None, float | None]], colour: int) -> list[Series]:
    """Measured dots and a predicted line. Each point is (x, measured, predicted)."""
    measured = [(x, y) for x, y, _ in points if y is not None]
    marks = [Mark(x, y, f"{name} at {x:,}: {short(y)}") for x, y in measured]
    predicted = [(x, y) for x, _, y in points if y is not None]
    return [Series("", predicted, colour=colour, dashed=True), Series(name, (), marks, colour)] if marks else []


def flat(lines: Sequence[Sequence[Series]]) -> list[Series]:
    return [series for line in lines for series in line if series.points]


def accuracy(rows: Sequence[Row]) -> Figure:
    """Each scenario's measured time over its predicted one. On the line they are equal."""
    pairs = {
        "prefill": [(row["predicted_prefill_ms"], row["prefill_ms"], row) for row in rows],
        "decode": [(row["predicted_ms"], row["decode_step_ms"], row) for row in rows],
    }
    dots = []
    for colour, (phase, values) in enumerate(pairs.items()):
        marks = [
            Mark(
                x,
                y,
                f"{describe(phase, row)}\n{short(y)} ms, predicted {short(x)}",
            )
            for x, y, row in values
            if x is not None and y is not None
        ]
        dots.append(Series(phase, (), marks, colour))
    every = [value for series in dots for point in series.points for value in point]
    equal = Series("equal", [(min(every), min(every)), (max(every), max(every))], colour=None) if every else Series("")
    title = "Measured and predicted"
    series = [each for each in (equal, *dots) if each.points]
    return Figure(title, line_chart(title, series, Axis("predicted ms", "log"), Axis("measured ms", "log")))


def table(rows: Sequence[Row]) -> Table:
    columns = ("prefill_tokens_per_s", "prefill_ms", "predicted_prefill_ms", "decode_step_ms", "predicted_ms")
    header = ["batch x prompt", "prefill tokens/s", "prefill ms", "predicted", "decode step ms", "predicted"]
    cells = [[f"{row['batch']} x {row['prompt_tokens']:,}", *(number(row[name]) for name in columns)] for row in rows]
    return Table("", header, cells)
