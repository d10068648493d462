"""`quire advise`: which options would serve a load better, and by how much."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from typing import Any

from quire.cli.load import FIXED, add_acceptance, add_load, add_profile, check_acceptance, check_load, load
from quire.cli.options import add_engine_options, add_json, engine_config
from quire.errors import InvalidParams
from quire.progress import bar
from quire.store import resolve

MAX_REQUESTS = 2_000  # of a trace, if --num-requests does not say
GOALS = ("e2e", "ttft", "tpot", "throughput")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_load(parser)
    parser.add_argument("--goal", choices=GOALS, default="e2e", help="what should become better; default %(default)s")
    measure = "measure the options that change the cost of a step (minutes each), and keep what was measured"
    parser.add_argument("--measure", action="store_true", help=measure)
    add_acceptance(parser)
    add_profile(parser)
    add_json(parser)
    add_engine_options(parser, without=FIXED)


def run(arguments: argparse.Namespace) -> None:
    """Say which options would serve a load better, by simulating each."""
    check_load(arguments)
    check_acceptance(arguments)
    if arguments.measure and arguments.profile:
        raise InvalidParams("--measure measures this machine, and --profile is of another; leave one out.")
    if arguments.trace is not None and arguments.num_requests is None:
        arguments.num_requests = MAX_REQUESTS
    config = engine_config(arguments)
    from quire.bench.advise import advise
    from quire.bench.profiles import find_profile

    profile = find_profile(config, arguments.profile)
    entries = load(arguments).entries
    config = replace(config, model=profile.model)
    path = resolve(config.model).path
    with bar("simulating", unit="options") as report:
        document = advise(
            config, profile, entries, model_path=path, measures=arguments.measure, acceptance=arguments.acceptance,
            report=report,
        )  # fmt: skip
    document["advice"] = rank([asdict(advice) for advice in document["advice"]], arguments.goal)
    document = {"model": profile.model, "machine": profile.machine, "goal": arguments.goal, **document}
    if arguments.json:
        print(json.dumps(document))
    else:
        show(document)


def rank(advice: list[dict[str, Any]], goal: str) -> list[dict[str, Any]]:
    """The largest gains first, and last what is not known."""
    return sorted(advice, key=lambda each: (each["gains"] is None, -(each["gains"] or {}).get(goal, -1.0)))


def show(document: dict[str, Any]) -> None:
    from quire.bench.advise import WORTH

    goal = document["goal"]
    base = document["base"]
    count = document["num_requests"]
    print(f"{document['model']} on {document['machine']}, {count:,} requests with each option; as it is:")
    print(", ".join(f"{name} {describe(base, name)}" for name in GOALS) + "\n")
    worth = [each for each in document["advice"] if each["gains"] and each["gains"].get(goal, 0.0) >= WORTH]
    for each in worth:
        others = ", ".join(f"{name} {100 * gain:+.0f}%" for name, gain in each["gains"].items() if name != goal)
        print(f"{100 * each['gains'][goal]:.0f}% better {goal}: {each['command']}")
        print(f"    {each['note'] or others}")
    if not worth:
        print(f"No option that is known makes {goal} at least {100 * WORTH:.0f}% better.")
    unknown = [each for each in document["advice"] if each["gains"] is None]
    if unknown:
        print("\nNot known:")
    for each in unknown:
        print(f"{each['option']}: {each['note']}")


def describe(base: dict[str, Any], goal: str) -> str:
    from quire.bench.advise import GOALS as NAMES
    from quire.bench.advise import mean

    name, is_time = NAMES[goal]
    value = mean(base[name])
    return "-" if value is None else f"{value:,.1f} {'ms' if is_time else 'tokens/s'}"
