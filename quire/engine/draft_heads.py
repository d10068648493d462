"""Loads the draft heads that a configuration names, and builds their proposers. `build.py` imports this only if there
are any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from quire.config import EngineConfig, parse_speculate
from quire.core.scheduler import Scheduler
from quire.engine.backend import find_head_obstacle
from quire.engine.block_head import BlockDrafter
from quire.engine.draft_vocabulary import DraftOutput, OneMatrix, TrimmedVocabulary, WholeVocabulary
from quire.engine.eagle import MAX_NODES, WIDTH, EagleProposer
from quire.engine.heads import MAX_ROWS, DraftHead, HeadProposer, RequestFeatures
from quire.engine.medusa import MedusaDrafter
from quire.engine.recorded_eagle import RecordedEagle
from quire.errors import InvalidParams, UnsupportedModel
from quire.kernels import Kernels
from quire.kernels.cache_spec import CacheSpec
from quire.kernels.paging import LayerCache
from quire.models.decoder import Decoder
from quire.speculative.drafting import count_kept
from quire.speculative.proposer import ModelProposer
from quire.store import find_head
from quire.weights.eagle import LoadedEagle, load_eagle
from quire.weights.heads import LoadedBlockHead, LoadedMedusa, Target, load_block_head, load_medusa
from quire.weights.loader import LoadedModel
from quire.weights.mtp import load_mtp

LoadedHead = LoadedBlockHead | LoadedMedusa | LoadedEagle
LOADERS: dict[str, Callable[[Path, Target, Kernels], LoadedHead]] = {
    "block": load_block_head,
    "medusa": load_medusa,
    "eagle": load_eagle,
    "mtp": load_mtp,
}


class DraftHeads:
    """The heads of one engine, by kind. `path` is the target's."""

    def __init__(
        self, config: EngineConfig, target: LoadedModel, path: Path, ops: Kernels, dtype: str, max_requests: int
    ) -> None:
        self._target = target.model
        self._ops = ops
        self._max_requests = max_requests
        self._heads = load_heads(config, target, path, ops, dtype)
        self._features = RequestFeatures(max_requests)
        self.specs = head_specs(self._heads)
        self.taps = find_tap_layers(self._heads)

    @property
    def listeners(self) -> list[RequestFeatures]:
        return [self._features] if needs_features(self._heads) else []

    def gpu_drafter(self, layers: Sequence[LayerCache]) -> tuple[LoadedEagle, LayerCache]:
        """The EAGLE head that a GPU's runner runs, and its layer of the cache."""
        return next(head for head in self._heads.values() if isinstance(head, LoadedEagle)), layers[0]

    def count_bytes(self, max_tokens: int, item_bytes: int) -> int:
        return count_drafter_bytes(self._heads, self._target, max_tokens, self._max_requests, item_bytes)

    def build(
        self, layers: Sequence[LayerCache], own_layers: Sequence[LayerCache], scheduler: Scheduler, max_len: int
    ) -> tuple[list[ModelProposer], list[EagleProposer]]:
        """The proposers, and those of them that listen to the runner's steps."""
        proposers = build_heads(
            self._heads, self._target, layers, own_layers, self._features, scheduler, self._ops, max_len,
            self._max_requests,
        )  # fmt: skip
        return proposers, [each for each in proposers if isinstance(each, EagleProposer)]


def load_heads(
    config: EngineConfig, target: LoadedModel, path: Path, ops: Kernels, dtype: str
) -> dict[str, LoadedHead]:
    """The draft heads that `speculate` names, by kind. `path` is the target's."""
    heads: dict[str, LoadedHead] = {}
    for method in parse_speculate(config.speculate) or []:
        if method.kind not in LOADERS:
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
        directory = find_head(method.value, config.model, method.kind, "speculate") if method.value else path
        its_target = Target(target.model, target.config)
        if is_on_gpu:
            heads[method.kind] = found = load_eagle(directory, its_target, ops, dtype)
            check_gpu_head(directory, found, target)
            continue
        heads[method.kind] = loaded = LOADERS[method.kind](directory, its_target, ops)
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
    if config.latent is not None:
        raise UnsupportedModel("The model has latent attention, with which quire runs no draft head on a GPU.")
    if any(window is not None for window in config.windows):
        raise UnsupportedModel("The model has sliding windows, with which quire runs no draft head on a GPU.")


def find_tap_layers(heads: Mapping[str, LoadedHead]) -> tuple[int, ...]:
    """The layers of the target whose hidden states the heads read."""
    configs = [head.head.config for head in heads.values() if not isinstance(head, LoadedMedusa)]
    return tuple(sorted({layer for config in configs for layer in config.tap_layers}))


def count_drafter_bytes(
    heads: Mapping[str, LoadedHead], target: Decoder, max_tokens: int, max_requests: int, item_bytes: int
) -> int:
    """What EAGLE heads keep on a GPU beside their weights: the target's states of a step and of tokens whose keys are
    computed later, and the rows of its head that are drafted, if a head has no output matrix (`gpu_drafter.py`)."""
    num_items = 0
    for loaded in heads.values():
        if isinstance(loaded, LoadedEagle):
            num_items += (max_tokens + count_kept(max_requests)) * loaded.head.config.num_features
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
