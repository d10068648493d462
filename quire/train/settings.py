"""Settings: what a run of `quire train-draft` was asked for, and what is chosen where nothing was asked for.

The chosen settings are kept in the run's directory. A resumed run must have the same. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quire.errors import BadModelFile, InvalidParams, UnsupportedModel
from quire.models.config import ModelConfig

KINDS = ("block", "eagle", "medusa", "exit")
MAX_DEPTH = 16
DEPTHS = {"block": 4, "eagle": 4, "medusa": 4, "exit": 1}
RANK = 64  # of bigrams and of the exit's adapter
MIN_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Fields with None are chosen for the device and the model."""

    kind: str
    prompts: tuple[str, ...] = ()
    reuse: str | None = None  # the directory of a run whose dialogues are used
    tokens: int | None = None  # of answers
    seed: int = 0
    vocabulary: int = 8192  # ids that are drafted, without the request's own
    depth: int | None = None  # drafts
    layer: int | None = None  # exit: layers that run before it
    layers: int | None = None  # block: layers of the head
    minutes: float | None = None  # a limit on the whole; it may differ in a resumed run

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        if self.tokens is not None:
            check_count("tokens", self.tokens, MIN_TOKENS, 10**10)
        check_count("seed", self.seed, 0, 2**31 - 1)
        check_count("vocabulary", self.vocabulary, 1, 10**7)
        if self.depth is not None:
            check_count("depth", self.depth, 1, MAX_DEPTH)
            if self.kind == "exit" and self.depth != 1:
                raise InvalidParams(f"depth is {self.depth}, and an exit has none; leave it out.", "depth")
        if self.layer is not None:
            if self.kind != "exit":
                raise InvalidParams(f"layer is for the kind exit, and the kind is {self.kind}; leave it out.", "layer")
            check_count("layer", self.layer, 1, 10**4)
        if self.layers is not None:
            if self.kind != "block":
                raise InvalidParams(
                    f"layers is for the kind block, and the kind is {self.kind}; leave it out.", "layers"
                )
            check_count("layers", self.layers, 1, 2)
        if self.minutes is not None and not (isinstance(self.minutes, int | float) and 0 < self.minutes < 10**6):
            raise InvalidParams(f"minutes is {self.minutes!r}; give a number above 0.", "minutes")
        if self.reuse is not None and self.prompts:
            raise InvalidParams("reuse takes the dialogues of another run, so prompts have no effect; leave one out.")


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is done at once, by device."""

    tokens: int  # of answers
    epochs: int
    answer_tokens: int  # of one answer, at most
    text_tokens: int  # of a dialogue, at most
    pass_tokens: int  # that the target computes at once for features
    round_questions: int  # asked and answered in one go
    round_tokens: int  # of dialogues whose features are in memory at once
    batch_dialogues: int  # of a training step
    anchor_share: float  # of an answer's positions that a training step uses
    held_out: int  # dialogues that are measured, at most
    layers: int  # of a block head


SCALES = {
    "cpu": Scale(500_000, 4, 256, 512, 512, 64, 65_536, 4, 0.5, 64, 1),
    "cuda": Scale(20_000_000, 4, 256, 1024, 16_384, 6144, 1 << 20, 32, 1.0, 256, 2),
}


def adapt(scale: Scale, kind: str) -> Scale:
    """For heads whose cost hardly depends on the number of anchors, each epoch uses all of them."""
    if kind == "eagle":
        return replace(scale, epochs=max(1, scale.epochs // 2), anchor_share=1.0)
    return replace(scale, anchor_share=1.0) if kind == "exit" else scale


def check_reused(directory: Path, model: str) -> None:
    """Dialogues of another run must be those of the same model."""
    path = directory / "training" / "settings.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["engine"]["model"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InvalidParams(f"{directory} has no dialogues. Name the directory of another run.", "reuse") from None
    if found != model:
        raise InvalidParams(
            f"The dialogues in {directory} are those of {found}, and the model is {model}. Name a run of this model.",
            "reuse",
        )


def choose(settings: Settings, scale: Scale, model: ModelConfig) -> Settings:
    """The settings with values for all fields but `minutes`. Raises for a model that is too small."""
    layer = settings.layer
    if settings.kind == "exit":
        layer = max(1, model.num_layers // 2) if layer is None else layer
        if layer >= model.num_layers:
            raise InvalidParams(
                f"layer is {layer}, and the model has {model.num_layers} layers; give from 1 to "
                f"{model.num_layers - 1}, so that there is something to skip.",
                "layer",
            )
    least = {"block": 2, "eagle": 3, "exit": 2}.get(settings.kind, 1)
    if model.num_layers < least:
        raise InvalidParams(
            f"The model has {model.num_layers} layers, and a head of kind {settings.kind} needs {least}. Train a head "
            "Train a head of kind medusa."
        )
    check_architecture(settings.kind, model)
    return replace(
        settings,
        tokens=settings.tokens or scale.tokens,
        depth=settings.depth or DEPTHS[settings.kind],
        layer=layer,
        layers=(settings.layers or scale.layers) if settings.kind == "block" else None,
        vocabulary=min(settings.vocabulary, model.vocab_size),
    )


def check_architecture(kind: str, model: ModelConfig) -> None:
    """Before any answer is generated, which takes the most time."""
    if kind in ("block", "eagle") and model.latent is not None:
        raise UnsupportedModel(
            f"A head of kind {kind} has the attention heads of its target, and this model has latents instead. Train a "
            "head of kind medusa."
        )
    if kind in ("block", "eagle") and model.gemma4 is not None:
        raise UnsupportedModel(
            f"A head of kind {kind} has the attention heads of its target, and this model has others in some layers. "
            "Train a head of kind medusa."
        )
    if model.structure.head_bias:
        raise UnsupportedModel(
            "This model's output matrix has a bias, and heads copy rows of that matrix. Speculate with 'ngram' or a "
            "draft model."
        )


def save(settings: Settings, engine: dict[str, Any], path: Path) -> None:
    described = {key: value for key, value in asdict(settings).items() if key != "minutes"}
    write_atomically(path, json.dumps({"settings": described, "engine": engine}, indent=1) + "\n")


def check_same(settings: Settings, engine: dict[str, Any], path: Path) -> None:
    """A resumed run must have been started with the same settings."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        parts = [(kept["settings"], asdict(settings)), (kept["engine"], engine)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadModelFile(f"{path} cannot be read, so the run cannot be resumed ({error}). Start a new one.") from None
    for before, wanted in parts:
        now = json.loads(json.dumps(wanted))
        for name in now:
            if name != "minutes" and before.get(name) != now[name]:
                raise InvalidParams(
                    f"The run in {path.parent.parent} was started with {name} {before.get(name)!r}, and it is "
                    f"{now[name]!r} now. Resume it with the same options, or name another directory."
                )


def write_atomically(path: Path, data: bytes | str) -> None:
    """A file that is there is whole."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(data if isinstance(data, bytes) else data.encode())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise InvalidParams(
            f"{path} cannot be written: {error.strerror or error}. Free some space or make {path.parent} writable, and "
            "continue with --resume.",
            "out",
        ) from error


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InvalidParams(f"{name} is {value!r}; choose one of {', '.join(choices)}.", name)


def check_count(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidParams(f"{name} is {value!r}; give a whole number from {least:,} to {most:,}.", name)
