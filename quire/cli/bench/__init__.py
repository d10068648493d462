"""`quire bench`: measure the speed of the engine alone, or of a server. One module for each kind of measurement."""

from __future__ import annotations

import argparse

from quire.cli.bench import batching, offline, phases, prefix, serve, speculation
from quire.cli.bench.output import check_html

KINDS = {
    "offline": (
        offline,
        "Measure prefill and decode of the engine alone, with random prompts, greedy and without the prefix cache.",
    ),
    "serve": (serve, "Send load to a server with OpenAI's API and measure latency and throughput at the client."),
    "batching": (batching, "Answer the same arrivals with continuous, dynamic and static batching."),
    "prefix": (prefix, "Answer the same prompts with and without the prefix cache: shared prefixes and conversations."),
    "speculation": (speculation, "Answer real prompts with and without speculation, and measure what it gains."),
    "phases": (
        phases,
        "Measure steps of prompts and of decoding over batch sizes and contexts, and fit the cost of a step.",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="what to measure", metavar="KIND", required=True)
    for name, (module, about) in KINDS.items():
        kind = kinds.add_parser(name, help=about, description=about, allow_abbrev=False)
        module.add_arguments(kind)
        kind.set_defaults(run_kind=module.run)


def run(arguments: argparse.Namespace) -> None:
    """Measure speed."""
    check_html(arguments.html)
    arguments.run_kind(arguments)
