"""The load of `quire simulate` and `quire advise`, and options that these and `quire plan` share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import InvalidParams

if TYPE_CHECKING:
    from quire.bench.serve.traces import TraceSlice

TRACES = "recorded traffic: Azure's or BurstGPT's CSV, Mooncake's JSON lines, or a file of quire serve --trace"
# Options of an engine that a simulation cannot change: no profile was measured with them, or they decide no cost.
FIXED = ("seed", "swap_memory", "speculate", "exit_head", "kv_memory")
OF_TRACE = ("max_prompt_tokens", "max_output_tokens", "trace_speed")  # options of the load
OF_RATE = ("prompt_tokens", "output_tokens")
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64  # defaults of --rate
NUM_REQUESTS = 100
MAX_TOKENS = 1 << 24  # of a prompt or an answer, as `bench/serve/traces.py` has it; also the most requests
ENGINES = ("replicas", "servers")
MAX_ENGINES = 10_000  # replicas, and servers
MIN_NUMBER = 1e-9  # of requests a second, and of a trace's speed
COUNTS = ("num_requests", "prompt_tokens", "output_tokens", "max_prompt_tokens", "max_output_tokens")


def add_load(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The load: a trace or random requests."""
    group = parser.add_argument_group("load")
    group.add_argument("--trace", type=Path, metavar="FILE", help=TRACES)
    group.add_argument("--trace-speed", type=float, metavar="X", help="replay the trace X times as fast")
    group.add_argument("--rate", type=float, metavar="R", help="instead of a trace: R random requests a second")
    group.add_argument("--num-requests", type=int, metavar="N", help="default 100, or all of a trace")
    group.add_argument("--prompt-tokens", type=int, metavar="N", help=f"of --rate; default {PROMPT_TOKENS}")
    group.add_argument("--output-tokens", type=int, metavar="N", help=f"of --rate; default {OUTPUT_TOKENS}")
    group.add_argument("--max-prompt-tokens", type=int, metavar="N", help="skip requests with longer prompts")
    group.add_argument("--max-output-tokens", type=int, metavar="N", help="limit the answers of the trace to N tokens")
    return group


def add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", type=Path, metavar="FILE", help="default: what quire bench phases --save measured")


def add_acceptance(parser: argparse.ArgumentParser) -> None:
    text = "chance that a draft is right: speculation's gain"
    parser.add_argument("--acceptance", type=float, metavar="A", help=text)


def check_load(arguments: argparse.Namespace) -> None:
    if (arguments.trace is None) == (arguments.rate is None):
        raise InvalidParams("Say what to simulate: --trace FILE, or --rate R.")
    without_effect = OF_TRACE if arguments.trace is None else OF_RATE
    for name in without_effect:
        if getattr(arguments, name) is not None:
            flag, needed = name.replace("_", "-"), "--trace" if arguments.trace is None else "--rate"
            raise InvalidParams(f"--{flag} needs {needed}; leave it out.")
    check_positive(arguments, ("trace_speed", "rate"))
    check_counts(arguments, COUNTS)


def check_counts(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    for name in names:
        value, most = getattr(arguments, name), MAX_ENGINES if name in ENGINES else MAX_TOKENS
        if value is not None and not 1 <= value <= most:
            raise InvalidParams(
                f"--{name.replace('_', '-')} is {value}; give a whole number of at least 1 and at most {most:,}."
            )


def check_positive(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not MIN_NUMBER <= value <= 1 / MIN_NUMBER:
            raise InvalidParams(
                f"--{name.replace('_', '-')} is {value}; give a number above 0, from {MIN_NUMBER:g} to "
                f"{1 / MIN_NUMBER:g}."
            )


def check_acceptance(arguments: argparse.Namespace) -> None:
    if arguments.acceptance is not None and not 0 <= arguments.acceptance <= 1:
        raise InvalidParams(f"--acceptance is {arguments.acceptance}; give a share from 0 to 1.")


def load(arguments: argparse.Namespace) -> TraceSlice:
    from quire.bench.serve.traces import TraceSlice, read_trace, slice_trace
    from quire.bench.simulate import random_entries

    if arguments.trace is None:
        lengths = arguments.prompt_tokens or PROMPT_TOKENS, arguments.output_tokens or OUTPUT_TOKENS
        entries = list(random_entries(arguments.rate, arguments.num_requests or NUM_REQUESTS, *lengths, 0))
        return TraceSlice(entries, len(entries), 0, 0, 0)
    return slice_trace(
        read_trace(arguments.trace),
        num_requests=arguments.num_requests,
        max_prompt_tokens=arguments.max_prompt_tokens,
        max_output_tokens=arguments.max_output_tokens,
        speed=arguments.trace_speed or 1.0,
    )
