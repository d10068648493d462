"""The job: a model is quantized layer by layer, and what is finished is kept, so that a killed job resumes.

Beside the output DIR there is DIR.partial while the job runs: what the job is (`job.json`), a file for each finished
step, and the hidden states of the calibration text after the last finished layer. A job that resumes writes the same
bytes as one that was never interrupted.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire import __version__
from quire.errors import BadModelFile, InvalidParams, UnsupportedModel
from quire.kernels import Kernels, select_native
from quire.kernels.cpu.native import Missing, find
from quire.kernels.isa import prepare
from quire.layers.source import Part
from quire.quantize.awq import scale_layer
from quire.quantize.calibration import Calibration, Statistics
from quire.quantize.expert_inputs import ExpertInputs
from quire.quantize.group_schemes import AWQ
from quire.quantize.input_model import InputMatrix, InputModel
from quire.quantize.made import Made, QuantizedPart, Settings
from quire.quantize.outputs import write_json
from quire.quantize.partial import check_directory, partial_directory
from quire.quantize.plan import Plan, make_plan
from quire.quantize.statistics import InputStatistics
from quire.quantize.tensors import StepFile, Tensor, write_array, write_step
from quire.quantize.text import DEFAULT_WINDOW, MIN_TOKENS, calibration_windows
from quire.quantize.units import Unit, take_head
from quire.text.tokenizers.tokenizer import load_tokenizer
from quire.weights.experts import is_head
from quire.weights.family_names import file_name
from quire.weights.fields import read_json
from quire.weights.loader import opened, survey

Floats = NDArray[np.float32]
Report = Callable[[int, int | None], None]
Note = dict[str, Any]  # of a quantized matrix: the fields of `QuantizedPart`

FORMAT = 1  # of DIR.partial


def quantize(path: Path, settings: Settings, directory: Path, report: Report | None = None) -> Made:
    """Write the quantized model into `directory`, which must not exist yet."""
    directory = directory.resolve()
    check_directory(directory)
    check_settings(settings)
    ops = native_ops()
    with opened(path) as (config, checkpoint):
        survey(config, checkpoint, ops)
        model = InputModel(config, checkpoint, ops)
        plan = make_plan(model, path, settings.target, settings.group, feedback=settings.feedback)
        with partial_directory(directory) as partial:
            return Job(model, path, plan, settings, directory, partial).run(report or (lambda done, total: None))


def native_ops() -> Kernels:
    found = find(prepare())
    if isinstance(found, Missing):
        raise UnsupportedModel(f"quire quantize needs quire's own CPU kernels, and {found.reason}.")
    return select_native(found)


def check_settings(settings: Settings) -> None:
    """Refuse what would have no effect."""
    target = settings.target
    if settings.max_tokens < 1:
        raise InvalidParams(f"max_tokens is {settings.max_tokens}; give at least {MIN_TOKENS}.", "max_tokens")
    if not target.calibrates and (settings.text is not None or settings.window is not None):
        what = "text" if settings.text is not None else "window"
        raise InvalidParams(f"{what} is given, and {target.name} needs no calibration. Leave it out.", what)
    if not settings.feedback and not (target.is_gguf and target.calibrates):
        raise InvalidParams(
            f"no-feedback is for formats of GGUF files with calibration, and {target.name} is none. Leave it out.",
            "feedback",
        )


@dataclass(slots=True)
class Job:
    model: InputModel
    path: Path
    plan: Plan
    settings: Settings
    directory: Path
    partial: Path
    calibration: Calibration | None = None
    text: str | None = None
    done: list[StepFile] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return self.model.num_layers + 1

    def run(self, report: Report) -> Made:
        if self.plan.scheme.needs != "nothing":
            self._read_text()
        self._claim()
        self._resume()
        for step in range(len(self.done), self.num_steps):
            report(step, self.num_steps)
            self._run_step(step)
        report(self.num_steps, self.num_steps)
        return self._finish()

    def _read_text(self) -> None:
        limit = self.model.config.max_len
        window = self.settings.window or min(DEFAULT_WINDOW, limit)
        if not 2 <= window <= limit:
            raise InvalidParams(
                f"window is {window:,}; give from 2 to {limit:,} tokens, the model's context.", "window"
            )
        windows, self.text = calibration_windows(
            load_tokenizer(self.path), self.settings.text, window, self.settings.max_tokens
        )
        self.calibration = Calibration(self.model, windows)

    def _claim(self) -> None:
        """Check that what DIR.partial has is of this job."""
        file, ours = self.partial / "job.json", self._fingerprint()
        if not file.is_file():
            written = file.with_suffix(".part")
            write_json(written, ours)
            written.replace(file)
            return
        theirs = read_json(file)
        different = sorted(key for key in ours if theirs.get(key) != ours[key])
        if different:
            raise InvalidParams(
                f"{self.partial} has the beginning of another job: {', '.join(different)} differ. Remove it, or give "
                "another directory.",
                "output",
            )

    def _fingerprint(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        if self.calibration is not None:
            digest.update(self.calibration.tokens.tobytes())
            digest.update(np.array(self.calibration.lengths).tobytes())
        files = [self.path] if self.path.is_file() else sorted(self.path.glob("*.safetensors"))
        return {
            "format": FORMAT,
            "quire": __version__,
            "model": [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files],
            "to": self.plan.target.name,
            "group": self.plan.group,
            "feedback": self.settings.feedback,
            "text": digest.hexdigest(),
        }

    def _resume(self) -> None:
        for step in range(self.num_steps):
            if not self._step_path(step).is_file():
                break
            self.done.append(self._finished(step))
        if self.calibration is None or len(self.done) > self.model.num_layers:
            return
        if self.done:
            self.calibration.hidden = self._read_hidden(len(self.done) - 1)
            return
        head, embedding = self.model.decoder.head.weight, self.model.decoder.embedding.weight
        needed = [matrix for matrix in self.model.matrices(None) if matrix is not head or matrix is embedding]
        for matrix in needed:
            self._load([matrix], {})
        self.calibration.embed()
        for matrix in needed:
            matrix.drop()

    def _finished(self, step: int) -> StepFile:
        try:
            return StepFile(self._step_path(step))
        except (BadModelFile, ValueError, KeyError, AttributeError, TypeError) as error:
            raise self._damaged(self._step_path(step)) from error

    def _read_hidden(self, layer: int) -> Floats:
        assert self.calibration is not None
        try:
            with self._hidden_path(layer).open("rb") as file:
                hidden: Floats = np.lib.format.read_array(file, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise self._damaged(self._hidden_path(layer)) from error
        if hidden.shape != self.calibration.hidden.shape or hidden.dtype != np.float32:
            raise self._damaged(self._hidden_path(layer))
        return hidden

    def _damaged(self, file: Path) -> InvalidParams:
        return InvalidParams(f"{file} is damaged. Remove {self.partial}, and begin again.", "output")

    def _run_step(self, step: int) -> None:
        layer = step if step < self.model.num_layers else None
        tensors, notes = self._layer(layer) if layer is not None else self._top()
        if layer is not None and self.calibration is not None:
            write_array(self._hidden_path(layer), self.calibration.hidden)
        write_step(self._step_path(step), tensors, notes)
        self._hidden_path(step - 1).unlink(missing_ok=True)
        self.done.append(StepFile(self._step_path(step)))

    def _layer(self, layer: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        units = self.model.units(layer, by_head=self.plan.target.is_gguf)
        done, rare = (self._without_text(units), []) if self.calibration is None else self._with_text(layer, units)
        tensors = self.plan.output.joined([written.tensors for written, _ in done])
        notes = {"parts": [note for _, note in done if note is not None], "rare_experts": rare}
        return tensors | self._vectors(layer), notes

    def _without_text(self, units: Sequence[Unit]) -> list[tuple[Written, Note | None]]:
        return [self._quantize(unit, self.model.read(unit.part, unit.cols), None) for unit in units]

    def _with_text(self, layer: int, units: Sequence[Unit]) -> tuple[list[tuple[Written, Note | None]], list[str]]:
        """The parts, and the experts that few tokens chose."""
        assert self.calibration is not None
        matrices, scheme = self.model.matrices(layer), self.plan.scheme
        values = {unit.key: self.model.read(unit.part, unit.cols) for unit in units}
        self._load(matrices, values)
        found = self.calibration.run(layer, scheme.needs, keep=not scheme.follows)
        statistics = self._by_unit(matrices, found)
        if isinstance(scheme, AWQ):
            scale_layer(layer, self.model.config, values, self.model.vectors(layer), statistics, scheme.group)
        done = {}
        for unit in sorted(units, key=is_made_by_others):
            done[unit.key] = self._quantize(unit, values[unit.key], inputs_of(unit, statistics, values))
            if scheme.follows:
                values[unit.key] = done[unit.key][0].values
        if scheme.follows:
            self._load(matrices, values)
            self.calibration.run(layer, "nothing", keep=True)
        for matrix in matrices:
            matrix.drop()
        rare = sorted({expert for each in found if isinstance(each, ExpertInputs) for expert in each.rare})
        return [done[unit.key] for unit in units], [f"model.layers.{layer}.mlp.experts.{expert}" for expert in rare]

    def _by_unit(self, matrices: list[InputMatrix], found: list[Statistics]) -> dict[str, Statistics]:
        """By the keys of units. A head of latent attention has inputs of its own, which are not gathered."""
        by_head = self.plan.target.is_gguf
        return {
            unit.key: None if is_head(unit.part) and by_head else each
            for matrix, each in zip(matrices, found, strict=True)
            for unit in matrix.units(by_head=by_head)
        }

    def _load(self, matrices: list[InputMatrix], values: dict[str, Floats]) -> None:
        for matrix in matrices:
            matrix.load(self._part_values(part, matrix.cols, values) for part in matrix.parts)

    def _part_values(self, part: Part, cols: int, values: dict[str, Floats]) -> Floats:
        if part.name not in values:
            return self.model.read(part, cols)  # a head's, out of a GGUF file
        return take_head(part, values[part.name]) if is_head(part) else values[part.name]

    def _top(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The matrices and vectors of no layer."""
        tensors: dict[str, Tensor] = {}
        notes: list[Note] = []
        for matrix in self.model.matrices(None):
            is_output = matrix is self.model.decoder.head.weight
            statistics = self.calibration.head_inputs() if is_output and self.calibration is not None else None
            for unit in matrix.units(by_head=False):
                values = self.model.read(unit.part, unit.cols)
                if self.plan.target.is_gguf:
                    found, note = self._quantize(unit, values, statistics)
                    tensors |= found.tensors
                    notes += [] if note is None else [note]
                else:
                    tensors |= self.plan.output.dense(unit.part, values)
        return tensors | self._vectors(None), {"parts": notes}

    def _vectors(self, layer: int | None) -> dict[str, Tensor]:
        output, tensors = self.plan.output, []
        for name, values in self.model.vectors(layer).items():
            order = output.rows.order(name, len(values))
            tensors.append(output.vector(self.model.vector_part(name), values if order is None else values[order]))
        return output.joined(tensors)

    def _quantize(self, unit: Unit, values: Floats, statistics: InputStatistics | None) -> tuple[Written, Note | None]:
        if unit.is_router:
            return Written(self.plan.output.dense(unit.part, values), values), None
        order = self.plan.output.rows.order(unit.name, len(values))
        with np.errstate(over="ignore", invalid="ignore"):
            found = self.plan.scheme.quantize(unit.key, values if order is None else values[order], statistics)
        dense = found.values
        if not np.isfinite(dense).all():
            raise UnsupportedModel(f"{unit.key} has values that are too large for {self.plan.target.name}. Choose fp8.")
        if order is not None:
            dense = np.empty_like(values)
            dense[order] = found.values
        note = {
            "name": unit.key,
            "num_values": values.size,
            "num_bytes": found.nbytes,
            "error": relative_error(values, dense) if statistics is None else statistics.error(values, dense),
            "of_outputs": statistics is not None,
        }
        return Written(self.plan.output.matrix(unit.part, found.tensors), dense), note

    def _finish(self) -> Made:
        ready = self.partial / "output"
        shutil.rmtree(ready, ignore_errors=True)
        ready.mkdir()
        self.plan.output.finish(ready, self.done)
        if self.directory.is_dir():
            self.directory.rmdir()
        ready.rename(self.directory)
        made = self._describe()
        shutil.rmtree(self.partial)
        return made

    def _describe(self) -> Made:
        parts = [QuantizedPart(**note) for step in self.done for note in step.notes["parts"]]
        gguf = sorted(self.directory.glob("*.gguf"))
        shapes = [unit.shape for unit in self.model.all_units(by_head=bool(gguf))]
        total = sum(rows * cols for rows, cols in shapes) + sum(map(len, self.model.source.vectors.values()))
        total_bytes = sum(step.nbytes(name) for step in self.done for name in step.tensors)
        return Made(
            path=gguf[0] if gguf else self.directory,
            directory=self.directory,
            parts=parts,
            dense_values=total - sum(part.num_values for part in parts),
            dense_bytes=total_bytes - sum(part.num_bytes for part in parts),
            looked_up_bytes=self._looked_up_bytes(),
            source_was_quantized=self.model.is_quantized(),
            text=self.text,
            num_tokens=0 if self.calibration is None else len(self.calibration.tokens),
            group=self.plan.group,
            rare_experts=[name for step in self.done for name in step.notes.get("rare_experts", ())],
        )

    def _looked_up_bytes(self) -> int:
        if self.model.config.tie_embeddings:
            return 0
        top = self.done[-1]
        embedding = file_name("model.embed_tokens.weight", self.model.config.family).removesuffix("weight")
        return sum(top.nbytes(name) for name in top.tensors if name.startswith((embedding, "token_embd.")))

    def _step_path(self, step: int) -> Path:
        return self.partial / f"step-{step:05}.safetensors"

    def _hidden_path(self, layer: int) -> Path:
        return self.partial / f"hidden-{layer:05}.npy"


def is_made_by_others(unit: Unit) -> bool:
    """Whether it is no down projection of an expert. These are first: gate and up make their inputs as they were."""
    return unit.expert is None or unit.expert[1] != "down"


def inputs_of(unit: Unit, statistics: dict[str, Statistics], values: dict[str, Floats]) -> InputStatistics | None:
    found = statistics[unit.key]
    if not isinstance(found, ExpertInputs):
        return found
    assert unit.expert is not None
    index, kind = unit.expert
    if kind != "down":
        return found.of_input(index)
    return found.of_inner(index, values[unit.beside("gate")], values[unit.beside("up")])


@dataclass(frozen=True, slots=True)
class Written:
    """The tensors of a matrix by their names in the file, and the values that they stand for."""

    tensors: dict[str, Tensor]
    values: Floats


def relative_error(values: Floats, quantized: Floats) -> float:
    error = np.square(values - quantized, dtype=np.float64).sum()
    return float(error / max(float(np.square(values, dtype=np.float64).sum()), 1e-300))
