"""`quire bench`: measure the speed of the engine alone, or of a server."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from quire.cli.options import add_engine_options, add_json, engine_config
from quire.errors import InvalidParams
from quire.progress import bar
from quire.store import resolve

COLUMNS = ("batch", "prefill_tokens_per_s", "decode_tokens_per_s", "ttft_ms", "tpot_ms", "total_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="what to measure", metavar="KIND", required=True)
    about = "Measure prefill and decode of the engine alone, with random prompts, greedy and without the prefix cache."
    offline = kinds.add_parser("offline", help=about, description=about, allow_abbrev=False)
    add_offline(offline)
    offline.set_defaults(run_kind=run_offline)
    about = "Send load to a server with OpenAI's API and measure latency and throughput at the client."
    serve = kinds.add_parser("serve", help=about, description=about, allow_abbrev=False)
    add_serve(serve)
    serve.set_defaults(run_kind=run_serve)
    about = "Answer real prompts with and without speculation, and measure what it gains."
    speculation = kinds.add_parser("speculation", help=about, description=about, allow_abbrev=False)
    add_speculation(speculation)
    speculation.set_defaults(run_kind=run_speculation)
    about = "Measure steps of prompts and of decoding over batch sizes and contexts, and fit the cost of a step."
    phases = kinds.add_parser("phases", help=about, description=about, allow_abbrev=False)
    add_phases(phases)
    phases.set_defaults(run_kind=run_phases)


def run(arguments: argparse.Namespace) -> None:
    """Measure speed."""
    arguments.run_kind(arguments)


def add_offline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", default="1,8,16,32", metavar="N,N,...", help="batch sizes; default %(default)s")
    for flag, default, text in (
        ("--prompt-tokens", 128, "tokens in each prompt"),
        ("--output-tokens", 64, "new tokens for each prompt"),
        ("--repeats", 3, "runs of each batch size; the median is reported"),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text}; default %(default)s")
    add_json(parser)
    # Random prompts make a model repeat itself, so speculation would gain more than it does with real ones.
    add_engine_options(parser, without=["prefix_cache", "max_requests", "order", "seed", "itl_target_ms", "speculate"])


def run_offline(arguments: argparse.Namespace) -> None:
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
    if arguments.json:
        print(json.dumps(document))
    else:
        show(document)


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


# Options of an engine that decide which steps there are. Measured steps depend on the scenario alone.
WITHOUT_PHASES = (
    "prefix_cache", "order", "seed", "speculate", "exit_head", "itl_target_ms", "batching", "batch_size", "batch_wait",
    "waiting_served_ratio", "max_waiting_tokens",
)  # fmt: skip


def add_phases(parser: argparse.ArgumentParser) -> None:
    text = "keep the fitted cost, for quire simulate"
    parser.add_argument("--save", action="store_true", help=text)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="where --save writes; default: quire's cache")
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="runs of each scenario; the median counts; default 3"
    )
    add_json(parser)
    add_engine_options(parser, without=WITHOUT_PHASES)


def run_phases(arguments: argparse.Namespace) -> None:
    if arguments.repeats < 1:
        raise InvalidParams(f"--repeats is {arguments.repeats}; give a whole number of at least 1.")
    config = engine_config(arguments, prefix_cache=False, speculate="off", itl_target_ms=0.0)
    from quire.bench import phases

    files = resolve(config.model)
    with bar("measuring", unit="scenarios") as report:
        profile, results = phases.run(config, files.path, repeats=arguments.repeats, report=report)
    rows = phases.rows(results, profile.cost)
    if arguments.save:
        target = arguments.profile or phases.profile_path(config)
        profile.save(target)
    if arguments.json:
        error = {"median": profile.median_error, "p95": profile.p95_error}
        print(json.dumps({"model": profile.model, "machine": profile.machine, "rows": rows, "error": error}))
        return
    print(f"{profile.model} on {profile.machine}")
    columns = ("batch", "prompt_tokens", "prefill_tokens_per_s", "decode_step_ms", "predicted_ms")
    print("  ".join(f"{name:>20}" for name in columns))
    for row in rows:
        values = (row[name] for name in columns)
        print("  ".join(f"{'-' if v is None else f'{v:,.2f}' if isinstance(v, float) else v:>20}" for v in values))
    print(
        f"Of steps that were not fitted the predicted time is {100 * profile.median_error:.1f}% off in the median, and "
        f"{100 * profile.p95_error:.1f}% at the 95th percentile."
    )
    if arguments.save:
        print(f"Saved to {target}")


def add_speculation(parser: argparse.ArgumentParser) -> None:
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
    add_json(parser)
    add_engine_options(parser, without=["prefix_cache", "order", "seed", "itl_target_ms"])


def run_speculation(arguments: argparse.Namespace) -> None:
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
    if arguments.json:
        print(json.dumps(document))
        return
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


def add_serve(parser: argparse.ArgumentParser) -> None:
    add_server(parser)
    add_times(parser)
    add_prompts(parser)
    add_trace(parser)
    add_json(parser)
    parser.add_argument("--json-requests", action="store_true", help="the same, with a row for every request")
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
        "--trace", type=Path, metavar="FILE", help="lengths and times of requests: Azure's CSV or Mooncake's JSON lines"
    )
    group.add_argument("--trace-speed", type=float, metavar="X", help="replay the trace X times as fast")
    group.add_argument("--trace-ids", action="store_true", help="send token ids, with exactly the trace's lengths")
    ratio = "converts lengths to words; measured on the server if not given"
    group.add_argument("--tokens-per-word", type=float, metavar="R", help=ratio)
    group.add_argument("--max-prompt-tokens", type=int, metavar="N", help="skip requests with longer prompts")
    group.add_argument("--max-output-tokens", type=int, metavar="N", help="limit the answers of the trace to N tokens")


def run_serve(arguments: argparse.Namespace) -> None:
    from quire.bench.serve.report import format_report
    from quire.bench.serve.run import lower_priority
    from quire.bench.serve.run import run as measure
    from quire.bench.serve.settings import Settings

    given = {name: value for name, value in vars(arguments).items() if name in Settings.__slots__}
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    settings = Settings(**{**given, "seed": seed})
    lower_priority()
    with bar("requests", unit="requests") as report:
        document = measure(settings, report, with_requests=arguments.json_requests)
    if arguments.json or arguments.json_requests:
        print(json.dumps(document))
    else:
        print(format_report(document))
    if document["interrupted"]:
        raise KeyboardInterrupt  # the report is printed; the exit status tells that it is incomplete
