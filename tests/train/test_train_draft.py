"""`quire train-draft` from end to end on a tiny chat model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from quire import LLM, SamplingParams
from quire.errors import BadModelFile, InvalidParams, ModelNotFound
from quire.store import head_directory
from quire.train import loop
from quire.train.dialogues import Interviewer
from quire.train.loop import Trainer
from quire.train.report import METHODS
from quire.train.run import train_draft
from quire.train.settings import KINDS, Scale, Settings
from quire.train.target import Target
from tests.tools.chat_model import SCALE, chat_model, engine_config, settings

pytestmark = pytest.mark.cpu

FILES = ("config.json", "model.safetensors")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model") / "chat.gguf")


def train(
    model: Path, directory: Path, kind: str = "block", scale: Scale = SCALE, resume: bool = False, **changes: Any
) -> dict[str, Any]:
    return train_draft(engine_config(model), settings(kind, **changes), directory, resume=resume, scale=scale)


def read(directory: Path) -> list[bytes]:
    return [(directory / name).read_bytes() for name in FILES]


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_made_and_loads(kind: str, model: Path, tmp_path: Path) -> None:
    """What the files have is what the report says, and a loaded head changes no answer."""
    directory = tmp_path / "head"
    document = train(model, directory, kind)
    described = json.loads((directory / "config.json").read_text())
    assert described["kind"] == kind
    assert described["quire_head"] == 1
    assert described["report"]["acceptance"] == document["acceptance"]
    assert document["answer_tokens"] >= 1500
    assert document["held_out_tokens"] > 50
    assert len(load_file(directory / "model.safetensors")["draft_ids"]) == 64
    assert not (directory / "training" / "state.safetensors").exists()
    assert document["different"] == 0
    prompts = [{"prompt_token_ids": [5 + nth, 60, 7, 90]} for nth in range(6)]
    params = [SamplingParams(temperature=0.7 * (nth % 2), max_tokens=30, seed=nth, logprobs=1) for nth in range(6)]
    answers = []
    for speculate in ("off", f"{METHODS[kind]}:{directory}"):
        with LLM(str(model), threads=1, max_requests=4, speculate=speculate) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob) for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", KINDS)
def test_what_can_be_learned_is_learned(kind: str, model: Path, tmp_path: Path) -> None:
    """The loss falls, and drafts are right far more often than one token in 64."""
    scale = replace(SCALE, epochs=4 if kind != "exit" else 8)
    document = train(model, tmp_path / "head", kind, scale)
    losses = document["loss"]
    size = len(losses) // 5
    assert sum(losses[-size:]) < sum(losses[:size])
    assert document["acceptance"][0] > 0.6
    assert document["chain_tokens_per_step"][0] == pytest.approx(1 + document["acceptance"][0], abs=2e-3)


@pytest.mark.parametrize("kind", ["block", "eagle"])
def test_the_same_seed_gives_the_same_files(kind: str, model: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(model, tmp_path / name, kind)
    train(model, tmp_path / "c", kind, seed=1)
    assert read(tmp_path / "a") == read(tmp_path / "b")
    assert read(tmp_path / "a")[1] != read(tmp_path / "c")[1]


def interrupt(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, nth: int) -> None:
    """Ctrl-C in the nth call of a method."""
    calls, method = [0], getattr(owner, name)

    def call(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == nth:
            raise KeyboardInterrupt
        return method(*arguments)

    monkeypatch.setattr(owner, name, call)


INTERRUPTIONS: dict[str, tuple[type, str, int]] = {
    "asking": (Interviewer, "make_round", 3),
    "the first round": (Trainer, "_step", 3),
    "a later round": (Trainer, "_step", 30),
    "a later round, without a state": (Trainer, "_step", 30),
}


@pytest.mark.parametrize("at", INTERRUPTIONS)
def test_an_interrupted_run_goes_on(at: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are those of a run without an interruption."""
    whole = train(model, tmp_path / "whole")
    with monkeypatch.context() as patched:
        if at.endswith("without a state"):
            patched.setattr(loop, "SAVING_SHARE", -1.0)
        interrupt(patched, *INTERRUPTIONS[at])
        with pytest.raises(KeyboardInterrupt):
            train(model, tmp_path / "part")
    assert not (tmp_path / "part" / "config.json").exists()
    resumed = train(model, tmp_path / "part", resume=True)
    assert read(tmp_path / "part") == read(tmp_path / "whole")
    if at == "a later round":
        assert len(resumed["loss"]) < len(whole["loss"])


def test_only_the_same_run_is_resumed(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "head"
    with pytest.raises(InvalidParams, match="no run that could be resumed"):
        train(model, directory, resume=True)
    train(model, directory)
    with pytest.raises(InvalidParams, match="is complete"):
        train(model, directory, resume=True)
    with pytest.raises(InvalidParams, match=r"is not empty.*--resume"):
        train(model, directory)
    (directory / "config.json").unlink()
    with pytest.raises(InvalidParams, match="with seed 0, and it is 5 now"):
        train(model, directory, resume=True, seed=5)
    with pytest.raises(InvalidParams, match="with max_requests 8, and it is 4 now"):
        train_draft(engine_config(model, max_requests=4), settings("block"), directory, resume=True, scale=SCALE)
    kept = directory / "training" / "settings.json"
    kept.write_text("{")
    with pytest.raises(BadModelFile, match=r"settings\.json cannot be read"):
        train(model, directory, resume=True)


def test_dialogues_of_another_run_are_used(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(model, tmp_path / "first", "medusa")
    monkeypatch.setattr(Interviewer, "make_round", None)
    second = train(model, tmp_path / "second", "block", reuse=str(tmp_path / "first"))
    assert second["answer_tokens"] == first["answer_tokens"]
    with pytest.raises(InvalidParams, match="has no dialogues"):
        train(model, tmp_path / "third", reuse=str(tmp_path / "nothing"))
    with pytest.raises(InvalidParams, match=r"are those of .*chat\.gguf, and the model is .*other\.gguf"):
        train(chat_model(tmp_path / "other.gguf"), tmp_path / "third", reuse=str(tmp_path / "first"))


def test_minutes_end_a_run_early(model: Path, tmp_path: Path) -> None:
    """One round of questions, and the measurements, whatever the time."""
    scale = replace(SCALE, tokens=10**9)
    document = train(model, tmp_path / "head", scale=scale, minutes=1e-6)
    assert document["answer_tokens"] < 1000
    assert document["loss"] == []


def test_prompts_are_used_up_to_a_third(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"tell me about {word}" for word in ("hello", "worlds", "lines", "12", "tiny")))
    train(model, tmp_path / "head", prompts=(str(prompts),))
    with LLM(str(model), threads=1) as llm:
        asked = llm.get_tokenizer().encode("tell me about", add_special_tokens=False)
        held = load_file(tmp_path / "head" / "training" / "dialogues-00000.safetensors")
    tokens = held["tokens"].tolist()
    found = sum(tokens[at : at + len(asked)] == asked for at in range(len(tokens)))
    assert 1 <= found <= 5


def test_prompts_that_are_left_out_are_counted(model: Path, tmp_path: Path) -> None:
    prompts, said = tmp_path / "prompts.txt", list[str]()
    prompts.write_text("short\n" + "long " * 40)
    options = settings("medusa", prompts=(str(prompts),))
    train_draft(engine_config(model), options, tmp_path / "head", scale=SCALE, say=said.append)
    assert "1 of 2 prompts have more than 48 tokens and are left out" in said


def test_a_model_without_a_chat_template_continues_text(tmp_path: Path) -> None:
    document = train(chat_model(tmp_path / "plain.gguf", template=None), tmp_path / "head")
    assert document["answer_tokens"] >= 1500


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"kind": "mlp"}, "kind is 'mlp'; choose one of block, eagle, medusa, exit"),
    "tokens": ({"tokens": 1}, "tokens is 1; give a whole number from 64"),
    "seed": ({"seed": -1}, "seed is -1"),
    "depth": ({"depth": 17}, "depth is 17; give a whole number from 1 to 16"),
    "depth of an exit": ({"kind": "exit", "depth": 2}, "an exit has none"),
    "layer of a block": ({"layer": 2}, "layer is for the kind exit"),
    "layers": ({"layers": 3}, "layers is 3; give a whole number from 1 to 2"),
    "layers of an exit": ({"kind": "exit", "layers": 1}, "layers is for the kind block"),
    "minutes": ({"minutes": 0}, "minutes is 0; give a number above 0"),
    "vocabulary": ({"vocabulary": 0}, "vocabulary is 0"),
    "prompts and reuse": ({"prompts": ("a",), "reuse": "b"}, "leave one out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_settings_are_refused(name: str) -> None:
    changes, words = REFUSED[name]
    with pytest.raises(InvalidParams, match=words):
        Settings(**{"kind": "block", **changes})


TOO_SMALL: dict[str, tuple[int, str, dict[str, Any], str]] = {
    "block": (1, "block", {}, "has 1 layers, and a head of kind block needs 2"),
    "eagle": (2, "eagle", {}, "has 2 layers, and a head of kind eagle needs 3"),
    "exit": (2, "exit", {"layer": 2}, "layer is 2, and the model has 2 layers; give from 1 to 1"),
}


@pytest.mark.parametrize("name", TOO_SMALL)
def test_a_model_that_is_too_small_is_refused(name: str, tmp_path: Path) -> None:
    num_layers, kind, changes, words = TOO_SMALL[name]
    with pytest.raises(InvalidParams, match=words):
        train(chat_model(tmp_path / "small.gguf", num_layers), tmp_path / "head", kind, **changes)


Broken = Callable[[Path], None]
BROKEN: dict[str, tuple[Broken, str]] = {
    "missing": (lambda path: None, "cannot be read: No such file"),
    "empty": (lambda path: path.touch(), "has no prompts"),
    "bytes": (lambda path: path.write_bytes(b"a\xff") and None, "no UTF-8 text: see its byte 1"),
    "json": (lambda path: path.write_text('{"prompt": "a"}\n{"prompt": 3}\n') and None, "line 2, is no prompt"),
    "cut json": (lambda path: path.write_text('{"prompt": "a"}\n{"prom') and None, "line 2, is no prompt"),
    "no turns": (lambda path: path.write_text('{"turns": []}') and None, "line 1, is no prompt"),
    "no key": (lambda path: path.write_text('{"text": "a"}') and None, "line 1, is no prompt"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_of_prompts_is_refused(name: str, model: Path, tmp_path: Path) -> None:
    make, words = BROKEN[name]
    make(tmp_path / "prompts")
    with pytest.raises(InvalidParams, match=words):
        train(model, tmp_path / "head", prompts=(str(tmp_path / "prompts"),))
    assert not (tmp_path / "head").exists()


def test_a_broken_state_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        interrupt(patched, Trainer, "_step", 30)
        with pytest.raises(KeyboardInterrupt):
            train(model, tmp_path / "head")
    state = tmp_path / "head" / "training" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(BadModelFile, match=r"state\.safetensors cannot be read"):
        train(model, tmp_path / "head", resume=True)


@pytest.mark.parametrize("kind", KINDS)
def test_it_runs_in_bfloat16_on_the_ops_of_torch(
    kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: tensors from the model to the loss, and products in bfloat16. The engine drafts with quire's own
    kernels only."""
    monkeypatch.setattr(Target, "is_gpu", property(lambda self: True))
    config = engine_config(model, kernels="torch", dtype="bfloat16")
    document = train_draft(config, settings(kind), tmp_path / "head", scale=SCALE)
    assert document["verdict"] is None
    assert "engine" not in document
    assert document["acceptance"][0] > 0.3
    assert (tmp_path / "head" / "model.safetensors").exists()


def test_threads_are_those_of_the_engine(model: Path, tmp_path: Path) -> None:
    train(model, tmp_path / "head", "medusa")
    assert torch.get_num_threads() == 1


def test_a_head_in_the_store_is_found(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the model's name, for each kind, and not for another kind."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match="--kind block --out store"):
        LLM(str(model), threads=1, speculate="block:store")
    train(model, head_directory(str(model), "block"))
    with LLM(str(model), threads=1, speculate="block:store") as llm:
        (output,) = llm.generate([{"prompt_token_ids": [5, 60, 7]}], SamplingParams(max_tokens=20), use_tqdm=False)
    assert output.num_drafted_tokens > 0
    with pytest.raises(ModelNotFound, match="--kind exit --out store"):
        LLM(str(model), threads=1, speculate="self:store")


def test_an_alias_and_its_file_have_one_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", "/cache")
    path = Path("/cache/heads/SmolLM2-135M-Instruct.Q4_1/block")
    assert head_directory("smollm2:135m", "block") == path
    assert head_directory("some/where/SmolLM2-135M-Instruct.Q4_1.gguf", "block") == path
