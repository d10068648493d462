"""Loads an exit in the middle of the target and builds what uses it: self-speculation and early exit.

`--speculate self:N` and `self:DIR` draft with it, `--exit-head DIR` lets requests exit early. `build.py` calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.config import EngineConfig, parse_speculate
from quire.core.request import Request
from quire.engine.batch import BatchBuffers
from quire.engine.draft_vocabulary import TrimmedVocabulary
from quire.engine.early_exit import EarlyExit
from quire.engine.exit_logits import MAX_ROWS, ExitLogits
from quire.engine.kept_states import KeptStates
from quire.engine.self_draft import SelfDraft
from quire.engine.split_steps import SplitSteps
from quire.errors import InvalidParams
from quire.kernels import Kernels
from quire.kernels.cpu.split import SplitModel
from quire.models.decoder import Decoder
from quire.store import find_head
from quire.weights.exit_head import LoadedExit, load_exit_head
from quire.weights.heads import Target
from quire.weights.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class Exit:
    """Where the target is split, and the trained head there, if there is one."""

    layer: int
    head: LoadedExit | None
    drafts: bool  # whether self-speculation uses it
    exits: bool  # whether requests may exit early


def load_exit(config: EngineConfig, target: LoadedModel, ops: Kernels) -> Exit | None:
    """The exit that `speculate` or `exit_head` names, if one does."""
    values = [method.value for method in parse_speculate(config.speculate) or [] if method.kind == "self"]
    named = [(f"self:{value}", "speculate", value) for value in values]
    if config.exit_head is not None:
        named.append((config.exit_head, "exit_head", config.exit_head))
    if not named:
        return None
    text, field, value = named[0]
    if ops.native is None:
        raise InvalidParams(f"{field} has {text}, and an exit needs quire's own CPU kernels; leave it out.", field)
    if target.config.gemma4 is not None and target.config.gemma4.per_layer_size:
        raise InvalidParams(
            f"{field} has {text}, and quire does not split models with embeddings for each layer.", field
        )
    if len(values) > 1:
        raise InvalidParams(f"speculate names {len(values)} exits; give one.", "speculate")
    if len(named) == 2 and not is_same(value, named[1][2]):
        raise InvalidParams(
            f"speculate has {text} and exit_head is {config.exit_head}; a model is split once, so give the same head "
            "to both.",
            "exit_head",
        )
    drafts, exits = bool(values), config.exit_head is not None
    num_layers = target.config.num_layers
    if value.isdecimal() and not exits:
        if not 1 <= int(value) < num_layers:
            raise InvalidParams(
                f"speculate has {text}, and the model has {num_layers} layers; give from 1 to {num_layers - 1}.",
                "speculate",
            )
        return Exit(int(value), None, drafts, exits)
    directory = find_head(value, config.model, "exit", field)
    head = load_exit_head(directory, Target(target.model, target.config), ops)
    return Exit(head.layer, head, drafts, exits)


def is_same(one: str, other: str) -> bool:
    return Path(one).expanduser().resolve() == Path(other).expanduser().resolve()


def build_split(
    found: Exit,
    target: Decoder,
    model: SplitModel,
    buffers: BatchBuffers,
    ops: Kernels,
    max_requests: int,
    reserve: Callable[[Request, int], int],
) -> tuple[SplitSteps, SelfDraft | None]:
    """What runs the steps of a split model, and the proposer. `buffers` are for draft passes."""
    native = ops.native
    assert native is not None
    confidence: Callable[[float], float] = float
    if found.head is None:
        exit_logits = ExitLogits(target.norm, target.head, native)
    else:
        vocabulary = TrimmedVocabulary(found.head.draft_ids, target.head, native, MAX_ROWS, max_requests)
        exit_logits = ExitLogits(found.head.head, target.head, native, vocabulary)
        confidence = found.head.calibration.confidence
    kept = KeptStates()
    split = SplitSteps(model, kept, EarlyExit(exit_logits, confidence, ops) if found.exits else None)
    if not found.drafts:
        return split, None
    return split, SelfDraft(model, exit_logits, confidence, kept, buffers, ops, reserve)
