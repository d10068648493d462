"""Builds the controller of speculation from a configuration. `build.py` calls it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from quire.config import EngineConfig, parse_speculate
from quire.core.scheduler import Scheduler
from quire.engine.backend import choose_quantize, find_head_obstacle
from quire.engine.block_head import BlockDrafter
from quire.engine.draft_vocabulary import DraftOutput, OneMatrix, TrimmedVocabulary, WholeVocabulary
from quire.engine.eagle import MAX_NODES, WIDTH, EagleProposer
from quire.engine.heads import MAX_ROWS, DraftHead, HeadProposer, RequestFeatures
from quire.engine.medusa import MedusaDrafter
from quire.engine.memory import check_weights
from quire.engine.recorded_eagle import RecordedEagle
from quire.errors import InvalidParams, ModelNotFound, UnsupportedModel
from quire.kernels import Kernels
from quire.kernels.cache_spec import CacheSpec
from quire.kernels.paging import LayerCache
from quire.models.decoder import Decoder
from quire.speculative.controller import Controller
from quire.speculative.drafting import DEPTHS, Drafting
from quire.speculative.proposer import ModelProposer, Proposer
from quire.speculative.suffix import SuffixProposer
from quire.store import resolve
from quire.text.tokenizers.tokenizer import load_tokenizer
from quire.weights.eagle import LoadedEagle, load_eagle
from quire.weights.heads import LoadedBlockHead, LoadedMedusa, Target, load_block_head, load_medusa
from quire.weights.loader import LoadedModel, build_model, opened, survey, weight_bytes
from quire.weights.mtp import load_mtp

FREE_DRAFTS = {"cpu": 12.0, "cuda": 256.0}  # how many drafts double the duration of a small step, until measured
# Of a row: on a CPU more take as long as they gain, on a GPU kernels verify rows of up to 16 tokens.
MAX_DRAFTS = {"cpu": 10, "cuda": 15}
MAX_GPU_TOKENS = 1024  # of a step with drafts: larger ones are not captured
NUM_COMPARED = 512  # tokens of two vocabularies

LoadedHead = LoadedBlockHead | LoadedMedusa | LoadedEagle
HEADS: dict[str, Callable[[Path, Target, Kernels], LoadedHead]] = {
    "block": load_block_head,
    "medusa": load_medusa,
    "eagle": load_eagle,
    "mtp": load_mtp,
}


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
        quantize = choose_quantize(config.quantize, stored)
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


def load_heads(
    config: EngineConfig, target: LoadedModel, path: Path, ops: Kernels, dtype: str
) -> dict[str, LoadedHead]:
    """The draft heads that `speculate` names, by kind. `path` is the target's."""
    heads: dict[str, LoadedHead] = {}
    for method in parse_speculate(config.speculate) or []:
        if method.kind not in HEADS:
            continue
        named = f"{method.kind}:{method.value}" if method.value else method.kind
        is_on_gpu = method.kind == "eagle" and ops.fused is not None
        if ops.native is None and not is_on_gpu:
            raise InvalidParams(
                f"speculate has {named}, and a draft head needs quire's own CPU kernels, or as an EAGLE head quire's "
                "own GPU kernels; leave it out.",
                "speculate",
            )
        if method.kind in heads:
            raise InvalidParams(f"speculate names two heads of kind {method.kind}; give one.", "speculate")
        directory = Path(method.value).expanduser() if method.value else path
        if method.value and not directory.is_dir():
            raise ModelNotFound(f"speculate names the head {directory}, which is not a directory. Check the path.")
        its_target = Target(target.model, target.config)
        if is_on_gpu:
            heads[method.kind] = found = load_eagle(directory, its_target, ops, dtype)
            check_gpu_head(directory, found, target)
            continue
        heads[method.kind] = loaded = HEADS[method.kind](directory, its_target, ops)
        if isinstance(loaded, LoadedEagle) and (obstacle := find_head_obstacle(loaded.head.config.head_dim, "head")):
            raise UnsupportedModel(f"{directory} cannot be used: {obstacle}.")
    return heads


def check_gpu_head(directory: Path, loaded: LoadedEagle, target: LoadedModel) -> None:
    """Raise if the head cannot draft on a GPU: there it shares the target's lists of work."""
    head, config = loaded.head.config, target.config
    ours = config.num_heads, config.num_kv_heads, config.head_dim
    theirs = head.num_heads, head.num_kv_heads, head.head_dim
    if head.kind != "eagle3":
        raise UnsupportedModel(f"{directory} has an EAGLE 1 or 2 head, and on a GPU quire runs those of EAGLE 3.")
    if theirs != ours:
        raise UnsupportedModel(
            f"{directory} has {theirs[0]} heads, {theirs[1]} key heads and {theirs[2]} dimensions of a head, and on a "
            f"GPU it needs those of the model: {ours[0]}, {ours[1]} and {ours[2]}."
        )
    if head.hidden_size != config.hidden_size or head.tap_layers[-1] >= config.num_layers - 1:
        raise UnsupportedModel(
            f"{directory} has a head of {head.hidden_size} channels on the layers {list(head.tap_layers)}; on a GPU it "
            f"needs {config.hidden_size}, and layers before the last one, {config.num_layers - 1}."
        )
    if list(head.tap_layers) != sorted(set(head.tap_layers)):
        raise UnsupportedModel(
            f"{directory} reads the layers {list(head.tap_layers)}, and on a GPU they must be different and ascending."
        )
    if any(window is not None for window in config.windows):
        raise UnsupportedModel("The model has sliding windows, with which quire runs no draft head on a GPU.")


def find_tap_layers(heads: Mapping[str, LoadedHead]) -> tuple[int, ...]:
    """The layers of the target whose hidden states the heads read."""
    configs = [head.head.config for head in heads.values() if not isinstance(head, LoadedMedusa)]
    return tuple(sorted({layer for config in configs for layer in config.tap_layers}))


def count_drafter_bytes(heads: Mapping[str, LoadedHead], target: Decoder, max_tokens: int, item_bytes: int) -> int:
    """What EAGLE heads keep on a GPU beside their weights: the target's states of a step, and the rows of its head that
    are drafted, if a head has no output matrix (`gpu_drafter.py`)."""
    num_items = 0
    for loaded in heads.values():
        if isinstance(loaded, LoadedEagle):
            num_items += max_tokens * loaded.head.config.num_features
            if loaded.output is None and loaded.draft_ids is not None:
                num_items += len(loaded.draft_ids) * target.head.weight.shape[1]
    return num_items * item_bytes


def needs_features(heads: Mapping[str, LoadedHead]) -> bool:
    """Whether a head reads the states of each request's last token only."""
    return any(not isinstance(head, LoadedEagle) for head in heads.values())


def head_specs(heads: Mapping[str, LoadedHead]) -> list[CacheSpec]:
    """The layers that heads have in the cache."""
    return [head.head.cache_spec for head in heads.values() if isinstance(head, LoadedEagle)]


def build_heads(
    heads: Mapping[str, LoadedHead],
    target: Decoder,
    layers: Sequence[LayerCache],
    own_layers: Sequence[LayerCache],
    features: RequestFeatures,
    scheduler: Scheduler,
    ops: Kernels,
    max_len: int,
    max_requests: int,
) -> list[ModelProposer]:
    """The proposers of the heads. `layers` are the target's caches, `own_layers` those of `head_specs`."""
    proposers: list[ModelProposer] = []
    taps, native, own = find_tap_layers(heads), ops.native, iter(own_layers)
    if native is None:
        return []  # the runner has them
    for kind, loaded in heads.items():
        if isinstance(loaded, LoadedEagle):
            proposers.append(build_eagle(kind, loaded, target, next(own), taps, scheduler, ops, max_requests))
            continue
        head: DraftHead
        output: DraftOutput
        if isinstance(loaded, LoadedBlockHead):
            head = BlockDrafter(loaded, target.embedding, layers, taps, native, max_len=max_len, max_rows=MAX_ROWS)
            output = TrimmedVocabulary(loaded.draft_ids, target.head, native, MAX_ROWS, max_requests)
        else:
            head = MedusaDrafter(loaded.heads, target.head.weight.shape[1], native, MAX_ROWS)
            if loaded.draft_ids is None:
                output = WholeVocabulary(loaded.heads.outputs, target.head, MAX_ROWS)
            else:
                output = TrimmedVocabulary(loaded.draft_ids, target.head, native, MAX_ROWS, max_requests)
        proposers.append(HeadProposer(kind, head, output, features, ops))
    return proposers


def build_eagle(
    name: str,
    loaded: LoadedEagle,
    target: Decoder,
    cache: LayerCache,
    taps: Sequence[int],
    scheduler: Scheduler,
    ops: Kernels,
    max_requests: int,
) -> EagleProposer:
    native, config = ops.native, loaded.head.config
    assert native is not None
    max_tokens = scheduler.max_tokens_per_step
    output: DraftOutput
    if loaded.output is not None:
        output = OneMatrix(loaded.output, loaded.draft_ids, None, ops, MAX_ROWS)
    elif loaded.draft_ids is not None:
        output = TrimmedVocabulary(loaded.draft_ids, target.head, native, MAX_ROWS, max_requests)
    else:
        output = OneMatrix(target.head.weight, None, target.head.softcap, ops, MAX_ROWS)
    return EagleProposer(
        name,
        RecordedEagle(loaded.head, cache, native, max_tokens, MAX_ROWS // WIDTH * MAX_NODES),
        output,
        [taps.index(layer) for layer in config.tap_layers],
        ops,
        group=cache.group,
        block_size=cache.block_size,
        max_tokens=max_tokens,
        pool=lambda: scheduler.kv.pool,
        reserve=scheduler.reserve,
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
