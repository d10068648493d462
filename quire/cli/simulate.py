"""`quire simulate`: what a measured engine would do with a recorded load, without computing a token."""

from __future__ import annotations

import argparse
import json
import random
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.cli.bench.output import add_output, check_html, finish
from quire.cli.errors import say
from quire.cli.load import (
    ENGINES,
    FIXED,
    NUM_REQUESTS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    add_load,
    add_profile,
    check_counts,
    check_load,
    load,
)
from quire.cli.options import add_engine_options, engine_config
from quire.errors import InvalidParams
from quire.progress import bar

if TYPE_CHECKING:
    from quire.capacity.profile import CapacityProfile
    from quire.config import EngineConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = add_load(parser)
    group.add_argument("--slo", metavar="LIMITS", help="limits, such as ttft=1s,tpot=50ms: goodput counts them")
    add_profile(parser)
    parser.add_argument("--replicas", type=int, metavar="N", help="engines of a server, with the router between them")
    servers = "servers of that many replicas, which get requests in turn; processes simulate them side by side"
    parser.add_argument("--servers", type=int, metavar="N", help=servers)
    parser.add_argument("--ranges", action="store_true", help="90%% ranges, from 20 simulations with resampled costs")
    parser.add_argument(
        "--compare", metavar="URL", help="replay the trace on a running server too, and print the errors"
    )
    add_output(parser)
    add_engine_options(parser, without=FIXED)


def run(arguments: argparse.Namespace) -> None:
    """Simulate a load on a measured engine."""
    check(arguments)
    config = engine_config(arguments)
    from quire.bench.profiles import find_profile
    from quire.bench.serve.metrics import parse_slo
    from quire.bench.simulate import compare, ranges, simulate
    from quire.engine.batching import make_policy

    profile = find_profile(config, arguments.profile)
    limits = parse_slo(arguments.slo) if arguments.slo else {}
    policy = partial(make_policy, config, profile.sizes.max_requests)
    if arguments.replicas or arguments.servers:
        show_replicas(simulate_replicas(arguments, config, profile, limits), arguments)
        return
    replayed = load(arguments)
    document = simulate(profile, replayed.entries, policy(), limits, with_requests=arguments.html is not None)
    document["trace"] = {
        "num_read": replayed.num_read,
        "num_skipped_prompt_too_long": replayed.num_too_long,
        "num_skipped_without_answer": replayed.num_empty,
        "num_answers_shortened": replayed.num_shortened,
    }
    if arguments.ranges:
        document["ranges"] = ranges(profile, replayed.entries, policy)
    if arguments.compare:
        measured = replay_live(arguments)
        document["measured_requests"] = measured.pop("requests", [])
        document["measured"] = measured
        document["comparison"] = compare(document, measured)
    finish("simulate", document, arguments, show, without=("requests", "measured_requests"))


def check(arguments: argparse.Namespace) -> None:
    check_load(arguments)
    check_html(arguments.html)
    for name in ("compare", "ranges", "html"):
        if getattr(arguments, name) and (arguments.replicas or arguments.servers):
            raise InvalidParams(f"--{name} is of one engine; leave it out, or --replicas and --servers.")
    if arguments.compare and arguments.trace is None:
        raise InvalidParams("--compare replays a trace; give --trace.")
    check_counts(arguments, ENGINES)


def simulate_replicas(
    arguments: argparse.Namespace,
    config: EngineConfig,
    profile: CapacityProfile,
    limits: dict[str, float],
) -> dict[str, Any]:
    """The load on several servers of several engines."""
    from quire.bench.replicas import PoissonLoad, RecordedLoad, ServerLoad, simulate_servers
    from quire.bench.simulate import without_idle_cache
    from quire.engine.batching import make_policy

    begin_s = time.perf_counter()
    num_replicas, num_servers = arguments.replicas or 1, arguments.servers or 1
    read: PoissonLoad | RecordedLoad
    if arguments.trace is None:
        lengths = arguments.prompt_tokens or PROMPT_TOKENS, arguments.output_tokens or OUTPUT_TOKENS
        read = PoissonLoad(arguments.rate, arguments.num_requests or NUM_REQUESTS, *lengths)
    else:
        read = RecordedLoad(load(arguments).entries)
    totals = simulate_servers(
        ServerLoad(
            without_idle_cache(profile, read()),
            partial(make_policy, config, profile.sizes.max_requests),
            read,
            num_replicas,
            num_servers,
            limits,
        )
    )
    return {
        "model": profile.model,
        "machine": profile.machine,
        "replicas": num_replicas,
        "servers": num_servers,
        "summary": totals.summary(),
        "engine": {"steps": totals.num_steps, "preemptions": totals.num_preemptions},
        "wall_s": time.perf_counter() - begin_s,
        "step_error": {"median": profile.median_error, "p95": profile.p95_error},
    }


def show_replicas(document: dict[str, Any], arguments: argparse.Namespace) -> None:
    from quire.bench.serve.report import LATENCIES, TAILS, latency

    if arguments.json:
        print(json.dumps(document))
        return
    summary = document["summary"]
    print(
        f"{document['model']} on {document['servers']:,} servers of {document['replicas']:,} replicas, each on "
        f"{document['machine']}, simulated\n"
    )
    print(
        f"{summary['num_ok']:,} requests, {summary['num_failed']:,} refused, in {summary['duration_s']:,.1f} s:",
        end=" ",
    )
    print(
        f"{summary['requests_per_s'] or 0:,.2f} requests and {summary['output_tokens_per_s'] or 0:,.0f} tokens a second"
    )
    if arguments.slo:
        print(f"{100 * (summary['attainment'] or 0):.1f}% of them within {arguments.slo}")
    print(f"\n{'ms':<32}" + "".join(f"{tail:>12}" for tail in TAILS))
    for name, text in LATENCIES.items():
        print(latency(text, summary[name]))
    say(f"{document['engine']['steps']:,} steps simulated in {document['wall_s']:.2f} s")


def replay_live(arguments: argparse.Namespace) -> dict[str, Any]:
    """The same trace on a running server, with prompts of token ids of the trace's lengths."""
    from quire.bench.serve.run import run as measure
    from quire.bench.serve.settings import Settings

    settings = Settings(
        seed=random.SystemRandom().randrange(1 << 32),
        base_url=arguments.compare,
        trace=arguments.trace,
        trace_speed=arguments.trace_speed or 1.0,
        trace_ids=True,
        num_requests=arguments.num_requests,
        max_prompt_tokens=arguments.max_prompt_tokens,
        max_output_tokens=arguments.max_output_tokens,
    )
    with bar("requests", unit="requests") as report:
        return measure(settings, report, with_requests=arguments.html is not None)


def show(document: dict[str, Any]) -> None:
    from quire.bench.serve.report import LATENCIES, TAILS, counts, latency

    engine, error = document["engine"], document["step_error"]
    print(f"{document['model']} on {document['machine']}, simulated: costs are {100 * error['median']:.1f}% off in the")
    print(f"median and {100 * error['p95']:.1f}% at the 95th percentile of steps that were not fitted\n")
    for name, value in counts(document["summary"]):
        print(f"{name:<32}{value}")
    print(f"\n{'ms':<32}" + "".join(f"{tail:>12}" for tail in TAILS))
    for name, text in LATENCIES.items():
        print(latency(text, document["summary"][name]))
    print(
        f"\n{engine['steps']:,} steps, {100 * engine['busy_share']:.0f}% of the time busy, {engine['preemptions']:,} "
        f"preemptions, {engine['cached_tokens']:,} tokens from the cache"
    )
    trace = document["trace"]
    if trace["num_skipped_without_answer"] or trace["num_skipped_prompt_too_long"]:
        print(
            f"Of {trace['num_read']:,} requests {trace['num_skipped_without_answer']:,} without an answer and "
            f"{trace['num_skipped_prompt_too_long']:,} with a longer prompt are left out."
        )
    if failed := document["summary"]["num_failed"]:
        print(f"Refused, because they are longer than the engine takes: {failed:,}.")
    for name, (low, high) in document.get("ranges", {}).items():
        print(f"{name:<32}{low:>12,.2f} to {high:,.2f}")
    for row in document.get("comparison", ()):
        off = "-" if row["error"] is None else f"{100 * row['error']:+.1f}%"
        simulated, measured = ("-" if row[key] is None else f"{row[key]:,.2f}" for key in ("simulated", "measured"))
        print(f"{row['figure']:<32}{simulated:>12} simulated{measured:>12} measured{off:>10}")
    wall_s = document["wall_s"]
    say(f"{document['simulated_s']:,.1f} s simulated in {wall_s:.2f} s")
