"""`quire bench prefix`: its options and its tables."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from quire.cli.bench.output import add_output, finish
from quire.cli.options import add_engine_options, engine_config
from quire.errors import InvalidParams
from quire.progress import bar
from quire.store import resolve

WITHOUT = ("prefix_cache", "order", "seed", "speculate", "exit_head")  # chosen here, or not compared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shares = "shares of a prompt that all prompts have in common; default %(default)s"
    parser.add_argument("--shares", default="0,0.5,0.75,0.9", metavar="X,X,...", help=shares)
    for flag, default, text in (
        ("--num-requests", 8, "requests of each share"),
        ("--prompt-tokens", 512, "tokens in each prompt, and those that the messages of a conversation have together"),
        ("--output-tokens", 16, "new tokens for each prompt"),
        ("--concurrency", 4, "requests at once"),
        ("--turns", 6, "messages of a conversation"),
        ("--repeats", 3, "runs with other tokens; the median of each figure is reported"),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text}; default %(default)s")
    add_output(parser)
    add_engine_options(parser, without=WITHOUT)


def run(arguments: argparse.Namespace) -> None:
    config = engine_config(arguments, prefix_cache=True, speculate="off")
    from quire.bench.prefix import COUNTS, Load
    from quire.bench.prefix import run as measure

    load = Load(parse_shares(arguments.shares), **{name: getattr(arguments, name) for name in COUNTS})
    files = resolve(config.model)
    with bar("measuring", unit="requests") as report:
        document = measure(config, files.path, load, report=report)
    finish("prefix", document, arguments, show)


def parse_shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(share) for share in text.split(","))
    except ValueError:
        raise InvalidParams(f"--shares is {text!r}; give numbers from 0 to 1 with commas, such as 0,0.5,0.9.") from None


def show(document: dict[str, Any]) -> None:
    load = document["load"]
    print(
        f"{document['model']}, prompts of {load['prompt_tokens']} tokens, {load['output_tokens']} new, "
        f"{load['concurrency']} at once"
    )
    show_rows("shared", [(f"{100 * row['share']:g}%", row) for row in document["shared"]])
    print()
    show_rows("turn", [(str(row["turn"]), row) for row in document["turns"]])
    if document["different"]:
        print(f"{document['different']} answers differ. With these kernels rounding depends on the tokens of a step.")


def show_rows(title: str, rows: Sequence[tuple[str, dict[str, Any]]]) -> None:
    names = ("hit rate", "TTFT p50 with", "without", "p99 with", "without", "tokens/s with", "without")
    print(f"{title:<8}" + "".join(f"{name:>15}" for name in names))
    for name, row in rows:
        both = row["with"], row["without"]
        times = [side["ttft_ms"][tail] for tail in ("p50", "p99") for side in both]
        print(
            f"{name:<8}{100 * row['hit_rate']:>14.1f}%"
            + "".join(f"{time:>12,.1f} ms" for time in times)
            + "".join(f"{side['output_tokens_per_s']:>15,.1f}" for side in both)
        )
