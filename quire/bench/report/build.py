"""Builds a report from results of `quire bench`: sections by what was measured, and facts of each run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from quire.bench.report import kinds
from quire.bench.report.page import Report, Section
from quire.bench.report.phases import phases
from quire.bench.report.result import Result, not_a_result, unique_names

BUILDERS: dict[str, Callable[[Sequence[Result]], Iterable[Section]]] = {
    "offline": kinds.offline,
    "serve": kinds.serve,
    "batching": kinds.batching,
    "prefix": kinds.prefix,
    "speculation": kinds.speculation,
    "phases": phases,
    "simulate": kinds.simulate,
}
WITHOUT_JSON = ("requests", "measured_requests", "runs")  # entries that are long, and not shown as JSON


def build(results: Sequence[Result]) -> Report:
    """Results of one kind are compared with each other."""
    named = unique_names(results)
    by_bench: dict[str, list[Result]] = {}
    for result in named:
        if result.bench not in BUILDERS:
            raise not_a_result(result.name, f'its "bench" is {result.bench!r}, not one of {", ".join(BUILDERS)}')
        by_bench.setdefault(result.bench, []).append(result)
    sections = [section for bench, group in by_bench.items() for section in BUILDERS[bench](group)]
    documents = {result.name: shown_as_json(result.document) for result in named}
    return Report(make_title(named), dict(make_facts(named)), sections, documents)


def build_from_files(results: Sequence[Result]) -> Report:
    """As `build`. A file may claim to be a result and be none: that raises InvalidParams."""
    for result in results:
        try:
            build([result])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
            raise not_a_result(result.name, f"{type(error).__name__}: {error}") from None
    return build(results)


def make_title(results: Sequence[Result]) -> str:
    what = " and ".join(dict.fromkeys(result.bench for result in results))
    what = what if what.startswith("simulate") else f"bench {what}"
    models = ", ".join(dict.fromkeys(str(result.document["model"]) for result in results))
    return f"quire {what}: {models}"


def make_facts(results: Sequence[Result]) -> Iterator[tuple[str, str]]:
    """Machine, time and command of each result."""
    for result in results:
        prefix = f"{result.name}: " if len(results) > 1 else ""
        document = result.document
        yield f"{prefix}command", str(document["command"])
        yield f"{prefix}measured", f"{document['time'].replace('T', ' ')}, quire {document['quire']}"
        if "machine" in document:
            machine = document["machine"]  # of a simulation the name of the machine that was measured
            yield f"{prefix}machine", machine if isinstance(machine, str) else describe_machine(machine)
        if isinstance(document.get("engine"), str):
            yield f"{prefix}engine", document["engine"]
        if "url" in document:
            yield f"{prefix}server", str(document["url"])
            yield f"{prefix}client", describe_machine(document["client"]["machine"])


def describe_machine(machine: dict[str, Any]) -> str:
    """Of a client only the CPU is known."""
    texts = [machine["gpu"]] if machine.get("gpu") else []
    threads = f", {machine['threads']} threads" if "threads" in machine else ""
    texts.append(f"{machine['cpu']}, {machine['cores']} cores{threads}")
    texts.append(f"Python {machine['python']}")
    if machine.get("torch"):
        texts.append(f"torch {machine['torch']}")
    return "; ".join(texts)


def shown_as_json(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in WITHOUT_JSON}
