"""`quire bench phases`: its options and its table."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from quire.cli.bench.output import add_output, finish
from quire.cli.errors import say
from quire.cli.options import add_engine_options, engine_config
from quire.errors import InvalidParams
from quire.progress import bar
from quire.store import resolve

COLUMNS = ("batch", "prompt_tokens", "prefill_tokens_per_s", "decode_step_ms", "predicted_ms")
# Options of an engine that decide which steps there are. Measured steps depend on the scenario alone.
WITHOUT_PHASES = (
    "prefix_cache", "order", "seed", "speculate", "exit_head", "itl_target_ms", "batching", "batch_size", "batch_wait",
    "waiting_served_ratio", "max_waiting_tokens",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "keep the fitted cost, for quire plan, simulate and advise"
    parser.add_argument("--save", action="store_true", help=text)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="where --save writes; default: quire's cache")
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="runs of each scenario; the median counts; default 3"
    )
    add_output(parser)
    add_engine_options(parser, without=WITHOUT_PHASES)


def run(arguments: argparse.Namespace) -> None:
    if arguments.repeats < 1:
        raise InvalidParams(f"--repeats is {arguments.repeats}; give a whole number of at least 1.")
    if arguments.profile is not None and not arguments.save:
        raise InvalidParams("--profile says where --save writes; add --save, or leave it out.")
    config = engine_config(arguments, prefix_cache=False, speculate="off", itl_target_ms=0.0)
    from quire.bench import phases
    from quire.engine.profiles import profile_path

    files = resolve(config.model)
    with bar("measuring", unit="scenarios") as report:
        profile, document = phases.run(config, files.path, repeats=arguments.repeats, report=report)
    if arguments.save:
        target = arguments.profile or profile_path(config)
        profile.save(target)
        say(f"Saved to {target}")
    finish("phases", document, arguments, show)


def show(document: dict[str, Any]) -> None:
    machine, error = document["machine"], document["error"]
    print(f"{document['model']} on {machine['gpu'] or machine['cpu']}, {machine['threads']} threads")
    print("  ".join(f"{name:>20}" for name in COLUMNS))
    for row in document["rows"]:
        values = (row[name] for name in COLUMNS)
        print("  ".join(f"{'-' if v is None else f'{v:,.2f}' if isinstance(v, float) else v:>20}" for v in values))
    limits = document["limits"]
    print(f"Memory is read at {limits['read_gb_per_s']:,.1f} GB/s, products do {limits['gflop_per_s']:,.0f} GFLOP/s.")
    print(
        f"Of steps that were not fitted the predicted time is {100 * error['median']:.1f}% off in the median, and "
        f"{100 * error['p95']:.1f}% at the 95th percentile."
    )
