"""The text report of a run, made from its document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

TAILS = ("mean", "p50", "p90", "p99", "max")
LATENCIES = {
    "ttft_ms": "TTFT, time to first token",
    "tpot_ms": "TPOT, time per token after it",
    "itl_ms": "ITL, between two chunks",
    "e2e_ms": "E2E, whole request",
}
LATE_MS = 20.0  # timers are exact to 1 or 2 ms; a later client is overloaded


def format_report(document: dict[str, Any]) -> str:
    summary = document["summary"]
    lines = [f"{document['model']} at {document['url']}", f"{document['load']}", ""]
    lines += [f"{name:<32}{value}" for name, value in counts(summary)]
    lines += ["", f"{'ms':<32}" + "".join(f"{tail:>12}" for tail in TAILS)]
    lines += [latency(text, summary[name]) for name, text in LATENCIES.items()]
    if summary["send_delay_ms"]:
        lines.append(latency("sent later than planned", summary["send_delay_ms"]))
    lines += ["", *notes(document)]
    return "\n".join(lines).rstrip()


def counts(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "requests", requests_line(summary)
    yield "duration", f"{summary['duration_s']:.2f} s"
    yield "requests / s", number(summary["requests_per_s"])
    yield "output tokens / s", number(summary["output_tokens_per_s"])
    yield "all tokens / s", number(summary["total_tokens_per_s"])
    yield (
        "tokens in (cached), out",
        (f"{summary['prompt_tokens']:,} ({summary['cached_tokens']:,}), {summary['output_tokens']:,}"),
    )
    yield "peak concurrency", str(summary["peak_concurrency"])
    if goodput := summary["goodput"]:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput["limits_ms"].items())
        met = f"{goodput['num_met']:,} of {summary['num_requests']:,} within {limits}"
        yield "goodput, requests / s", f"{number(goodput['requests_per_s'])} ({met})"


def requests_line(summary: dict[str, Any]) -> str:
    texts = [f"{summary['num_ok']:,} answered", f"{summary['num_failed']:,} failed"]
    if summary["num_unfinished"]:
        texts.append(f"{summary['num_unfinished']:,} unfinished")
    return ", ".join(texts)


def latency(text: str, tails: dict[str, float] | None) -> str:
    return f"{text:<32}" + "".join(f"{number(tails[tail] if tails else None):>12}" for tail in TAILS)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def notes(document: dict[str, Any]) -> Iterator[str]:
    """Conditions that affect the results."""
    summary, client = document["summary"], document["client"]
    if document["interrupted"]:
        yield "Interrupted: these are the requests that had ended."
    for kind, error in document["errors"].items():
        yield f"{error['count']:,} failed with {kind}; the first: {error['first']}"
    if died := document.get("server_died"):
        yield f"The server ended by itself with status {died['exit_status']}; its last lines:\n{died['last_words']}"
    if trace := document.get("trace"):
        yield trace_note(trace)
    if summary["num_short"]:
        yield f"{summary['num_short']:,} answers were shorter than asked for."
    if summary["output_tokens_counted_by"].get("chunks"):
        yield "The server did not count tokens for all answers; there, every chunk with text counts as one."
    if summary["send_delay_ms"] and summary["send_delay_ms"]["p99"] > LATE_MS:
        yield (
            f"One request in a hundred was sent more than {summary['send_delay_ms']['p99']:.0f} ms late: this machine "
            "is too busy to send them on time."
        )
    if client["cpu_us_per_chunk"] is not None:
        yield (
            f"This client took {100 * client['cpu_share']:.1f}% of a core, {client['cpu_us_per_chunk']:.0f} µs a chunk "
            f"({client['loop']})."
        )


def trace_note(trace: dict[str, Any]) -> str:
    return (
        f"Trace: {trace['num_replayed']:,} of {trace['num_read']:,} requests replayed; left out "
        f"{trace['num_skipped_prompt_too_long']:,} with too long prompts and {trace['num_skipped_without_answer']:,} "
        f"without an answer; {trace['num_answers_shortened']:,} answers asked for only up to the limit."
    )
