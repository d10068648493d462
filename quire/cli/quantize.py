"""`quire quantize`: makes a smaller model of a model, and says what that costs."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.errors import say
from quire.cli.options import MODEL_HELP, add_json
from quire.config import DEFAULT_MODEL
from quire.errors import InvalidParams
from quire.progress import bar

if TYPE_CHECKING:
    from quire.bench.compare import Comparison
    from quire.quantize.made import Made
    from quire.quantize.report import Quality

MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from quire.bench.compare import DEFAULT_MAX_TOKENS as REPORT_TOKENS
    from quire.quantize.target import target_names
    from quire.quantize.text import DEFAULT_MAX_TOKENS, DEFAULT_WINDOW

    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP % {"default": DEFAULT_MODEL})
    parser.add_argument("--to", required=True, metavar="FORMAT", help=f"one of {', '.join(target_names())}")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="DIR", help="a directory to make")
    text = "UTF-8 text to calibrate with; default: 64 KiB of public-domain text come with quire"
    parser.add_argument("--text", type=Path, metavar="FILE", help=text)
    most = "tokens of the calibration text that are used at most; default %(default)s"
    parser.add_argument("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help=most)
    window = f"tokens of the calibration text that are computed together; default {DEFAULT_WINDOW}"
    parser.add_argument("--window", type=int, metavar="N", help=window)
    group = "columns that share a scale: 128, 64 or 32; default: the largest that divides all of the model's matrices"
    parser.add_argument("--group-size", type=int, metavar="N", help=group)
    feedback = "gguf: choose codes that make up for each other's errors (GPTQ), with the scales of the format"
    parser.add_argument("--feedback", action=argparse.BooleanOptionalAction, default=True, help=feedback)
    parser.add_argument("--max-kl", type=float, metavar="X", help="fail if the mean KL, in nats a token, is above X")
    report = "compare the result with its source on held-out text; needs both in memory"
    parser.add_argument("--report", action=argparse.BooleanOptionalAction, default=True, help=report)
    held_out = "UTF-8 text for the report; default: that of `quire compare`"
    parser.add_argument("--report-text", type=Path, metavar="FILE", help=held_out)
    tokens = "tokens of the report's text that are compared at most; default %(default)s"
    parser.add_argument("--report-tokens", type=int, default=REPORT_TOKENS, metavar="N", help=tokens)
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    """Make a smaller model of a model, and say what that costs."""
    from quire.quantize.job import quantize
    from quire.quantize.made import Settings
    from quire.quantize.report import REPORT_FILE, make_quality
    from quire.quantize.target import parse_target
    from quire.store import resolve

    target = parse_target(arguments.to)
    if arguments.max_kl is not None and not arguments.report:
        raise InvalidParams("max_kl needs the report, and --no-report is given. Leave one of them out.", "max_kl")
    if arguments.max_kl is not None and not arguments.max_kl >= 0:
        raise InvalidParams(f"max_kl is {arguments.max_kl}; give 0 or more.", "max_kl")
    held_out = read_report_text(arguments)
    begin = time.perf_counter()
    with bar("fetching") as fetched:
        source = resolve(arguments.model, progress=lambda _, done, total: fetched(done, total)).path
    settings = Settings(
        target, arguments.text, arguments.max_tokens, arguments.window, arguments.group_size, arguments.feedback
    )
    try:
        with bar("quantizing", unit="layers") as report:
            made = quantize(source, settings, arguments.output, report)
    except KeyboardInterrupt:
        say(f"Interrupted. The same command continues from {arguments.output}.partial.")
        raise
    seconds = time.perf_counter() - begin
    comparison = compare(source, made, held_out, arguments.report_tokens) if arguments.report else None
    quality = make_quality(source, made, target.name, seconds, comparison, arguments.max_kl)
    document = quality.as_document()
    (made.directory / REPORT_FILE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps(document))
    else:
        show(quality)
    if not quality.passed:
        assert comparison is not None
        say(
            f"error: the KL is {comparison.kl.mean:.6f}, above {arguments.max_kl:g}. "
            f"The model is kept in {made.directory}."
        )
        raise SystemExit(1)


def read_report_text(arguments: argparse.Namespace) -> str | None:
    """Before work, so that hours do not end with a file that is not there."""
    from quire.bench.compare import read_text

    if arguments.report and arguments.report_tokens < 2:
        raise InvalidParams(f"report_tokens is {arguments.report_tokens}; give at least 2.", "report_tokens")
    if arguments.report_text is None:
        return None
    if not arguments.report:
        raise InvalidParams("report_text is given, and --no-report too. Leave one of them out.", "report_text")
    return read_text(arguments.report_text, arguments.report_tokens)


def compare(source: Path, made: Made, text: str | None, max_tokens: int) -> Comparison:
    from quire.quantize.report import compare_with_source

    try:
        with bar("comparing", unit="windows") as report:
            return compare_with_source(source, made, text, max_tokens, report)
    except KeyboardInterrupt:
        say(f"Interrupted. The model is complete: {made.path}. `quire compare` compares it with its source.")
        raise


def show(quality: Quality) -> None:
    from quire.cli.compare import show as show_comparison

    print(f"{quality.output}: {quality.to}" + (f" in groups of {quality.group_size}" if quality.group_size else ""))
    if quality.source_was_quantized:
        print("The source was quantized already, so its own errors are in both sides of the comparison.")
    size = f"{quality.output_bytes / MIB:,.1f} MiB of {quality.source_bytes / MIB:,.1f}"
    print(f"{'size':<26}{size}")
    bits = f"{quality.bits_per_weight:.3f} of quantized matrices, {quality.bits_per_weight_of_all:.3f} of all weights"
    print(f"{'bits a weight':<26}{bits}")
    if quality.calibration_text is not None:
        print(f"{'calibrated with':<26}{quality.calibration_tokens:,} tokens of {quality.calibration_text}")
    speed = f"{quality.predicted_tokens_per_s:,.0f} tokens/s, if {quality.memory_bytes_per_s / 1e9:.1f} GB/s are read"
    print(f"{'limit of one request':<26}{speed}")
    for nth, part in enumerate(quality.worst):
        what = "outputs" if part.of_outputs else "values"
        print(f"{'suffered most' if nth == 0 else '':<26}{part.name}: error {100 * part.error:.3f}% of its {what}")
    if rare := quality.rare_experts:
        more = f" and {len(rare) - 3:,} more" if len(rare) > 3 else ""
        print(f"{'rarely chosen':<26}{', '.join(rare[:3])}{more}: calibrated with the inputs of all tokens")
    print(f"{'seconds':<26}{quality.seconds:.1f}")
    if quality.comparison is not None:
        show_comparison(quality.comparison)
