"""A run of `quire train-draft`: questions and answers, training, measuring, writing. The directory is its memory.

DIR/config.json, model.safetensors     the head
DIR/training/settings.json             what the run was started with
DIR/training/dialogues-*.safetensors   questions and answers, one file a round
DIR/training/state.safetensors         the head and the optimizer after the last round; gone when the head is written
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quire.config import EngineConfig
from quire.errors import InvalidParams
from quire.kernels import isa
from quire.llm import LLM
from quire.progress import Report, bar
from quire.train import settings as kept_settings
from quire.train.dialogues import Dialogues, Interviewer, Limits, collect
from quire.train.evaluation import Acceptance, Evaluator
from quire.train.features import FeatureMaker
from quire.train.files import describe_head, write_config, write_tensors
from quire.train.heads.block import BlockModule
from quire.train.heads.eagle import EagleModule
from quire.train.heads.exit import ExitModule
from quire.train.heads.head import TrainedHead
from quire.train.heads.medusa import MedusaModule
from quire.train.loop import LoopSettings, Trainer
from quire.train.prompts import read_prompts
from quire.train.report import METHODS, Measured, describe_counts, judge, measure_engine
from quire.train.settings import SCALES, Scale, Settings
from quire.train.target import Target
from quire.train.vocabulary import DraftVocabulary, choose_draft_ids

ASKING_SHARE = 0.45  # of the minutes, for questions and answers
TRAINING_SHARE = 0.9  # of the minutes, when training ends: measuring takes the rest
GPU_REQUESTS = 1024  # that the engine answers at once: a step of a small model takes hardly longer with more
GPU_CACHE_GIB = 16.0  # of the engine that answers; the rest of the memory is for training
MAX_SCORES = 1_500_000_000  # of attention in one batch

Say = Callable[[str], None]


@dataclass(slots=True)
class Clock:
    """The time that a run may take. Without minutes it is never used up."""

    minutes: float | None
    begin_s: float

    def share_used(self) -> float:
        return 0.0 if self.minutes is None else (time.monotonic() - self.begin_s) / (60 * self.minutes)

    def until(self, share: float) -> Callable[[], float]:
        """How much is used of the time from now until that share: from 0 to 1 or more."""
        now = self.share_used()
        return lambda: (self.share_used() - now) / max(1e-9, share - now)


@dataclass(slots=True)
class Milestones:
    """A bar on a terminal. Elsewhere a line for each tenth, with the time that is left."""

    what: str
    draw: Report
    say: Say
    begin_s: float = field(default_factory=time.monotonic)
    num_said: int = 0

    def report(self, done: int, total: int, more: str = "") -> None:
        self.draw(done, total)
        tenths = 10 * done // total
        if tenths <= self.num_said or sys.stderr is None or sys.stderr.isatty():
            return
        self.num_said = tenths
        passed_s = time.monotonic() - self.begin_s
        self.say(f"{self.what}: {10 * tenths}% in {passed_s:.0f} s, {passed_s * (total / done - 1):.0f} s left{more}")


def train_draft(
    config: EngineConfig,
    settings: Settings,
    directory: Path,
    *,
    resume: bool = False,
    say: Say = lambda text: None,
    scale: Scale | None = None,
) -> dict[str, Any]:
    """Train a head and write it to a directory. Returns what `--json` prints. `scale` replaces the device's."""
    clock = Clock(settings.minutes, time.monotonic())
    work = directory / "training"
    check_directory(directory, work, resume)
    prompts = read_prompts(settings.prompts)
    if settings.reuse is not None:
        kept_settings.check_reused(Path(settings.reuse).expanduser(), config.model)
    with closing(LLM(**engine_options(config))) as llm:
        say(llm.info.summary)
        scale = scale or kept_settings.adapt(SCALES[llm.info.device], settings.kind)
        chosen = kept_settings.choose(settings, scale, llm.info.config)
        remember(chosen, config, work, resume)
        dialogues = make_dialogues(llm, chosen, scale, prompts, work, clock, say)
        target = Target.of(llm)
        if not target.is_gpu:
            torch.set_num_threads(config.threads or isa.prepare().cores)
        trained = train_head(target, dialogues, chosen, scale, work / "state.safetensors", clock, say)
        described = describe_head(chosen.kind, target.model, target.config, trained.head.describe())
        write_tensors(directory, trained.head.state_dict(), trained.vocabulary.ids)
        if chosen.kind != "exit":  # which cannot be used without its calibration
            write_config(directory, described)
        acceptance, measured_fields = measure(target, trained, dialogues, chosen, scale)
        described |= measured_fields
    report: dict[str, Any] = describe_training(dialogues, acceptance)
    write_config(directory, {**described, "report": report})
    measured = None
    if target.ops.native is not None:  # the engine drafts with quire's own CPU kernels only
        speculate = f"{METHODS[chosen.kind]}:{directory}"
        measured = measure_engine(replace(config, speculate="auto"), speculate, dialogues.held_out)
        report["engine"] = describe_counts(measured)
        write_config(directory, {**described, "report": report})
    (work / "state.safetensors").unlink(missing_ok=True)
    return make_document(config, chosen, directory, report, measured, trained.losses)


def check_directory(directory: Path, work: Path, resume: bool) -> None:
    """A new run needs an empty directory, and a resumed one its own."""
    if resume:
        if not (work / "settings.json").exists():
            raise InvalidParams(f"{directory} has no run that could be resumed. Leave --resume out.", "resume")
        if (directory / "config.json").exists() and not (work / "state.safetensors").exists():
            raise InvalidParams(f"The run in {directory} is complete. Name another directory for a new one.", "resume")
        return
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidParams(
            f"{directory} is not empty. Name another directory, or continue its run with --resume.", "out"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidParams(
            f"{directory} cannot be made: {error.strerror or error}. Name another directory.", "out"
        ) from error


def engine_options(config: EngineConfig) -> dict[str, Any]:
    """For many answers at once. On a GPU the cache leaves room for training."""
    options = {**asdict(config), "speculate": "off", "prefix_cache": False}
    if uses_gpu(config):
        options["max_requests"] = config.max_requests or GPU_REQUESTS
        if config.kv_memory is None and config.num_blocks is None:
            options["kv_memory"] = GPU_CACHE_GIB
    return options


def uses_gpu(config: EngineConfig) -> bool:
    return config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())


def remember(settings: Settings, config: EngineConfig, work: Path, resume: bool) -> None:
    path = work / "settings.json"
    if resume:
        kept_settings.check_same(settings, asdict(config), path)
        return
    work.mkdir(parents=True, exist_ok=True)
    kept_settings.save(settings, asdict(config), path)


def make_dialogues(
    llm: LLM, settings: Settings, scale: Scale, prompts: list[str], work: Path, clock: Clock, say: Say
) -> Dialogues:
    if settings.reuse is not None:
        dialogues = Dialogues(Path(settings.reuse).expanduser() / "training")
    else:
        dialogues = Dialogues(work)
        limits = Limits(scale.round_questions, scale.answer_tokens, min(scale.text_tokens, llm.info.max_len))
        interviewer = Interviewer(llm, limits, settings.seed, prompts)
        if interviewer.num_too_long:
            most = limits.text_tokens // 2
            say(f"{interviewer.num_too_long} of {len(prompts)} prompts have more than {most} tokens and are left out")
        wanted = settings.tokens or 0
        what = "asking and answering"
        with bar(what, unit="tokens") as draw:
            milestones = Milestones(what, draw, say)
            collect(
                interviewer,
                dialogues,
                wanted,
                lambda: clock.share_used() >= ASKING_SHARE,
                lambda done: milestones.report(min(done, wanted), wanted),
            )
    say(
        f"{len(dialogues.all):,} dialogues with {dialogues.num_answer_tokens:,} tokens of answers, "
        f"{len(dialogues.held_out):,} of them held out"
    )
    if not dialogues.training or not dialogues.held_out:
        raise InvalidParams("There are too few dialogues to train and to measure a head. Give more tokens.", "tokens")
    return dialogues


@dataclass(frozen=True, slots=True)
class Trained:
    head: TrainedHead
    vocabulary: DraftVocabulary
    features: FeatureMaker
    losses: list[float]


def train_head(
    target: Target, dialogues: Dialogues, settings: Settings, scale: Scale, state: Path, clock: Clock, say: Say
) -> Trained:
    training = dialogues.training
    draft_ids = choose_draft_ids(training, settings.vocabulary, target.config.vocab_size)
    vocabulary = DraftVocabulary(target, draft_ids)
    head = make_head(target, settings, len(draft_ids), training[0].tokens.tolist())
    longest = max(len(dialogue.tokens) for dialogue in dialogues.all)
    features = FeatureMaker(target, head.inputs, max(longest, scale.pass_tokens))
    size = batch_size(settings, scale, target)
    loop = LoopSettings(scale.epochs, scale.round_tokens, size, scale.anchor_share, settings.seed)
    trainer = Trainer(head, target, vocabulary, features, loop, state, clock.until(TRAINING_SHARE))
    with bar("training", unit="steps") as draw:
        milestones = Milestones("training", draw, say)
        trainer.train(training, lambda at: milestones.report(at.step, at.num_steps, f", loss {at.loss:.3f}"))
    if trainer.losses:
        size = max(1, len(trainer.losses) // 10)
        first, last = sum(trainer.losses[:size]) / size, sum(trainer.losses[-size:]) / size
        say(f"{len(trainer.losses):,} steps, loss {first:.3f} at first and {last:.3f} at last")
    return Trained(head, vocabulary, features, trainer.losses)


def batch_size(settings: Settings, scale: Scale, target: Target) -> int:
    """Dialogues of a batch: fewer where attention would have too many scores."""
    queries = {"block": scale.answer_tokens * (settings.layers or 1), "eagle": scale.text_tokens}
    num_scores = queries.get(settings.kind, 0) * (settings.depth or 1) * scale.text_tokens * target.config.num_heads
    return max(1, min(scale.batch_dialogues, MAX_SCORES // max(1, num_scores)))


def make_head(target: Target, settings: Settings, num_ids: int, text: list[int]) -> TrainedHead:
    """A head before training. Its random weights depend on the seed only. `text` is any dialogue."""
    generator = torch.Generator().manual_seed(settings.seed)
    depth = settings.depth or 1
    module: nn.Module
    if settings.kind == "block":
        module = BlockModule(target, depth, settings.layers or 1, num_ids, generator)
    elif settings.kind == "medusa":
        module = MedusaModule(target, depth)
    elif settings.kind == "eagle":
        module = EagleModule(target, depth, generator, text)
    else:
        module = ExitModule(target, settings.layer or 1, generator, text)
    made: Any = module.to(target.device)
    return made  # type: ignore[no-any-return]


def measure(
    target: Target, trained: Trained, dialogues: Dialogues, settings: Settings, scale: Scale
) -> tuple[Acceptance, dict[str, Any]]:
    """Acceptance on held-out dialogues, and what they add to the head's configuration."""
    held_out = dialogues.held_out[: scale.held_out]
    size = batch_size(settings, scale, target)
    evaluator = Evaluator(trained.head, target, trained.vocabulary, trained.features)
    acceptance = evaluator.measure(held_out, size)
    return acceptance, {"calibration": evaluator.calibrate(held_out, size)} if settings.kind == "exit" else {}


def describe_training(dialogues: Dialogues, acceptance: Acceptance) -> dict[str, Any]:
    return {
        "answer_tokens": dialogues.num_answer_tokens,
        "held_out_tokens": acceptance.num_anchors,
        "acceptance": [round(each, 4) for each in acceptance.by_depth],
        "chain_tokens_per_step": [
            round(acceptance.tokens_per_step(depth), 4) for depth in range(1, len(acceptance.by_depth) + 1)
        ],
    }


def make_document(
    config: EngineConfig,
    settings: Settings,
    directory: Path,
    report: dict[str, Any],
    measured: Measured | None,
    losses: list[float],
) -> dict[str, Any]:
    return {
        "model": config.model,
        "kind": settings.kind,
        "directory": str(directory),
        "speculate": f"{METHODS[settings.kind]}:{directory}",
        **report,
        "loss": [round(each, 4) for each in losses[:: max(1, len(losses) // 100)]],
        "speedup": None if measured is None else round(measured.speedup, 3),
        "speedup_without": None if measured is None else round(measured.speedup_without, 3),
        "different": None if measured is None else measured.different,
        "verdict": None if measured is None else judge(measured),
    }
