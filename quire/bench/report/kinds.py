"""The sections of a report: one function for each kind of measurement. Several results of a kind are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from quire.bench.report.chart import Axis, Bar, Mark, Series, bar_chart, line_chart
from quire.bench.report.load import (
    LoadRun,
    gantt_figures,
    latency_figures,
    load_tables,
    percent,
    time_figures,
)
from quire.bench.report.page import Figure, Section, Table
from quire.bench.report.result import Result, labelled
from quire.bench.report.svg import short
from quire.bench.serve.report import notes, number

OFFLINE = {
    "prefill_tokens_per_s": ("Prefill", "tokens/s"),
    "decode_tokens_per_s": ("Decode", "tokens/s"),
    "ttft_ms": ("Time to first token of the whole batch", "ms"),
    "tpot_ms": ("Time per token of one request", "ms"),
}


def offline(results: Sequence[Result]) -> Iterator[Section]:
    batches = sorted({row["batch"] for result in results for row in result.document["rows"]})
    figures = [
        Figure(
            title, bar_chart(title, list(map(str, batches)), bars_by(results, "batch", batches, figure), "batch", unit)
        )
        for figure, (title, unit) in OFFLINE.items()
    ]
    first = results[0].document["rows"][0]
    note = (
        f"Prompts of {first['prompt_tokens']:,} random tokens, {first['output_tokens']:,} new ones, greedy, all at "
        "once. Prefill is timed apart from decode; decode is timed while the whole batch decodes."
    )
    yield Section("Speed of the engine alone", [note], figures, [offline_table(results)])


def bars_by(results: Sequence[Result], key: str, groups: Sequence[Any], figure: str) -> list[Bar]:
    """A series of bars for each result. A result without a group has no bar there."""
    found = []
    for result in results:
        values = {row[key]: row[figure] for row in result.document["rows"]}
        found.append(Bar(result.name if len(results) > 1 else "", [values.get(group) for group in groups]))
    return found


def offline_table(results: Sequence[Result]) -> Table:
    names = [*OFFLINE, "total_s"]
    rows = [
        [labelled(results, str(row["batch"]), result.name), *(number(row[name]) for name in names)]
        for result in results
        for row in result.document["rows"]
    ]
    header = ["batch", "prefill tokens/s", "decode tokens/s", "TTFT ms", "TPOT ms", "total s"]
    return Table("", header, rows)


def serve(results: Sequence[Result]) -> Iterator[Section]:
    runs = [load_run(result.name, result.document) for result in results]
    missing = [run.name for run in runs if not run.requests]
    texts = [labelled(results, text, result.name) for result in results for text in describe_load(result.document)]
    if missing:
        texts.append(f"Without rows of requests (--json-requests), so without distributions: {', '.join(missing)}.")
    figures = [*latency_figures(runs), *time_figures(runs)]
    figures += gantt_figures(runs, lambda run: labelled(results, "Requests", run.name), None)
    yield Section("A server under load", texts, figures, list(load_tables(runs)))


def simulate(results: Sequence[Result]) -> Iterator[Section]:
    """Simulated runs, and where a run was also measured, both."""
    runs = [run for result in results for run in simulated_runs(results, result)]
    longest_s = max(run.duration_s for run in runs)
    error = results[0].document["step_error"]
    text = (
        f"The scheduler ran on a virtual clock. Costs of steps are {100 * error['median']:.1f}% off in the median and "
        f"{100 * error['p95']:.1f}% at the 95th percentile of steps that were not fitted."
    )
    figures = [
        *latency_figures(runs),
        *time_figures(runs),
        *gantt_figures(runs, lambda run: run.name.capitalize(), longest_s),
    ]
    tables = [*load_tables(runs), *(comparison(results, each) for each in results if "comparison" in each.document)]
    yield Section("A simulated load", [text], figures, tables)


def simulated_runs(results: Sequence[Result], result: Result) -> Iterator[LoadRun]:
    document = result.document
    yield load_run(labelled(results, "simulated", result.name), document)
    if measured := document.get("measured"):
        name = labelled(results, "measured", result.name)
        yield load_run(name, {**measured, "requests": document.get("measured_requests", ())})


def comparison(results: Sequence[Result], result: Result) -> Table:
    rows = [
        [
            row["figure"],
            number(row["simulated"]),
            number(row["measured"]),
            "-" if row["error"] is None else f"{100 * row['error']:+.1f}%",
        ]
        for row in result.document["comparison"]
    ]
    return Table(labelled(results, "Simulated and measured", result.name), ["", "simulated", "measured", "error"], rows)


def describe_load(document: dict[str, Any]) -> Iterator[str]:
    yield f"Load: {document['load']}."
    yield from notes(document)


def load_run(name: str, document: dict[str, Any]) -> LoadRun:
    return LoadRun(name, document["summary"], document.get("requests", ()), document["errors"])


def batching(results: Sequence[Result]) -> Iterator[Section]:
    for result in results:
        document = result.document
        load, runs = document["load"], [load_run(run["batching"], run) for run in document["runs"]]
        duration_s = max(run.duration_s for run in runs)
        texts = [
            f"{load['num_requests']:,} requests, {load['rate']:g} a second, prompts of up to {load['prompt_tokens']:,} "
            f"tokens and answers of up to {load['output_tokens']:,}, at most {document['batch_size']} at once.",
            "Continuous batching admits a request at any step. Static and dynamic batching admit none until the whole "
            "batch has ended; dynamic batching waits for a full batch first, for a limited time.",
        ]
        if document["different"]:
            texts.append(f"{document['different']} answers differ: with these kernels rounding depends on the batch.")
        figures = [*summary_bars(runs), *latency_figures(runs, ("ttft_ms",))]
        figures += gantt_figures(runs, lambda run: f"{run.name.capitalize()} batching", duration_s)
        yield Section(labelled(results, "Batching", result.name), texts, figures, list(load_tables(runs)))


def summary_bars(runs: Sequence[LoadRun]) -> Iterator[Figure]:
    """Throughput and tails of latencies, a group for each run."""
    names = [run.name for run in runs]
    text = "Output tokens a second"
    rates = [run.summary["output_tokens_per_s"] for run in runs]
    yield Figure(text, bar_chart(text, names, [Bar("", rates)], "", "tokens/s"))
    for key, text in (("ttft_ms", "Time to first token"), ("tpot_ms", "Time per token")):
        bars = [Bar(tail, [(run.summary[key] or {}).get(tail) for run in runs]) for tail in ("p50", "p99")]
        yield Figure(text, bar_chart(text, names, bars, "", "ms"))


def speculation(results: Sequence[Result]) -> Iterator[Section]:
    for result in results:
        document, rows = result.document, result.document["rows"]
        kinds = [row["kind"] for row in rows]
        speeds = [
            Bar("without", [row["plain_tokens_per_s"] for row in rows]),
            Bar("with speculation", [row["tokens_per_s"] for row in rows]),
        ]
        accepted = [row["accepted"] / row["drafted"] if row["drafted"] else None for row in rows]
        figures = [
            bars("Speed of decoding", kinds, speeds, "tokens/s"),
            bars("Times as fast", kinds, [Bar("", [row["speedup"] for row in rows])], "times"),
            bars("Tokens of a request in a step", kinds, [Bar("", [row["tokens_per_step"] for row in rows])], "tokens"),
            bars("Drafts that were right", kinds, [Bar("", [None if a is None else 100 * a for a in accepted])], "%"),
        ]
        header = [
            "prompts",
            "number",
            "plain tokens/s",
            "tokens/s",
            "times",
            "worst prompt",
            "tokens a step",
            "drafted",
            "accepted",
        ]
        cells = [speculation_cells(row) for row in rows]
        text = (
            f"--speculate {document['speculate']}, batch {document['batch']}, temperature {document['temperature']:g}."
        )
        if different := rows[-1]["different"]:
            text += f" {different} answers differ: with these kernels rounding depends on the tokens of a step."
        yield Section(labelled(results, "Speculation", result.name), [text], figures, [Table("", header, cells)])


def bars(name: str, groups: Sequence[str], series: Sequence[Bar], unit: str) -> Figure:
    return Figure(name, bar_chart(name, groups, series, "", unit))


def speculation_cells(row: dict[str, Any]) -> list[str]:
    speeds = (row[name] for name in ("plain_tokens_per_s", "tokens_per_s", "speedup", "worst", "tokens_per_step"))
    return [
        row["kind"], f"{row['num_prompts']:,}", *map(number, speeds), f"{row['drafted']:,}", f"{row['accepted']:,}"
    ]  # fmt: skip


def prefix(results: Sequence[Result]) -> Iterator[Section]:
    for result in results:
        document, load = result.document, result.document["load"]
        text = (
            f"Prompts of {load['prompt_tokens']:,} random tokens, {load['output_tokens']:,} new ones, "
            f"{load['concurrency']} requests at once. Each load runs with the prefix cache and without it, on the same "
            f"engine; figures are medians of {load['repeats']}."
        )
        shared = [(100 * row["share"], row) for row in document["shared"]]
        turns = [(float(row["turn"]), row) for row in document["turns"]]
        yield Section(
            labelled(results, "Prompts that begin alike", result.name),
            [text],
            list(prefix_figures(shared, "shared by all prompts, %", None)),
            [prefix_table("shared", [(f"{x:g}%", row) for x, row in shared])],
        )
        yield Section(
            labelled(results, "Conversations", result.name),
            [f"Each turn sends all that was said before and {load['message_tokens']:,} new tokens."],
            list(prefix_figures(turns, "turn", [x for x, _ in turns])),
            [prefix_table("turn", [(f"{x:g}", row) for x, row in turns])],
        )


def prefix_figures(
    rows: Sequence[tuple[float, dict[str, Any]]], label: str, ticks: Sequence[float] | None
) -> Iterator[Figure]:
    axis = Axis(label, ticks=ticks)
    for text, unit, value in (
        ("Time to first token, p50", "ms", lambda side: side["ttft_ms"]["p50"]),
        ("Time to first token, p99", "ms", lambda side: side["ttft_ms"]["p99"]),
        ("Output tokens a second", "tokens/s", lambda side: side["output_tokens_per_s"]),
    ):
        series = [both_series(rows, side, value, unit, label, n) for n, side in enumerate(("with", "without"))]
        yield Figure(text, line_chart(text, series, axis, Axis(unit)))
    text = "Prompt tokens from the cache"
    points = [(x, row["hit_rate"]) for x, row in rows]
    marks = [Mark(x, y, f"{100 * y:.1f}% at {label} {x:g}") for x, y in points]
    yield Figure(text, line_chart(text, [Series("", points, marks)], axis, Axis("%", show=percent, high=1.0)))


def both_series(
    rows: Sequence[tuple[float, dict[str, Any]]],
    side: str,
    value: Callable[[dict[str, Any]], float],
    unit: str,
    label: str,
    colour: int,
) -> Series:
    points = [(x, value(row[side])) for x, row in rows]
    marks = [Mark(x, y, f"{side} the cache: {short(y)} {unit}\n{label} {x:g}") for x, y in points]
    return Series(f"{side} the prefix cache", points, marks, colour)


def prefix_table(first: str, rows: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    sides = ("with", "without")
    header = [first, "from the cache"]
    header += [f"{name} {side}" for name in ("TTFT p50", "TTFT p99", "tokens/s") for side in sides]
    cells = [
        [
            text,
            f"{100 * row['hit_rate']:.1f}%",
            *(number(row[side]["ttft_ms"][tail]) for tail in ("p50", "p99") for side in sides),
            *(number(row[side]["output_tokens_per_s"]) for side in sides),
        ]
        for text, row in rows
    ]
    return Table("", header, cells)
