"""`quire bench batching`: its options and its table."""

from __future__ import annotations

import argparse
from typing import Any

from quire.cli.bench.output import add_output, finish
from quire.cli.options import add_engine_options, engine_config
from quire.errors import InvalidParams
from quire.progress import bar
from quire.store import resolve

BATCH_SIZE = 8
# Options that the three policies choose, or that would change what is compared.
WITHOUT = (
    "batching", "max_requests", "waiting_served_ratio", "max_waiting_tokens", "prefix_cache", "order", "seed",
    "speculate", "exit_head",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=float, default=16.0, metavar="R", help="requests a second; default %(default)g")
    for flag, default, text in (
        ("--num-requests", 64, "requests of each run"),
        ("--prompt-tokens", 64, "tokens of the longest prompt; the shortest has an eighth"),
        ("--output-tokens", 64, "new tokens of the longest answer; the shortest has an eighth"),
        ("--repeats", 1, "runs of each policy, in turns; the one of median throughput is reported"),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text}; default %(default)s")
    add_output(parser)
    add_engine_options(parser, without=WITHOUT)


def run(arguments: argparse.Namespace) -> None:
    size = BATCH_SIZE if arguments.batch_size is None else arguments.batch_size
    if size < 1:
        raise InvalidParams(f"--batch-size is {size}; give a whole number of at least 1.")
    config = engine_config(
        arguments, batching="dynamic", batch_size=size, max_requests=size, prefix_cache=False, speculate="off"
    )
    from quire.bench.batching import Load
    from quire.bench.batching import run as measure

    load = Load(arguments.rate, arguments.num_requests, arguments.prompt_tokens, arguments.output_tokens)
    files = resolve(config.model)
    with bar("measuring", unit="requests") as report:
        document = measure(config, files.path, load, repeats=arguments.repeats, report=report)
    finish("batching", document, arguments, show)


def show(document: dict[str, Any]) -> None:
    load = document["load"]
    print(
        f"{document['model']}, {load['num_requests']} requests, {load['rate']:g} a second, at most "
        f"{document['batch_size']} at once"
    )
    print(
        f"{'batching':<12}{'tokens/s':>10}"
        + "".join(f"{name:>12}" for name in ("TTFT p50", "p99", "TPOT p50", "p99"))
        + f"{'E2E p99':>12}"
    )
    for run in document["runs"]:
        summary = run["summary"]
        tails = [(summary[name] or {}).get(tail) for name, tail in TAILS]
        print(f"{run['batching']:<12}{summary['output_tokens_per_s']:>10.1f}" + "".join(map(milliseconds, tails)))
    if document["different"]:
        print(f"{document['different']} answers differ. With these kernels rounding depends on the batch.")


TAILS = (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("tpot_ms", "p50"), ("tpot_ms", "p99"), ("e2e_ms", "p99"))


def milliseconds(value: float | None) -> str:
    return f"{'-' if value is None else f'{value:,.1f} ms':>12}"
