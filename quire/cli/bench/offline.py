"""`quire bench offline`: its options and its table."""

from __future__ import annotations

import argparse
from typing import Any

from quire.cli.bench.output import add_output, finish
from quire.cli.options import add_engine_options, engine_config
from quire.errors import InvalidParams
from quire.progress import bar
from quire.store import resolve

COLUMNS = ("batch", "prefill_tokens_per_s", "decode_tokens_per_s", "ttft_ms", "tpot_ms", "total_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", default="1,8,16,32", metavar="N,N,...", help="batch sizes; default %(default)s")
    for flag, default, text in (
        ("--prompt-tokens", 128, "tokens in each prompt"),
        ("--output-tokens", 64, "new tokens for each prompt"),
        ("--repeats", 3, "runs of each batch size; the median is reported"),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text}; default %(default)s")
    add_output(parser)
    # Random prompts make a model repeat itself, so speculation would gain more than it does with real ones.
    add_engine_options(parser, without=["prefix_cache", "max_requests", "order", "seed", "itl_target_ms", "speculate"])


def run(arguments: argparse.Namespace) -> None:
    batches = parse_batches(arguments.batch)
    config = engine_config(
        arguments, max_requests=max(batches), prefix_cache=False, itl_target_ms=0.0, speculate="off"
    )  # fmt: skip
    from quire.bench.offline import run as measure

    files = resolve(config.model)
    with bar("measuring", unit="batches") as report:
        document = measure(
            config,
            files.path,
            batches=batches,
            prompt_tokens=arguments.prompt_tokens,
            output_tokens=arguments.output_tokens,
            repeats=arguments.repeats,
            report=report,
        )
    finish("offline", document, arguments, show)


def parse_batches(text: str) -> list[int]:
    sizes = text.split(",")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise InvalidParams(f"--batch is {text!r}; give whole numbers with commas, each from 1, such as 1,8,16.")
    return [int(size) for size in sizes]


def show(document: dict[str, Any]) -> None:
    machine = document["machine"]
    print(
        f"{document['model']} on {machine['cpu']}, {machine['threads']} threads, ready in {document['start_s']:.2f} s"
    )
    print("  ".join(f"{name:>20}" for name in COLUMNS))
    for row in document["rows"]:
        print("  ".join(f"{row[name]:>20,.2f}" if name != "batch" else f"{row[name]:>20}" for name in COLUMNS))
