"""`quire plan`: what a model takes and does on this machine or on a GPU, before it is loaded."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quire.cli.options import add_engine_options, add_json, engine_config
from quire.errors import InvalidParams

# Options that a plan does not depend on. Speculation is planned by --acceptance.
WITHOUT = ("seed", "swap_memory", "speculate", "exit_head")
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS, metavar="N", help="default %(default)s")
    group.add_argument("--output-tokens", type=int, default=OUTPUT_TOKENS, metavar="N", help="default %(default)s")
    gpu = "plan for a GPU from its data sheet instead of for this machine: h200, h100, a100, l40s, 4090, ..."
    parser.add_argument("--gpu", metavar="NAME", help=gpu)
    parser.add_argument("--price", type=float, metavar="X", help="of the machine for an hour: prices of tokens")
    parser.add_argument(
        "--acceptance", type=float, metavar="A", help="chance that a draft is right: speculation's gain"
    )
    parser.add_argument("--profile", type=Path, metavar="FILE", help="default: what quire bench phases --save measured")
    add_json(parser)
    add_engine_options(parser, without=WITHOUT)


def run(arguments: argparse.Namespace) -> None:
    """Plan for a model without loading it."""
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
    if arguments.json:
        print(json.dumps(document))
    else:
        show(document)


def check(arguments: argparse.Namespace) -> None:
    for name in ("prompt_tokens", "output_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise InvalidParams(f"--{name.replace('_', '-')} is {value}; give a whole number of at least 1.")
    if arguments.price is not None and not 0 < arguments.price < float("inf"):
        raise InvalidParams(f"--price is {arguments.price}; give a number above 0.")
    if arguments.acceptance is not None and not 0 <= arguments.acceptance <= 1:
        raise InvalidParams(f"--acceptance is {arguments.acceptance}; give a share from 0 to 1.")
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
    if price := document.get("price"):
        print(
            f"\nA million tokens at {price['per_hour']:g} an hour and batch {price['batch']:,}: "
            f"{price['output']:.4g} out, {price['input']:.4g} in, {price['cached']:.2g} cached"
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
