"""`quire report`: results of `quire bench` as one page with charts. Results of one kind are compared."""

from __future__ import annotations

import argparse
from pathlib import Path

from quire.cli.bench.output import check_html, save_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "results",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="what quire bench ... --json printed; serve: --json-requests",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", required=True, help="where to write the page")


def run(arguments: argparse.Namespace) -> None:
    """Show results of quire bench as one page with charts."""
    check_html(arguments.html)
    from quire.bench.report.build import build_from_files
    from quire.bench.report.page import render
    from quire.bench.report.result import read_result

    report = build_from_files([read_result(path) for path in arguments.results])
    save_page(arguments.html, render(report))
