"""A report as one HTML page: facts, charts, tables and the numbers as JSON. Nothing is loaded from anywhere.

The page's own style and script are allowed by their hashes, and nothing else is. All text is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
MAX_JSON = 60_000  # characters of all results that are shown as JSON


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with its title, and a sentence about it."""

    title: str
    svg: str
    note: str = ""
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """The first column is text, the others are numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    notes: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True, slots=True)
class Report:
    title: str
    facts: Mapping[str, str]
    sections: Sequence[Section]
    results: Mapping[str, Any] = field(default_factory=dict)  # documents by name


def render(report: Report) -> str:
    style, script = read("chart.css") + read("page.css"), read("page.js")
    policy = (
        f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    body = [
        f"<h1>{escape(report.title)}</h1>",
        facts(report.facts),
        *(part for section in report.sections for part in show_section(section)),
        *(show_json(name, document, MAX_JSON // len(report.results)) for name, document in report.results.items()),
    ]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(report.title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>",
            *body,
            f'</main>\n<div id="tip" role="status" hidden></div>\n<script>{script}</script>\n</body>\n</html>\n',
        ]
    )


def read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    """How a content security policy names a style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def facts(values: Mapping[str, str]) -> str:
    rows = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in values.items())
    return f'<dl class="facts">{"".join(rows)}</dl>'


def show_section(section: Section) -> Iterator[str]:
    yield f"<section>\n<h2>{escape(section.title)}</h2>"
    for note in section.notes:
        yield f'<p class="note">{escape(note)}</p>'
    if section.figures:
        yield '<div class="figures">'
        yield from map(show_figure, section.figures)
        yield "</div>"
    yield from map(show_table, section.tables)
    yield "</section>"


def show_figure(figure: Figure) -> str:
    note = f"<p>{escape(figure.note)}</p>" if figure.note else ""
    style = ' class="wide"' if figure.wide else ""
    return (
        f"<figure{style}><figcaption><h3>{escape(figure.title)}</h3>{note}</figcaption>"
        f'<div class="scroll" tabindex="0">{figure.svg}</div></figure>'
    )


def show_table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.header)
    rows = "\n".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in table.rows
    )
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    body = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>"
    return f'<div class="scroll" tabindex="0"><table>{caption}{body}</table></div>'


def show_json(name: str, document: Any, most: int) -> str:
    """The result as JSON, closed at first."""
    text = json.dumps(document, indent=1, ensure_ascii=False)
    if len(text) > most:
        text = f"{text[:most]}\n... {len(text) - most:,} more characters"
    return f"<details><summary>{escape(name)} as JSON</summary><pre>{escape(text)}</pre></details>"
