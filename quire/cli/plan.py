"""`quire plan`: what a model takes and does on this machine or on a GPU, before it is loaded."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.load import TRACES, add_acceptance, add_profile, check_acceptance, check_counts, check_positive
from quire.cli.options import add_engine_options, add_json, engine_config
from quire.errors import InvalidParams

if TYPE_CHECKING:
    from quire.bench.plan import Origin
    from quire.capacity.plan import PlannedEngine
    from quire.config import EngineConfig

# Options that a plan does not depend on. Speculation is planned by --acceptance.
WITHOUT = ("seed", "swap_memory", "speculate", "exit_head", "tensor_parallel_size")
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128
OF_SPEED = ("trace", "price", "acceptance")
OF_TRACE = ("slo", "trace_speed", "num_requests", "attainment")
ATTAINMENT = 0.99


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS, metavar="N", help="default %(default)s")
    group.add_argument("--output-tokens", type=int, default=OUTPUT_TOKENS, metavar="N", help="default %(default)s")
    group.add_argument("--trace", type=Path, metavar="FILE", help=f"{TRACES}: how many replicas keep --slo")
    group.add_argument("--slo", metavar="LIMITS", help="of --trace, such as ttft=1s,tpot=50ms")
    group.add_argument("--attainment", type=float, metavar="X", help=f"share of requests within them; {ATTAINMENT}")
    group.add_argument("--trace-speed", type=float, metavar="X", help="replay the trace X times as fast")
    group.add_argument("--num-requests", type=int, metavar="N", help="of the trace; default: its busiest 10,000")
    gpu = "plan for a GPU from its data sheet instead of for this machine: h200, h100, a100, l40s, 4090, ..."
    parser.add_argument("--gpu", metavar="NAME", help=gpu)
    parser.add_argument("--price", type=float, metavar="X", help="of the machine for an hour: prices of tokens")
    add_acceptance(parser)
    add_profile(parser)
    add_json(parser)
    add_engine_options(parser, without=WITHOUT)


def run(arguments: argparse.Namespace) -> None:
    """Plan for a model: memory, speed, prices and what bounds them, without loading it."""
    check(arguments)
    config = engine_config(arguments)
    from quire.bench.plan import plan_gpu, plan_here
    from quire.capacity.figures import Load
    from quire.capacity.plan import describe_memory, plan_speed

    found = plan_gpu(config, arguments.gpu) if arguments.gpu else plan_here(config, arguments.profile)
    load = Load(arguments.prompt_tokens, arguments.output_tokens)
    document: dict[str, Any] = {
        "model": found.size.model,
        "origin": asdict(found.origin),
        "load": asdict(load),
        "memory": describe_memory(found.size, found.sizes, found.memory, load),
    }
    if found.engine is not None:
        document |= plan_speed(found.engine, load, price_per_hour=arguments.price, acceptance=arguments.acceptance)
        if arguments.trace:
            document["replicas"] = find_replicas(arguments, config, found.engine, found.origin)
    elif given := [name for name in OF_SPEED if getattr(arguments, name) is not None]:
        raise InvalidParams(
            f"--{given[0]} needs the speed of this machine, of which no steps have been measured. Measure them: quire "
            f"bench phases {config.model} --save; or plan for a --gpu."
        )
    if arguments.json:
        print(json.dumps(document))
    else:
        show(document)


def find_replicas(
    arguments: argparse.Namespace, config: EngineConfig, engine: PlannedEngine, origin: Origin
) -> dict[str, Any]:
    """The fewest replicas that keep --slo on the trace."""
    from quire.bench.search import Objective, plan_replicas
    from quire.bench.serve.metrics import parse_slo
    from quire.bench.serve.traces import read_trace, slice_trace
    from quire.capacity.profile import CapacityProfile
    from quire.engine.batching import make_policy

    replayed = slice_trace(
        read_trace(arguments.trace),
        num_requests=arguments.num_requests,
        max_prompt_tokens=None,
        max_output_tokens=None,
        speed=arguments.trace_speed or 1.0,
    )
    profile = CapacityProfile(engine.size.model, origin.machine, engine.sizes, engine.cost, 0.0, 0.0)
    objective = Objective(parse_slo(arguments.slo), arguments.attainment or ATTAINMENT)
    policy = partial(make_policy, config, engine.sizes.max_requests)
    return plan_replicas(profile, engine.size, replayed.entries, objective, policy)


def check(arguments: argparse.Namespace) -> None:
    check_counts(arguments, ("prompt_tokens", "output_tokens", "num_requests"))
    check_positive(arguments, ("price", "trace_speed"))
    check_acceptance(arguments)
    if arguments.attainment is not None and not 0 < arguments.attainment <= 1:
        raise InvalidParams(f"--attainment is {arguments.attainment}; give a share above 0, at most 1.")
    given = [name for name in OF_TRACE if getattr(arguments, name) is not None]
    if given and arguments.trace is None:
        raise InvalidParams(f"--{given[0].replace('_', '-')} needs --trace; leave it out.")
    if arguments.trace and not arguments.slo:
        raise InvalidParams("--trace needs --slo, the limits that replicas must keep, such as ttft=1s,tpot=50ms.")
    if arguments.gpu and arguments.profile:
        raise InvalidParams("--gpu plans from a data sheet, and --profile from measurements; leave one out.")


def show(document: dict[str, Any]) -> None:
    origin, load = document["origin"], document["load"]
    print(f"{document['model']} on {origin['machine']}, {origin['note']}\n")
    show_memory(document["memory"], load)
    if "batches" not in document:
        return
    if not document["batches"]:
        print(f"\nNo request of {load['prompt_tokens']:,} + {load['output_tokens']:,} tokens fits.")
        return
    show_batches(document)
    for row in document.get("speculation", ()):
        gain = f"{row['speedup']:.2f} times as fast with {row['num_drafts']} drafts" if row["num_drafts"] else "no gain"
        print(f"speculation at batch {row['batch']:<10,} {gain}")
    if replicas := document.get("replicas"):
        show_replicas(replicas, document.get("price"))
    if price := document.get("price"):
        print(
            f"\nA million tokens at {price['per_hour']:g} an hour and batch {price['batch']:,}: "
            f"{price['output']:.4g} out, {price['input']:.4g} in, {price['cached']:.2g} cached"
        )


def show_replicas(found: dict[str, Any], price: dict[str, Any] | None) -> None:
    limits = ", ".join(f"{name} within {limit:g} ms" for name, limit in found["limits_ms"].items())
    summary, count = found["summary"], found["replicas"]
    few, many = found["range"] or (count, count)
    between = f" ({few:,} to {many:,})" if many and few < many else ""
    if many is None:
        between = f" ({few:,} or more: with the slowest cost that fits the measurements no number is enough)"
    cost = f", {price['per_hour'] * count:,.2f} an hour" if price else ""
    print(f"\n{count:,} replica{'s' if count > 1 else ''}{between}{cost}: {limits} for", end=" ")
    print(f"{100 * summary['attainment']:.1f}% of {found['num_requests']:,} requests")
    for name in ("ttft", "tpot"):
        if times := summary[f"{name}_ms"]:
            print(f"{name.upper()} {times['p50']:,.1f} ms in the median, {times['p99']:,.1f} at the 99th percentile")
    print(f"found in {found['seconds']:.1f} s by simulating {', '.join(map(str, found['tried']))} replicas")
    if found["num_left_out"] or found["num_too_long"]:
        print(
            f"Of the trace the busiest requests in a row count ({found['num_left_out']:,} left out), and "
            f"{found['num_too_long']:,} are too long for the engine."
        )


def show_memory(memory: dict[str, Any], load: dict[str, Any]) -> None:
    from quire.engine.memory import readable

    for name, text in MEMORY.items():
        print(f"{text:<44}{readable(memory[name]):>12}")
    length = load["prompt_tokens"] + load["output_tokens"]
    print(f"{'longest request':<44}{memory['longest_request']:>12,} tokens")
    print(f"{f'requests of {length:,} tokens at once':<44}{memory['requests_that_fit']:>12,}")
    print(f"{'requests of the longest kind at once':<44}{memory['longest_requests_that_fit']:>12,}")


def show_batches(document: dict[str, Any]) -> None:
    load, prefill = document["load"], document["prefill"]
    print(f"\nPrompts of {load['prompt_tokens']:,} tokens, answers of {load['output_tokens']:,}, 90% ranges below:")
    print("".join(f"{title:>{width}}" for title, width in COLUMNS))
    for row in document["batches"]:
        mark = " *" if row["batch"] == document["best_batch"] else ""
        cells = [f"{row['batch']:,}{mark}", *(f"{row[name]:,.2f}" for name in SHOWN), row["bound_by"]]
        print("".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True)))
        ranges = ["", *(" to ".join(f"{value:,.1f}" for value in row["ranges"][name]) for name in SHOWN), ""]
        print("".join(f"{cell:>{width}}" for cell, (_, width) in zip(ranges, COLUMNS, strict=True)))
    print("* the best batch: the smallest with 95% of the highest throughput.", end=" ")
    print(f"Prompts are bound by {prefill['bound_by']}.")


MEMORY = {
    "weights_bytes": "weights",
    "tables_bytes": "tables of positions",
    "activations_bytes": "activations and logits of the largest step",
    "process_bytes": "the process besides",
    "idle_bytes": "together, before any request",
    "cache_bytes": "cache, if all of it is used",
    "kv_bytes_per_token": "cache for a token",
    "request_bytes": "cache for a request of this load",
}
SHOWN = ("ttft_ms", "tpot_ms", "output_tokens_per_s")
COLUMNS = (("batch", 10), ("TTFT ms", 22), ("TPOT ms", 20), ("output tokens/s", 26), ("bound by", 12))
