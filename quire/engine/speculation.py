"""Builds the controller of speculation from a configuration. `build.py` calls it."""

from __future__ import annotations

import importlib

from quire.config import EngineConfig, parse_speculate
from quire.errors import InvalidParams
from quire.kernels import Kernels
from quire.speculative.controller import Controller
from quire.speculative.proposer import Proposer
from quire.speculative.suffix import SuffixProposer

FREE_DRAFTS = {"cpu": 12.0, "cuda": 128.0}  # how many drafts double the duration of a small step, until measured


def build_controller(
    config: EngineConfig, ops: Kernels, max_tokens_per_step: int, vocab_size: int
) -> Controller | None:
    """None if speculation is off, or cannot keep the answer: see `is_exact`."""
    methods = parse_speculate(config.speculate)
    if methods is None or (not methods and not is_free(ops)):
        return None
    proposers: list[Proposer] = [SuffixProposer(only_chains=True)]
    proposers += [load_plugin(method.value) for method in methods]
    return Controller(proposers, max_tokens_per_step, vocab_size, FREE_DRAFTS[ops.device])


def is_free(ops: Kernels) -> bool:
    """Whether `auto` speculates: with quire's own CPU kernels drafts change no bit of an answer."""
    return ops.native is not None


def load_plugin(name: str) -> Proposer:
    module_name, _, class_name = name.rpartition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
        proposer: Proposer = found()
    except Exception as error:
        raise InvalidParams(f"speculate names {name}, which could not be loaded: {error}", "speculate") from error
    missing = [each for each in ("name", "propose", "finish", "reset") if not hasattr(proposer, each)]
    if missing:
        raise InvalidParams(f"speculate names {name}, which lacks {', '.join(missing)}: see Proposer.", "speculate")
    return proposer
