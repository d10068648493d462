"""Renders the document of a run as markdown tables and ratios. The input is plain dictionaries, the output is text.

benchmarks/cpu_peers.py writes the document with --json. `results` has an entry of quire for each of its runs: before
and after every peer. A peer is compared with the mean of the two runs next to it, because the machine's speed changes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

OWN = "quire"
NONE = "-"

Document = dict[str, Any]
Value = Callable[[Document], float | None]  # from one engine's result to a figure


def render(document: Document) -> str:
    """The whole report."""
    parts = [machine_lines(document)]
    parts += [model_section(model) for model in document["models"]]
    if document["missing"]:
        lines = [f"- {name}: {needs}" for name, needs in document["missing"].items()]
        parts.append("\n".join(["Not installed, so not measured:", "", *lines]))
    return "\n\n".join(parts)


def machine_lines(document: Document) -> str:
    machine, settings = document["machine"], document["settings"]
    return "\n".join(
        [
            f"- Machine: {machine['cpu']}, {machine['cores']} cores; {', '.join(machine['instructions'])}; "
            f"AMX {machine['amx']}; oneDNN limited to {machine['onednn_limit'] or 'nothing'}",
            f"- Work: {settings['threads']} threads, {settings['output_tokens']} new tokens, greedy, random prompts, "
            f"medians of {settings['repeats']}; a column `8 x 128` is a batch of 8 prompts of 128 tokens",
            f"- Run at {document['time']}; the machine read and computed {show_pulse(document['pulse_after'])} "
            "(GB/s, GFLOP/s) at the end",
        ]
    )


def model_section(model: Document) -> str:
    results = model["results"]
    labels = [row["label"] for row in results[0]["rows"]] if results else []
    tables = [
        rate_table("prefill, tokens/s", "prefill_tokens_per_s", labels, results),
        rate_table("decode, tokens/s", "decode_tokens_per_s", labels, results),
        state_table(results),
    ]
    title = f"### {model['model']} ({model['file']}, {model['file_bytes'] / 2**20:.0f} MiB)"
    return "\n\n".join([title, *tables, *filter(None, [reasons(results)])])


def rate_table(title: str, figure: str, labels: list[str], results: list[Document]) -> str:
    """A row for each engine, a column for each cell: quire's mean and range, each peer's figure and quire's ratio."""
    values: list[Value] = [rate(figure, label) for label in labels]
    rows = lines_of(results, lambda result: [result["engine"], result["weights"]], values, [None] * len(values))
    rows.append(["**quire / best peer**", "", *(show_best(results, value, max) for value in values)])
    return table([title, "weights", *labels], rows)


def lines_of(
    results: list[Document], head: Callable[[Document], list[str]], values: list[Value], digits: list[int | None]
) -> list[list[str]]:
    """One line for quire and one for each peer."""
    own = next((result for result in results if result["engine"] == OWN), None)
    lines = []
    if own is not None:
        cells = [show_range(results, value, count) for value, count in zip(values, digits, strict=True)]
        lines.append([*head(own), *cells])
    for index, result in enumerate(results):
        if result["engine"] == OWN:
            continue
        cells = []
        for value, count in zip(values, digits, strict=True):
            ratio = ratio_at(results, index, value)
            cells.append(show(value(result), count) + (f" ({ratio:.2f}x)" if ratio is not None else ""))
        lines.append([*head(result), *cells])
    return lines


def state_table(results: list[Document]) -> str:
    """Start and memory, where less is better, and the machine's pulse before each peer."""
    values: list[Value] = [
        lambda result: result["start_s"],
        lambda result: result["start_peak_mib"],
        lambda result: result["peak_mib"],
    ]
    rows = lines_of(results, lambda result: [f"{result['engine']} {result['version']}".strip()], values, [2, 0, 0])
    pulses = [show_pulse(result["pulse"]) for result in results if result["engine"] != OWN]
    rows = [[*row, pulse] for row, pulse in zip(rows, [NONE, *pulses], strict=True)] if rows else []
    rows.append(["**quire / best peer** (less is better)", *(show_best(results, value, min) for value in values), ""])
    header = [
        "engine",
        "start to first token, s",
        "peak of that, MiB",
        "peak of all cells, MiB",
        "machine before: GB/s, GFLOP/s",
    ]
    return table(header, rows)


def rate(figure: str, label: str) -> Value:
    def value(result: Document) -> float | None:
        return next((row[figure] for row in result["rows"] if row["label"] == label), None)

    return value


def ratio_at(results: list[Document], index: int, value: Value) -> float | None:
    """quire / the peer at `index`, with the mean of quire's runs before and after it. None if a figure is missing."""
    before = next((value(result) for result in reversed(results[:index]) if result["engine"] == OWN), None)
    after = next((value(result) for result in results[index:] if result["engine"] == OWN), None)
    peer = value(results[index])
    if before is None or after is None or not peer:
        return None
    return statistics.mean([before, after]) / peer


def show_best(results: list[Document], value: Value, best: Callable[..., Any]) -> str:
    """quire / the peer with the best figure."""
    figures = [(value(result), index) for index, result in enumerate(results) if result["engine"] != OWN]
    known = [(figure, index) for figure, index in figures if figure is not None]
    if not known:
        return NONE
    _, index = best(known, key=lambda pair: pair[0])
    ratio = ratio_at(results, index, value)
    return NONE if ratio is None else f"**{ratio:.2f}** ({results[index]['engine']})"


def show_range(results: list[Document], value: Value, digits: int | None) -> str:
    """The mean of quire's runs and, if there are several, the smallest and the largest."""
    figures = [value(result) for result in results if result["engine"] == OWN]
    known = [figure for figure in figures if figure is not None]
    if not known or len(known) < len(figures):
        return NONE
    mean = show(statistics.mean(known), digits)
    return mean if len(known) == 1 else f"{mean} ({show(min(known), digits)} to {show(max(known), digits)})"


def show(value: float | None, digits: int | None = None) -> str:
    """A figure with `digits` decimals. The default is one decimal, and none from 100 on."""
    if value is None:
        return NONE
    return f"{value:,.{(0 if value >= 100 else 1) if digits is None else digits}f}"


def show_pulse(pulse: dict[str, float] | None) -> str:
    return f"{pulse['read_gb_per_s']:.1f}, {pulse['fp32_gflop_per_s']:.0f}" if pulse else NONE


def reasons(results: list[Document]) -> str:
    """Why cells are empty: each reason once, with its cells."""
    where: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result["start_failure"]:
            where.setdefault((result["engine"], result["start_failure"]), []).append("start")
        for row in result["rows"]:
            if row["reason"]:
                where.setdefault((result["engine"], row["reason"]), []).append(row["label"])
    return "\n".join(
        f"- {engine}, {', '.join(dict.fromkeys(cells))}: {reason}" for (engine, reason), cells in where.items()
    )


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
