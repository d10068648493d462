"""`quire bench speculation`: its options and its table."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from quire.cli.bench.output import add_output, finish
from quire.cli.options import add_engine_options, engine_config
from quire.progress import bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    prompts = (
        'JSON lines with {"prompt": ...} or {"turns": [...]} and a "category"; default: a few that come with quire'
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=prompts)
    parser.add_argument("--max-prompts", type=int, metavar="N", help="of each category; default all")
    for flag, default, text in (
        ("--batch", 1, "prompts that are answered at once"),
        ("--output-tokens", 128, "most new tokens for each prompt"),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text}; default %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0, greedy")
    add_output(parser)
    add_engine_options(parser, without=["prefix_cache", "order", "seed", "itl_target_ms"])


def run(arguments: argparse.Namespace) -> None:
    config = engine_config(arguments, prefix_cache=False)
    from quire.bench.speculation import run as measure

    with bar("measuring", unit="prompts") as report:
        document = measure(
            config,
            arguments.prompts,
            max_prompts=arguments.max_prompts,
            batch=arguments.batch,
            output_tokens=arguments.output_tokens,
            temperature=arguments.temperature,
            report=report,
        )
    finish("speculation", document, arguments, show)


def show(document: dict[str, Any]) -> None:
    print(f"{document['model']}, batch {document['batch']}, temperature {document['temperature']:g}, decoding only")
    print(
        f"{'prompts':<16}{'plain tok/s':>12}{'tok/s':>10}{'times':>8}{'worst':>8}{'tokens a step':>15}{'accepted':>14}"
    )
    for row in document["rows"]:
        accepted = f"{row['accepted']} of {row['drafted']}"
        print(
            f"{row['kind']:<16}{row['plain_tokens_per_s']:>12,.0f}{row['tokens_per_s']:>10,.0f}{row['speedup']:>8.2f}"
            f"{row['worst']:>8.2f}{row['tokens_per_step']:>15.2f}{accepted:>14}"
        )
    if different := document["rows"][-1]["different"]:
        print(f"{different} answers differ. With these kernels rounding depends on the number of tokens in a step.")
