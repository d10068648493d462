"""Charts and tables of requests under load: latencies, tokens over time, requests over time, errors.

`bench serve` and `bench batching` have them in the same form: a summary, and a row for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from quire.bench.report.chart import Axis, Mark, Point, Series, Span, gantt, line_chart
from quire.bench.report.page import Figure, Table
from quire.bench.report.svg import short
from quire.bench.serve.metrics import percentile
from quire.bench.serve.report import LATENCIES, TAILS, counts, number

NUM_POINTS = 160  # of a distribution
NUM_BINS = 60  # of a run's time
PERCENTS = (50, 90, 99)
MAX_SPANS = 400  # requests in the Gantt charts of a section


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One run: its summary, and its requests if the document has them."""

    name: str
    summary: dict[str, Any]
    requests: Sequence[dict[str, Any]] = ()
    errors: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def answered(self) -> list[dict[str, Any]]:
        return [request for request in self.requests if request["error"] is None]

    def values(self, name: str) -> list[float]:
        """A latency of all requests that were answered, sorted. "itl_ms" has many values a request."""
        if name == "itl_ms":
            return sorted(gap for request in self.answered for gap in request["itl_ms"])
        return sorted(request[name] for request in self.answered if request[name] is not None)

    @property
    def duration_s(self) -> float:
        return max((ended_s(request) for request in self.requests), default=0.0)


def ended_s(request: dict[str, Any]) -> float:
    return float(request["sent_s"] + request["e2e_ms"] / 1e3)


def token_times(request: dict[str, Any]) -> Iterator[float]:
    """When chunks with text came, in seconds of the run."""
    if request["ttft_ms"] is not None:
        for ms in accumulate(request["itl_ms"], initial=request["ttft_ms"]):
            yield request["sent_s"] + ms / 1e3


def latency_figures(runs: Sequence[LoadRun], names: Sequence[str] = ("ttft_ms", "itl_ms")) -> Iterator[Figure]:
    """A distribution for each latency. Runs without requests are left out."""
    for name in names:
        series = [distribution(run, name, number) for number, run in enumerate(runs) if run.values(name)]
        if series:
            title = LATENCIES[name]
            series += limit_lines(runs, name.removesuffix("_ms"))
            share = Axis("share of all, %", ticks=(0, 0.25, 0.5, 0.75, 0.9, 1.0), show=percent, high=1.0)
            yield Figure(title, line_chart(title, series, Axis("ms", "best"), share), "The dots are p50, p90 and p99.")


def limit_lines(runs: Sequence[LoadRun], name: str) -> list[Series]:
    """The limits of --slo."""
    goodputs = [goodput for run in runs if (goodput := run.summary["goodput"])]
    limits = sorted({goodput["limits_ms"][name] for goodput in goodputs if name in goodput["limits_ms"]})
    return [Series(f"limit, {short(ms)} ms", [(ms, 0.0), (ms, 1.0)], colour=None, dashed=True) for ms in limits]


def distribution(run: LoadRun, name: str, colour: int) -> Series:
    """The share of values that are at most x."""
    values = run.values(name)
    marks = [
        Mark(percentile(values, p), p / 100, f"{run.name}\np{p} {short(percentile(values, p))} ms") for p in PERCENTS
    ]
    return Series(run.name, quantiles(values), marks, colour)


def quantiles(values: Sequence[float]) -> list[Point]:
    count = min(NUM_POINTS, len(values))
    shares = [number / max(1, count - 1) for number in range(count)]
    return [(percentile(values, 100 * share), share) for share in shares]


def percent(share: float) -> str:
    return f"{100 * share:g}"


def time_figures(runs: Sequence[LoadRun]) -> Iterator[Figure]:
    """Tokens a second and requests in flight, over the time of the runs."""
    with_rows = [(number, run) for number, run in enumerate(runs) if run.requests]
    longest_s = max((run.duration_s for _, run in with_rows), default=0.0)
    if not longest_s:
        return
    rates = [Series(run.name, token_rates(run, longest_s), (), number) for number, run in with_rows]
    title = "Output tokens a second, over time"
    yield Figure(title, line_chart(title, rates, Axis("seconds"), Axis("tokens/s")))
    open_requests = [Series(run.name, in_flight(run), (), number) for number, run in with_rows]
    title = "Requests in flight, over time"
    yield Figure(title, line_chart(title, open_requests, Axis("seconds"), Axis("requests")))


def token_rates(run: LoadRun, longest_s: float) -> list[Point]:
    """A step line over bins of equal length. A chunk counts as many tokens as its answer has on average."""
    width = longest_s / NUM_BINS
    bins = [0.0] * NUM_BINS
    for request in run.requests:
        times = list(token_times(request))
        for at_s in times:
            bins[min(NUM_BINS - 1, int(at_s / width))] += request["output_tokens"] / len(times)
    return [
        point
        for n, count in enumerate(bins)
        for point in ((n * width, count / width), ((n + 1) * width, count / width))
    ]


def in_flight(run: LoadRun) -> list[Point]:
    """A step line, thinned to a few hundred steps."""
    changes = sorted(moment for request in run.requests for moment in ((request["sent_s"], 1), (ended_s(request), -1)))
    points, num_open = [(0.0, 0.0)], 0
    every = max(1, len(changes) // (2 * NUM_POINTS))
    for index, (at_s, change) in enumerate(changes):
        before, num_open = num_open, num_open + change
        if index % every == 0 or index == len(changes) - 1:
            points += [(at_s, float(before)), (at_s, float(num_open))]
    return points


def gantt_figures(
    runs: Sequence[LoadRun], title: Callable[[LoadRun], str], duration_s: float | None
) -> Iterator[Figure]:
    """Every request from sending to its end, a chart for each run. They share MAX_SPANS."""
    with_rows = [run for run in runs if run.requests]
    for run in with_rows:
        first = sorted(run.requests, key=lambda request: request["sent_s"])[: max(1, MAX_SPANS // len(with_rows))]
        note = f"The first {len(first)} of {len(run.requests):,} requests." if len(first) < len(run.requests) else ""
        yield Figure(title(run), gantt(title(run), list(map(make_span, first)), duration_s), note, wide=True)


def make_span(request: dict[str, Any]) -> Span:
    first_s = None if request["ttft_ms"] is None else request["sent_s"] + request["ttft_ms"] / 1e3
    lines = [
        f"request {request['number']}",
        f"{tokens(request['prompt_tokens'])} in ({tokens(request['cached_tokens'])} cached), "
        f"{request['output_tokens']:,} out",
        f"TTFT {short(request['ttft_ms'])} ms, E2E {short(request['e2e_ms'])} ms",
        *([f"failed: {request['error']}"] if request["error"] else []),
    ]
    return Span(request["sent_s"], first_s, ended_s(request), "\n".join(lines), request["error"] is not None)


def tokens(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"


def load_tables(runs: Sequence[LoadRun]) -> Iterator[Table]:
    """Counts, latencies and errors."""
    columns = [dict(counts(run.summary)) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    yield Table(
        "Totals",
        ["", *(run.name for run in runs)],
        [[name, *(column.get(name, "-") for column in columns)] for name in names],
    )
    several = len(runs) > 1
    rows = [
        [f"{run.name}: {text}" if several else text, *(number(tails.get(tail)) for tail in TAILS)]
        for key, text in LATENCIES.items()
        for run in runs
        for tails in [run.summary[key] or {}]
    ]
    yield Table("Latency, ms", ["", *TAILS], rows)
    failed = [
        [f"{run.name}: {kind}" if several else kind, f"{error['count']:,}", str(error["first"])[:200]]
        for run in runs
        for kind, error in run.errors.items()
    ]
    if failed:
        yield Table("Errors", ["kind", "requests", "the first"], failed)
