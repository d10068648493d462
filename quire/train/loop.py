"""The training loop: rounds of features, batches, AdamW, and a state on disk, after each round if that is quick.

A round is a part of an epoch whose features fit into memory. All that is random depends on the seed and on the number
of the round, so a run that was interrupted goes on from its last round as if nothing had happened.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from quire.errors import BadModelFile, ModelError
from quire.train.dialogues import Dialogue
from quire.train.features import Batch, FeatureMaker, Features, make_batch, pick_anchors
from quire.train.heads.head import TrainedHead
from quire.train.settings import write_atomically
from quire.train.target import Target
from quire.train.vocabulary import DraftVocabulary, SoftCrossEntropy

PEAK_RATE = 1e-3
WARM_UP = 0.03  # of the run
LAST_RATE = 0.05  # of the peak
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.01
MAX_NORM = 1.0  # of gradients
DECAY = 0.8  # of a draft's weight by its depth
SAVING_SHARE = 0.02  # of the time, for the state on disk
LOSS_STEPS = 20  # whose losses are read together: reading one waits for the device. A reported loss is their mean.


@dataclass(frozen=True, slots=True)
class LoopSettings:
    epochs: int
    round_tokens: int
    batch_dialogues: int
    anchor_share: float
    seed: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Reported every LOSS_STEPS steps, and after each round."""

    step: int
    num_steps: int
    loss: float


class Trainer:
    """Trains a head. `share_used` is the part of the time that is used up, 0 without a limit."""

    def __init__(
        self,
        head: TrainedHead,
        target: Target,
        vocabulary: DraftVocabulary,
        features: FeatureMaker,
        settings: LoopSettings,
        state_path: Path,
        share_used: Callable[[], float],
    ) -> None:
        self.head = head
        self.losses: list[float] = []  # of all steps of this process
        self._unread: list[Tensor] = []  # losses that are still on the device
        self._save_s, self._saved_at_s = 0.0, 0.0  # how long the last save took, and when it ended
        self._target = target
        self._vocabulary = vocabulary
        self._features = features
        self._settings = settings
        self._path = state_path
        self._share_used = share_used
        self._parameters = dict(head.named_parameters())  # type: ignore[attr-defined]
        self._optimizer = torch.optim.AdamW(
            [{"params": [value], "rate": head.rates.get(name, 1.0)} for name, value in self._parameters.items()],
            lr=PEAK_RATE,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
        )

    def train(self, dialogues: Sequence[Dialogue], report: Callable[[Progress], None]) -> None:
        rounds = list(plan_rounds(dialogues, self._settings))
        num_steps = sum(count_batches(each, self._settings) for each in rounds)
        first, step, begin = self._load()
        reached = saved = first  # rounds
        for number, each in enumerate(rounds[first:], first):
            if self._share_used() >= 1:
                break
            for batch in self._batches(number, each):
                used = begin + (1 - begin) * self._share_used()
                self._unread.append(self._step(batch, min(1.0, max(step / num_steps, used))))
                step += 1
                if len(self._unread) == LOSS_STEPS:
                    report(Progress(step, num_steps, self._read_losses()))
            report(Progress(step, num_steps, self._read_losses()))
            reached = number + 1
            if self._save_s <= SAVING_SHARE * (time.monotonic() - self._saved_at_s):
                self._save(reached, step, begin + (1 - begin) * self._share_used())
                saved = reached
        if saved < reached:
            self._save(reached, step, begin + (1 - begin) * self._share_used())

    def _batches(self, number: int, dialogues: Sequence[Dialogue]) -> Iterator[Batch]:
        settings = self._settings
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + number)
        made = list(self._features.make(dialogues))
        made.sort(key=lambda each: len(each.dialogue.tokens))  # those of a batch have similar lengths
        size = settings.batch_dialogues
        groups = [made[first : first + size] for first in range(0, len(made), size)]
        for index in torch.randperm(len(groups), generator=generator).tolist():
            yield self._make_batch(groups[index], generator)

    def _make_batch(self, group: Sequence[Features], generator: torch.Generator) -> Batch:
        anchors = [pick_anchors(each.dialogue, self._settings.anchor_share, generator) for each in group]
        return make_batch(self._target, group, anchors)

    def _read_losses(self) -> float:
        """The mean of the last LOSS_STEPS losses."""
        if self._unread:
            self.losses += torch.stack(self._unread).tolist()
            self._unread.clear()
        last = self.losses[-LOSS_STEPS:]
        mean = sum(last) / len(last)
        if not math.isfinite(mean):
            raise ModelError(f"The loss of the head is {mean}. Train with another seed or more tokens.")
        return mean

    def _step(self, batch: Batch, done: float) -> Tensor:
        """The loss before the step, on the device."""
        for group in self._optimizer.param_groups:
            group["lr"] = PEAK_RATE * rate(done) * group["rate"]
        with self._target.autocast():
            states = self.head(batch)
        loss = find_loss(self.head, states.float(), batch, self._vocabulary)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._parameters.values(), MAX_NORM)
        self._optimizer.step()
        return loss.detach()

    def _save(self, number: int, step: int, used: float) -> None:
        """`used` is the part of the schedule that a limit on the time has used up."""
        begin_s = time.monotonic()
        tensors = {f"head.{name}": value.detach() for name, value in self._parameters.items()}
        for name, value in self._parameters.items():
            kept = self._optimizer.state.get(value, {})
            tensors |= {f"{key}.{name}": kept[key] for key in ("exp_avg", "exp_avg_sq", "step") if key in kept}
        on_host = {name: value.cpu().contiguous() for name, value in tensors.items()}
        write_atomically(self._path, save(on_host, {"round": f"{number}", "step": f"{step}", "used": f"{used}"}))
        self._saved_at_s = time.monotonic()
        self._save_s = self._saved_at_s - begin_s

    def _load(self) -> tuple[int, int, float]:
        """The round and the step to go on with, and the part of the schedule that time has used up."""
        if not self._path.exists():
            return 0, 0, 0.0
        try:
            with safe_open(self._path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
                metadata = file.metadata()
            self._restore(tensors)
            return int(metadata["round"]), int(metadata["step"]), float(metadata["used"])
        except (OSError, SafetensorError, KeyError, RuntimeError, ValueError) as error:
            raise BadModelFile(
                f"{self._path} cannot be read ({error}). Delete it, and training begins anew."
            ) from error

    @torch.no_grad()
    def _restore(self, tensors: dict[str, Tensor]) -> None:
        for name, value in self._parameters.items():
            value.copy_(tensors[f"head.{name}"])
            state: dict[str, Any] = {
                key: tensors[f"{key}.{name}"].to(value.device if key != "step" else "cpu")
                for key in ("exp_avg", "exp_avg_sq", "step")
                if f"{key}.{name}" in tensors
            }
            if state:
                self._optimizer.state[value] = state


def find_loss(head: TrainedHead, states: Tensor, batch: Batch, vocabulary: DraftVocabulary) -> Tensor:
    before, after = find_bigrams(head, states, batch, vocabulary)
    loss: Tensor = SoftCrossEntropy.apply(states, before, after, batch, vocabulary, DECAY)  # type: ignore[no-untyped-call]
    return loss


def find_bigrams(head: TrainedHead, states: Tensor, batch: Batch, vocabulary: DraftVocabulary) -> tuple[Tensor, Tensor]:
    """The rows of the drafts before, [dialogues, anchors, places, rank], and those of the draft vocabulary. The first
    place has none before it."""
    if head.bigrams is None:
        return states.new_zeros(*states.shape[:3], 0), states.new_zeros(len(vocabulary), 0)
    places = torch.arange(states.shape[2], device=states.device)
    index = (batch.anchors[..., None] + places).clamp(max=batch.tokens.shape[1] - 1)
    tokens = batch.tokens[torch.arange(len(index), device=index.device)[:, None, None], index]
    before = vocabulary.before(tokens, head.bigrams)
    return torch.where((places > 0)[:, None], before, 0.0), head.bigrams.after


def rate(done: float) -> float:
    """Relative to the peak: a linear warm-up, then a cosine."""
    if done < WARM_UP:
        return (done + 0.1 * WARM_UP) / (1.1 * WARM_UP)
    turn = math.pi * (done - WARM_UP) / (1 - WARM_UP)
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(turn))


def plan_rounds(dialogues: Sequence[Dialogue], settings: LoopSettings) -> Iterator[list[Dialogue]]:
    """Each epoch in an order of its own, cut into rounds."""
    for epoch in range(settings.epochs):
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 - 1 - epoch)
        order = torch.randperm(len(dialogues), generator=generator).tolist()
        held, num_tokens = list[Dialogue](), 0
        for index in order:
            held.append(dialogues[index])
            num_tokens += len(dialogues[index].tokens)
            if num_tokens >= settings.round_tokens:
                yield held
                held, num_tokens = [], 0
        if held:
            yield held


def count_batches(dialogues: Sequence[Dialogue], settings: LoopSettings) -> int:
    return -(-len(dialogues) // settings.batch_dialogues)
