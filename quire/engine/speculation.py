"""Builds the controller of speculation from a configuration, and loads a draft model. `build.py` calls it.

Draft heads are in `draft_heads.py`, which is imported only if one is named: a start takes several milliseconds less.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quire.config import EngineConfig, parse_speculate
from quire.engine.backend import choose_quantize
from quire.engine.memory import check_weights
from quire.errors import InvalidParams
from quire.kernels import Kernels
from quire.speculative.controller import Controller
from quire.speculative.drafting import DEPTHS, Drafting
from quire.speculative.proposer import ModelProposer, Proposer
from quire.speculative.suffix import SuffixProposer
from quire.store import resolve
from quire.text.tokenizers.tokenizer import load_tokenizer
from quire.weights.loader import LoadedModel, build_model, has_tiles, opened, survey, weight_bytes

FREE_DRAFTS = {"cpu": 12.0, "cuda": 256.0}  # how many drafts double the duration of a small step, until measured
# Of a row: on a CPU more take as long as they gain, on a GPU kernels verify rows of up to 16 tokens.
MAX_DRAFTS = {"cpu": 10, "cuda": 15}
MAX_GPU_TOKENS = 1024  # of a step with drafts: larger ones are not captured
NUM_COMPARED = 512  # tokens of two vocabularies
HEAD_KINDS = ("block", "medusa", "eagle", "mtp")


def load_draft_model(
    config: EngineConfig, target: LoadedModel, path: Path, ops: Kernels, dtype: str
) -> LoadedModel | None:
    """The model of `draft:MODEL`, if there is one. It must have the target's vocabulary."""
    methods = parse_speculate(config.speculate) or []
    names = [method.value for method in methods if method.kind == "draft"]
    if not names:
        return None
    if len(names) > 1:
        raise InvalidParams(f"speculate names {len(names)} draft models; give one.", "speculate")
    if ops.native is None:
        raise InvalidParams("A draft model needs quire's own CPU kernels; leave it out.", "speculate")
    draft_path = resolve(names[0]).path
    with opened(draft_path) as (described, checkpoint):
        model = replace(described, max_len=target.config.max_len)
        stored = survey(model, checkpoint, ops)
        check_weights(weight_bytes(stored, dtype), "cpu")
        check_vocabulary(path, draft_path, names[0])
        quantize = choose_quantize(config.quantize, stored, tiled=has_tiles(ops, dtype))
        return build_model(model, checkpoint, dtype=dtype, ops=ops, quantize=quantize)


def check_vocabulary(path: Path, draft_path: Path, name: str) -> None:
    ours, theirs = load_tokenizer(path), load_tokenizer(draft_path)
    size = min(ours.vocab_size, theirs.vocab_size)
    for token in range(0, size, max(1, size // NUM_COMPARED)):
        if ours.token_text(token) != theirs.token_text(token):
            raise InvalidParams(
                f"{name} cannot draft for this model: token {token} is {theirs.token_text(token)!r} there and "
                f"{ours.token_text(token)!r} here. Name a model with the same tokenizer.",
                "speculate",
            )


def build_controller(
    config: EngineConfig, ops: Kernels, max_tokens_per_step: int, vocab_size: int, models: Sequence[ModelProposer]
) -> Controller | None:
    """None if speculation is off."""
    methods = parse_speculate(config.speculate)
    if methods is None or not speculates(config, ops):
        return None
    has_head = ops.fused is not None and any(method.kind == "eagle" for method in methods)
    drafting = Drafting("eagle", DEPTHS[-1]) if has_head else None
    plugins = [load_plugin(method.value) for method in methods if method.kind == "plugin"]
    return Controller(
        [SuffixProposer(only_chains=has_head)],  # nothing is drafted behind a step with trees
        min(max_tokens_per_step, MAX_GPU_TOKENS) if ops.device == "cuda" else max_tokens_per_step,
        vocab_size,
        FREE_DRAFTS[ops.device],
        models,
        plugins,
        MAX_DRAFTS[ops.device],
        is_pipelined=ops.fused is not None,
        drafting=drafting,
    )


def names_heads(config: EngineConfig) -> bool:
    """Whether `speculate` names a draft head."""
    return any(method.kind in HEAD_KINDS for method in parse_speculate(config.speculate) or [])


def names_exit(config: EngineConfig) -> bool:
    """Whether the target is split at an exit."""
    methods = parse_speculate(config.speculate) or []
    return config.exit_head is not None or any(method.kind == "self" for method in methods)


def speculates(config: EngineConfig, ops: Kernels) -> bool:
    """Whether speculation is on. `auto` is on where drafts change no bit of an answer: with quire's own CPU kernels,
    and with `exact`."""
    methods = parse_speculate(config.speculate)
    return methods is not None and (bool(methods) or ops.native is not None or ops.exact)


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
