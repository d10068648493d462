"""`quire bench serve`: its options and its table."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from quire.cli.bench.output import add_output, finish
from quire.progress import bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server(parser)
    add_times(parser)
    add_prompts(parser)
    add_trace(parser)
    add_output(parser)
    parser.add_argument("--json-requests", action="store_true", help="as --json, with a row for every request")
    slo = "limits in ms, such as ttft:500,tpot:50,e2e:9000: goodput counts the requests within them"
    parser.add_argument("--slo", metavar="LIMITS", help=slo)


def add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("which server")
    group.add_argument("--base-url", metavar="URL", help="a running server, with or without /v1")
    group.add_argument("--api-key", metavar="KEY", help="bearer token for the server")
    group.add_argument("--spawn", action="store_true", help="start `quire serve`, and stop it afterwards")
    group.add_argument(
        "--spawn-options", metavar="TEXT", help="options of the started server, as in --spawn-options='--threads 1'"
    )
    group.add_argument(
        "--model", help="model to request (default: the first that the server lists), or to serve with --spawn"
    )


def add_times(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("when to send")
    group.add_argument("--rate", type=float, metavar="R", help="open loop: requests a second, or inf for all at once")
    group.add_argument(
        "--burstiness", type=float, metavar="B", help="of --rate: 1 (default) is Poisson, less is burstier"
    )
    group.add_argument("--concurrency", type=int, metavar="N", help="closed loop: requests in flight; default 8")
    group.add_argument("--num-requests", type=int, metavar="N", help="default 100, or all of a trace")
    group.add_argument("--warmup", type=int, default=1, metavar="N", help="requests before the measurement; default 1")
    group.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds for each request; default 600"
    )
    seed = "fixes prompts and arrival times; a second run with the same seed hits the server's prefix cache"
    group.add_argument("--seed", type=int, metavar="N", help=seed)


def add_prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to send")
    group.add_argument("--chat", action="store_true", help="use /v1/chat/completions instead of /v1/completions")
    group.add_argument("--prompt-words", type=int, metavar="N", help="random words in each prompt; default 115")
    group.add_argument("--prompt-tokens", type=int, metavar="N", help="random token ids instead of words: exactly N")
    group.add_argument("--output-tokens", type=int, metavar="N", help="new tokens for each prompt; default 64")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0, greedy")
    strict = "send only OpenAI's fields: without ignore_eos, so answers may be shorter than --output-tokens"
    group.add_argument("--no-extra-fields", dest="extra_fields", action="store_false", help=strict)


def add_trace(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("recorded traffic")
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="lengths and times of requests: Azure's CSV, Mooncake's JSON lines, or quire serve --trace",
    )
    group.add_argument("--trace-speed", type=float, metavar="X", help="replay the trace X times as fast")
    group.add_argument("--trace-ids", action="store_true", help="send token ids, with exactly the trace's lengths")
    ratio = "converts lengths to words; measured on the server if not given"
    group.add_argument("--tokens-per-word", type=float, metavar="R", help=ratio)
    group.add_argument("--max-prompt-tokens", type=int, metavar="N", help="skip requests with longer prompts")
    group.add_argument("--max-output-tokens", type=int, metavar="N", help="limit the answers of the trace to N tokens")


def run(arguments: argparse.Namespace) -> None:
    from quire.bench.serve.report import format_report
    from quire.bench.serve.run import lower_priority
    from quire.bench.serve.run import run as measure
    from quire.bench.serve.settings import Settings

    given = {name: value for name, value in vars(arguments).items() if name in Settings.__slots__}
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    settings = Settings(**{**given, "seed": seed})
    arguments.json |= arguments.json_requests
    lower_priority()
    with bar("requests", unit="requests") as report:
        document = measure(settings, report, with_requests=arguments.json_requests or arguments.html is not None)
    without = () if arguments.json_requests else ("requests",)
    finish("serve", document, arguments, lambda document: print(format_report(document)), without=without)
    if document["interrupted"]:
        raise KeyboardInterrupt  # the report is printed; the exit status tells that it is incomplete
