"""`quire simulate`: what a measured engine would do with a recorded load, without computing a token."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.errors import say
from quire.cli.options import add_engine_options, add_json, engine_config
from quire.errors import InvalidParams
from quire.progress import bar

if TYPE_CHECKING:
    from quire.bench.serve.traces import TraceSlice
    from quire.capacity.profile import CapacityProfile
    from quire.config import EngineConfig

# Options of an engine that a simulation cannot change: they are part of the measured costs.
FIXED = ("seed", "weights", "swap_memory", "speculate", "exit_head", "kv_memory", "block_size")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="recorded traffic: Azure's CSV or Mooncake's JSON lines"
    )
    group.add_argument("--trace-speed", type=float, default=1.0, metavar="X", help="replay the trace X times as fast")
    group.add_argument("--rate", type=float, metavar="R", help="instead of a trace: R random requests a second")
    group.add_argument("--num-requests", type=int, metavar="N", help="default 100, or all of a trace")
    group.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="of --rate; default %(default)s")
    group.add_argument("--output-tokens", type=int, default=64, metavar="N", help="of --rate; default %(default)s")
    group.add_argument("--max-prompt-tokens", type=int, metavar="N", help="skip requests with longer prompts")
    group.add_argument("--max-output-tokens", type=int, metavar="N", help="limit the answers of the trace to N tokens")
    group.add_argument("--slo", metavar="LIMITS", help="limits in ms, such as ttft:500,tpot:50: goodput counts them")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="default: what quire bench phases --save measured")
    parser.add_argument("--ranges", action="store_true", help="90%% ranges, from 20 simulations with resampled costs")
    parser.add_argument(
        "--compare", metavar="URL", help="replay the trace on a running server too, and print the errors"
    )
    add_json(parser)
    add_engine_options(parser, without=FIXED)


def run(arguments: argparse.Namespace) -> None:
    """Simulate a load on a measured engine."""
    check(arguments)
    config = engine_config(arguments)
    from quire.bench.serve.metrics import parse_slo
    from quire.bench.simulate import compare, ranges, simulate
    from quire.engine.batching import choose_batching

    profile = find_profile(arguments, config)
    replayed = load(arguments, profile)
    limits = parse_slo(arguments.slo) if arguments.slo else {}
    from quire.core.policy import Policy

    def policy() -> Policy:
        return Policy(choose_batching(config, profile.sizes.max_requests), config.order)

    document = simulate(profile, replayed.entries, policy(), limits)
    if arguments.ranges:
        document["ranges"] = ranges(profile, replayed.entries, policy)
    if arguments.compare:
        document["measured"] = replay_live(arguments)
        document["comparison"] = compare(document, document["measured"])
    if arguments.json:
        print(json.dumps(document))
    else:
        show(document)


def check(arguments: argparse.Namespace) -> None:
    if (arguments.trace is None) == (arguments.rate is None):
        raise InvalidParams("Say what to simulate: --trace FILE, or --rate R.")
    if arguments.compare and arguments.trace is None:
        raise InvalidParams("--compare replays a trace; give --trace.")
    for name in ("trace_speed", "rate"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise InvalidParams(f"--{name.replace('_', '-')} is {value}; give a number above 0.")
    for name in ("num_requests", "prompt_tokens", "output_tokens", "max_prompt_tokens", "max_output_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise InvalidParams(f"--{name.replace('_', '-')} is {value}; give a whole number of at least 1.")


def find_profile(arguments: argparse.Namespace, config: EngineConfig) -> CapacityProfile:
    """The measured engine, with the sizes that the command line changes."""
    from quire.bench.phases import profile_path
    from quire.capacity.profile import load_profile

    profile = load_profile(arguments.profile or profile_path(config))
    target_s = None if config.itl_target_ms is None else config.itl_target_ms / 1e3
    resized = profile.resized(
        num_blocks=config.num_blocks,
        max_requests=config.max_requests,
        max_tokens_per_step=config.max_tokens_per_step,
        max_len=config.max_len,
        prefix_cache=config.prefix_cache,
        itl_target_s=target_s,
    )
    sizes = resized.sizes
    if sizes.max_tokens_per_step < sizes.max_requests:
        raise InvalidParams(
            f"max_tokens_per_step is {sizes.max_tokens_per_step}, below max_requests ({sizes.max_requests}): every "
            "running request needs a token a step. Raise the one or lower the other."
        )
    return resized


def load(arguments: argparse.Namespace, profile: CapacityProfile) -> TraceSlice:
    from quire.bench.serve.traces import TraceSlice, read_trace, slice_trace
    from quire.bench.simulate import random_entries

    if arguments.trace is None:
        entries = random_entries(
            arguments.rate, arguments.num_requests or 100, arguments.prompt_tokens, arguments.output_tokens, 0
        )
        return TraceSlice(entries, len(entries), 0, 0, 0)
    return slice_trace(
        read_trace(arguments.trace),
        num_requests=arguments.num_requests,
        max_prompt_tokens=arguments.max_prompt_tokens,
        max_output_tokens=arguments.max_output_tokens,
        speed=arguments.trace_speed,
    )


def replay_live(arguments: argparse.Namespace) -> dict[str, Any]:
    """The same trace on a running server, with prompts of token ids of the trace's lengths."""
    from quire.bench.serve.run import run as measure
    from quire.bench.serve.settings import Settings

    settings = Settings(
        seed=random.SystemRandom().randrange(1 << 32),
        base_url=arguments.compare,
        trace=arguments.trace,
        trace_speed=arguments.trace_speed,
        trace_ids=True,
        num_requests=arguments.num_requests,
        max_prompt_tokens=arguments.max_prompt_tokens,
        max_output_tokens=arguments.max_output_tokens,
    )
    with bar("requests", unit="requests") as report:
        return measure(settings, report)


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
    for name, (low, high) in document.get("ranges", {}).items():
        print(f"{name:<32}{low:>12,.2f} to {high:,.2f}")
    for row in document.get("comparison", ()):
        off = "-" if row["error"] is None else f"{100 * row['error']:+.1f}%"
        simulated, measured = ("-" if row[key] is None else f"{row[key]:,.2f}" for key in ("simulated", "measured"))
        print(f"{row['figure']:<32}{simulated:>12} simulated{measured:>12} measured{off:>10}")
    wall_s = document["wall_s"]
    say(f"{document['simulated_s']:,.1f} s simulated in {wall_s:.2f} s")
