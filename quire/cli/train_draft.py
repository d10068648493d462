"""`quire train-draft`: train a draft head for a model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from quire.cli.errors import say
from quire.cli.imports import import_numpy
from quire.cli.options import add_fields, add_json, add_model, engine_config
from quire.config import EngineConfig
from quire.errors import InvalidParams
from quire.store import STORED, head_directory

# Options of the engine that change neither answers nor features, or that the command chooses.
WITHOUT = (
    "model", "weights", "swap_memory", "prefix_cache", "batching", "order", "batch_size", "batch_wait",
    "waiting_served_ratio", "max_waiting_tokens", "itl_target_ms", "speculate", "exit_head", "seed", "block_size",
    "tensor_parallel_size", "max_tokens_per_step",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    kinds = (
        "block: all drafts in one pass; eagle: one after another; medusa: a few small heads; exit: after some layers"
    )
    parser.add_argument("--kind", required=True, choices=("block", "eagle", "medusa", "exit"), help=kinds)
    out = "where the head and the run are kept; 'store' is beside the model, for --speculate KIND:store"
    parser.add_argument("--out", required=True, metavar="DIR", help=out)
    prompts = (
        "prompts to train with beside the model's own questions: JSON lines with prompt, question or turns, or a "
        "prompt a line; may repeat"
    )
    parser.add_argument("--prompts", action="append", default=[], metavar="FILE", help=prompts)
    parser.add_argument("--reuse", metavar="DIR", help="train with the dialogues of another run of the same model")
    tokens = "tokens of answers to train on; default 500,000 on a CPU and 20,000,000 on a GPU"
    parser.add_argument("--tokens", type=int, metavar="N", help=tokens)
    parser.add_argument("--minutes", type=float, metavar="M", help="a limit on the whole run; the head depends on it")
    seed = (
        "the same seed, options, machine and number of threads give the same files, bit for bit, on a CPU and without "
        "--minutes; default %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help=seed)
    parser.add_argument("--resume", action="store_true", help="continue the run that was interrupted in DIR")
    parser.add_argument("--depth", type=int, metavar="N", help="drafts of a head; default 4")
    parser.add_argument("--layer", type=int, metavar="N", help="exit: layers that run before it; default half of them")
    layers = "block: layers of the head, 1 or 2; default 1 on a CPU and 2 on a GPU"
    parser.add_argument("--layers", type=int, metavar="N", help=layers)
    vocabulary = "tokens that are drafted beside those of a request; default %(default)s"
    parser.add_argument("--vocabulary", type=int, default=8192, metavar="N", help=vocabulary)
    add_json(parser)
    add_fields(parser, "engine", EngineConfig, without=WITHOUT)


def run(arguments: argparse.Namespace) -> None:
    """Train a draft head for a model, with nothing but the model."""
    given = {**vars(arguments), "prompts": tuple(arguments.prompts)}
    seed = given.pop("seed")
    config = engine_config(argparse.Namespace(**given))
    import_torch()
    from quire.train.run import train_draft
    from quire.train.settings import Settings

    options = {name: given[name] for name in Settings.__slots__ if name in given}
    is_stored = arguments.out == STORED
    directory = head_directory(config.model, arguments.kind) if is_stored else Path(arguments.out).expanduser()
    try:
        document = train_draft(config, Settings(**options, seed=seed), directory, resume=arguments.resume, say=say)
    except KeyboardInterrupt:
        if (directory / "training").is_dir():
            say("interrupted; the same command with --resume continues")
        raise
    if arguments.json:
        print(json.dumps(document))
    else:
        show(document)


def import_torch() -> None:
    """The CPU is probed before torch is imported: torch must not use instructions that do not work."""
    import_numpy()
    from quire.engine.backend import INSTALL_TORCH, is_installed
    from quire.kernels import isa

    isa.prepare()
    for package in ("torch", "safetensors"):
        if not is_installed(package):
            raise InvalidParams(f"Training needs {package}, and {package} is not installed. {INSTALL_TORCH}")


def show(document: dict[str, Any]) -> None:
    print(f"{document['kind']} head for {document['model']} in {document['directory']}")
    print(f"{'answer tokens':<34}{document['answer_tokens']:,}, {document['held_out_tokens']:,} measured")
    print(f"{'drafts that are right, by depth':<34}{' '.join(f'{each:.3f}' for each in document['acceptance'])}")
    chains = " ".join(f"{each:.2f}" for each in document["chain_tokens_per_step"])
    print(f"{'tokens a step, chains of 1, 2, ...':<34} {chains}")
    engine = document.get("engine")
    if engine is None:
        print("Speed is measured with quire's own CPU kernels only: here speed was not measured.")
        return
    counts = f"{engine['accepted']:,} of {engine['drafted']:,} drafts accepted"
    print(f"{'tokens a step, the engine':<34}{engine['tokens_per_step']:.2f}, {counts}")
    print(document["verdict"])
    print(f"Use it with --speculate {document['speculate']}")
