"""`quire compare`: how much the next-token distributions of two configurations differ."""

from __future__ import annotations

import argparse
import json
import shlex
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.imports import import_numpy
from quire.cli.options import add_fields, add_json, engine_config
from quire.config import EngineConfig
from quire.errors import InvalidParams
from quire.progress import bar

if TYPE_CHECKING:
    from quire.bench.compare import Comparison

SIDE_HELP = 'a model, or a model and options of its own in quotes, such as "smollm2:135m --kv-dtype int8"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    import_numpy()
    from quire.bench.compare import DEFAULT_MAX_TOKENS, DEFAULT_WINDOW

    parser.add_argument("a", metavar="A", help=f"{SIDE_HELP}; the reference")
    parser.add_argument("b", metavar="B", help="the same, for what is compared with it")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text; default: a short one comes with quire")
    window = f"tokens of the text that are computed together; default {DEFAULT_WINDOW}, or the models' context if less"
    parser.add_argument("--window", type=int, metavar="N", help=window)
    most = "tokens of the text that are compared at most; default %(default)s"
    parser.add_argument("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help=most)
    confidence = "take tokens from the exit where its confidence, between 0 and 1, reaches C, on sides with --exit-head"
    parser.add_argument("--early-exit", type=float, metavar="C", help=confidence)
    add_json(parser)
    add_options(parser, "engine, of both sides")


def add_options(parser: argparse.ArgumentParser, title: str) -> None:
    from quire.bench.compare import WITHOUT_EFFECT

    add_fields(parser, title, EngineConfig, without=("model", *WITHOUT_EFFECT))


def run(arguments: argparse.Namespace) -> None:
    """Compare the next-token distributions of two models, or of one with different options."""
    from quire.bench.compare import compare_models, read_text

    a, b = parse_side("A", arguments.a, arguments), parse_side("B", arguments.b, arguments)
    text = None if arguments.text is None else read_text(arguments.text, arguments.max_tokens)
    with bar("comparing", unit="windows") as report:
        comparison = compare_models(
            a, b, text, window=arguments.window, max_tokens=arguments.max_tokens,
            early_exit=arguments.early_exit, report=report,
        )  # fmt: skip
    if arguments.json:
        print(json.dumps(comparison.as_document()))
    else:
        show(comparison)


def parse_side(name: str, text: str, both: argparse.Namespace) -> EngineConfig:
    """The configuration of one side: its own options, then those of both sides, then the defaults."""
    try:
        words = [text] if Path(text).exists() else shlex.split(text)
    except ValueError as error:
        raise InvalidParams(f"{name} is {text!r}, which cannot be split into words: {error}.") from error
    if not words or words[0].startswith("-"):
        raise InvalidParams(f"{name} is {text!r}; give a model first, then its options.")
    parser = argparse.ArgumentParser(f"quire compare: {name}", allow_abbrev=False, add_help=False)
    parser.add_argument("model", metavar="MODEL")
    add_options(parser, "engine")
    return engine_config(parser.parse_args(words, copy(both)))


def show(comparison: Comparison) -> None:
    kl, same, difference = comparison.kl, comparison.top1_agreement, comparison.log_perplexity_difference
    ratio = comparison.perplexity_ratio
    print(f"A: {comparison.a}")
    print(f"B: {comparison.b}")
    windows = f"{comparison.num_windows} windows of {comparison.window}"
    print(f"{comparison.num_tokens:,} tokens compared, in {windows}; ± is the standard error")
    print(f"{'KL(A||B), nats a token':<26}{kl.mean:.6f} ± {kl.se:.6f}")
    print(f"{'  median, p99, max':<26}{comparison.kl_median:.6f}, {comparison.kl_p99:.6f}, {comparison.kl_max:.6f}")
    print(f"{'same top-1 token':<26}{100 * same.mean:.2f}% ± {100 * same.se:.2f}")
    print(f"{'perplexity of A, of B':<26}{comparison.perplexity_a:.4f}, {comparison.perplexity_b:.4f}")
    print(f"{'perplexity of B / A':<26}{ratio:.5f} ± {ratio * difference.se:.5f}")
    for name, exits in (("A", comparison.exits_a), ("B", comparison.exits_b)):
        if exits is not None:
            print(f"{f'tokens of {name} that exit':<26}{100 * exits.share:.2f}%, after {exits.layer} layers")
            print(f"{'  cannot give the text':<26}{100 * exits.unreachable_share:.2f}%")
