"""Parts of train-draft: questions, files of dialogues, acceptance, calibration, the schedule, the report."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.bench.speculation import Answer
from quire.errors import BadModelFile, EngineError, InvalidParams, ModelError
from quire.train.answers import answer
from quire.train.dialogues import (
    MAX_LOOP,
    Dialogue,
    Dialogues,
    Interviewer,
    Limits,
    collect,
    cut_loop,
    decode,
    find_opening,
    is_question,
    mix,
)
from quire.train.evaluation import Evaluator, calibrate
from quire.train.features import FeatureMaker, find_anchors, pick_anchors
from quire.train.files import write_tensors
from quire.train.heads.block import BlockModule
from quire.train.heads.head import spread_layers
from quire.train.loop import LoopSettings, plan_rounds, rate
from quire.train.prompts import read_prompts
from quire.train.report import check_answers, judge, summarize
from quire.train.run import check_directory
from quire.train.settings import write_atomically
from quire.train.tasks import choose_passages
from quire.train.vocabulary import DraftVocabulary
from tests.tools.chat_model import chat_model
from tests.train.test_heads import batch_of, disturb, generator, make_target, texts

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with LLM(str(chat_model(tmp_path_factory.mktemp("model") / "chat.gguf")), threads=1, max_requests=8) as llm:
        yield llm


def test_a_question_begins_in_the_users_turn(llm: LLM) -> None:
    assert llm.get_tokenizer().decode(find_opening(llm), skip_special_tokens=False) == "<|im_start|>user\n"


@pytest.mark.parametrize("template", ["<|im_start|>{{ messages[0]['role'] }}", "{{ messages[0]['content'] }}"])
def test_a_template_without_an_opening_is_refused(template: str, tmp_path: Path) -> None:
    with (
        LLM(str(chat_model(tmp_path / "m.gguf", template=template)), threads=1) as llm,
        pytest.raises(InvalidParams, match="does not open a user's turn"),
    ):
        find_opening(llm)


def test_what_is_a_question() -> None:
    assert is_question("Why is the sky blue?", range(9))
    assert not is_question("  Why?   ", range(9))
    assert not is_question("again and again and again", [1, 2, 3] * 5)


def test_a_question_is_asked_once(llm: LLM) -> None:
    limits = Limits(24, 8, 64)
    interviewer = Interviewer(llm, limits, 0)
    first = interviewer.make_round(0)
    prompts = [tuple(each.tokens[: each.num_prompt].tolist()) for each in first]
    assert len(set(prompts)) == len(prompts) > 2
    assert not interviewer.make_round(0)
    other = Interviewer(llm, limits, 0)
    other.remember(first[:-1])
    (again,) = other.make_round(0)
    assert again.tokens[: again.num_prompt].tolist() == list(prompts[-1])


def test_rounds_depend_on_the_seed_and_their_number(llm: LLM) -> None:
    def make(seed: int, number: int) -> list[list[int]]:
        return [each.tokens.tolist() for each in Interviewer(llm, Limits(8, 8, 64), seed).make_round(number)]

    assert make(3, 1) == make(3, 1)
    assert make(3, 1) != make(3, 2)
    assert make(3, 1) != make(4, 1)


def test_held_out_answers_are_greedy(llm: LLM) -> None:
    made = Interviewer(llm, Limits(32, 8, 64), 0).make_round(0)
    held_out = [each for each in made if each.is_held_out]
    assert 1 <= len(held_out) <= 2
    for dialogue in held_out:
        prompt = {"prompt_token_ids": dialogue.tokens[: dialogue.num_prompt].tolist()}

        (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
        assert output.outputs[0].token_ids == dialogue.tokens[dialogue.num_prompt :].tolist()


def test_own_and_given_questions_are_mixed() -> None:
    own, given = [[1], [2], [3], [4], [5]], [[90], [91]]
    assert list(mix(own, given)) == [[1], [2], [90], [3], [4], [91], [5]]
    assert list(mix([], given)) == given
    assert list(mix(own, [])) == own


def test_an_answer_ends_where_it_loops() -> None:
    text = list(range(40))
    assert cut_loop(text) == text
    assert cut_loop([*text, *text[:20]]) == [*text, *text[:20]]  # a quotation
    looped = [*text, *[7, 8, 9] * 50]
    assert cut_loop(looped) == looped[: 40 + 10 + MAX_LOOP]  # 3 new tokens, and 7 until 8 of them are known


def test_tasks_are_about_earlier_answers(llm: LLM) -> None:
    """A resumed run has the same ones."""
    limits = Limits(48, 8, llm.info.max_len)
    first = Interviewer(llm, limits, 0)
    earlier = first.make_round(0)
    resumed = Interviewer(llm, limits, 0)
    resumed.remember(earlier)
    made, again = first.make_round(1), resumed.make_round(1)
    assert [each.tokens.tolist() for each in made] == [each.tokens.tolist() for each in again]
    asked = Interviewer(llm, limits, 0)._ask(1, 48)
    tasks = [each for each in made if each.tokens[: each.num_prompt].tolist() not in asked]
    assert len(tasks) >= 3
    answers = [decode(llm, each.tokens[each.num_prompt :].tolist()) for each in earlier if not each.is_held_out]
    for task in tasks:
        prompt = decode(llm, task.tokens[: task.num_prompt].tolist())
        assert any(answer in prompt for answer in answers)


def test_passages_fit() -> None:
    chooser = random.Random(0)
    lengths = [10, 60, 30, 200, 5]
    picked = [choose_passages(lengths, 90, chooser) for _ in range(200)]
    assert {len(each) for each in picked} >= {1, 2, 3}
    assert all(sum(lengths[index] for index in each) <= 90 for each in picked)
    assert all(len(set(each)) == len(each) for each in picked)


def test_answers_are_those_of_generate(llm: LLM) -> None:
    """More prompts than run at once, and of several lengths."""
    prompts = [[5 + nth, 60, 7] for nth in range(20)]
    params = [SamplingParams(temperature=0.8, seed=nth, max_tokens=3 + nth % 5) for nth in range(20)]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    made = answer(llm, prompts, params)
    assert [each.tokens for each in made] == [output.outputs[0].token_ids for output in outputs]
    assert [each.finish.value for each in made] == [output.outputs[0].finish_reason for output in outputs]


def test_an_interrupted_call_leaves_no_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm._client.engine
    step, calls = engine.step, [0]

    def interrupted() -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patched:
        patched.setattr(engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answer(llm, [[5, 6]] * 20, [SamplingParams(max_tokens=9)] * 20)
    assert not engine.scheduler.requests


def test_dialogues_are_kept(tmp_path: Path) -> None:
    kept = Dialogues(tmp_path / "run")
    made = [Dialogue(np.array([1, 2, 3], np.int32), 1, True), Dialogue(np.array([4, 5], np.int32), 1, False)]
    kept.add_round(made)
    kept.add_round([])
    read = Dialogues(tmp_path / "run")
    assert read.num_rounds == 2
    assert [each.tokens.tolist() for each in read.all] == [[1, 2, 3], [4, 5]]
    assert (len(read.held_out), len(read.training), read.num_answer_tokens) == (1, 1, 3)
    path = tmp_path / "run" / "dialogues-00001.safetensors"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(BadModelFile, match=r"dialogues-00001\.safetensors cannot be read"):
        Dialogues(tmp_path / "run")


def test_a_model_that_asks_nothing_new_is_refused(tmp_path: Path) -> None:
    silent: Any = SimpleNamespace(remember=lambda dialogues: None, make_round=lambda number: [], limits=Limits(5, 1, 1))
    with pytest.raises(InvalidParams, match="no new question in 15 tries"):
        collect(silent, Dialogues(tmp_path), 10, lambda: False, lambda done: None)


def test_prompts_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "a"}\n\n{"question": "b"}\n{"turns": ["c", "d"]}\n{"turns": [{"role": "user", "content": "e"}]}\n'
    )
    (tmp_path / "b.txt").write_text("f\n g \na\n")
    assert read_prompts([str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")]) == ["a", "b", "c", "e", "f", "g"]
    (tmp_path / "c.jsonl").write_text('\ufeff{"prompt": "one\u2028line"}\r\n{"prompt": "h"}\r\n', encoding="utf-8")
    assert read_prompts([str(tmp_path / "c.jsonl")]) == ["one\u2028line", "h"]
    (tmp_path / "d.jsonl").write_text('{"prompt": ' + "[" * 100_000 + "}")
    with pytest.raises(InvalidParams, match="line 1, is no prompt"):
        read_prompts([str(tmp_path / "d.jsonl")])


def test_what_cannot_be_written_is_an_error_with_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidParams, match="cannot be made"):
        check_directory(tmp_path / "file" / "head", tmp_path / "file" / "head" / "training", resume=False)
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidParams, match=r"folder cannot be written.* --resume"):
        write_atomically(tmp_path / "folder", b"")  # in place of a full disk
    assert not (tmp_path / "folder.partial").exists()


def test_anchors() -> None:
    dialogue = Dialogue(np.arange(9, dtype=np.int32), 4, False)
    assert find_anchors(dialogue).tolist() == [4, 5, 6, 7]
    picked = pick_anchors(dialogue, 0.5, generator())
    assert len(picked) == 2
    assert picked.tolist() == sorted(set(picked.tolist()) & {4, 5, 6, 7})
    assert pick_anchors(dialogue, 0.01, generator()).shape == (1,)


def test_acceptance_is_counted_chain_by_chain() -> None:
    """Against drafts made one anchor at a time."""
    target = make_target()
    vocabulary = DraftVocabulary(target, torch.arange(0, 8, 2))
    module = BlockModule(target, 3, 1, 4, generator())
    disturb(module)
    dialogues = texts([40, 7, 30], 8)  # few tokens, so that some drafts are right
    features = FeatureMaker(target, module.inputs, 96, torch.float32)
    found = Evaluator(module, target, vocabulary, features).measure(dialogues, 2)
    batch = batch_of(target, module.inputs, dialogues)
    with torch.no_grad():
        states = module(batch)
    head = target.head_rows(torch.arange(target.config.vocab_size))
    right, tried, reached, count = np.zeros(3), np.zeros(3), np.zeros(3), 0
    for row, dialogue in enumerate(dialogues):
        tokens = dialogue.tokens.tolist()
        for nth, anchor in enumerate(range(3, len(tokens) - 1)):
            count, alive = count + 1, True
            for place in range(3):
                if anchor + place + 1 >= len(tokens):
                    break
                logits = head @ states[row, nth, place]
                before = tokens[anchor + place]
                if place and before % 2 == 0:
                    logits[0:8:2] += module.bigram_out.weight @ module.bigram_in.weight[before // 2]
                allowed = {*range(0, 8, 2), *tokens[: anchor + 1]}
                best = max(allowed, key=lambda token: float(logits[token].detach()))
                is_right = best == tokens[anchor + place + 1]
                alive = alive and is_right
                right[place] += is_right
                tried[place] += 1
                reached[place] += alive
    assert right.sum() > 3
    assert found.num_anchors == count
    assert found.by_depth == pytest.approx((right / tried).tolist())
    assert found.reached == pytest.approx((reached / count).tolist())
    assert found.tokens_per_step(2) == pytest.approx(1 + reached[:2].sum() / count)


def test_a_calibration_ascends() -> None:
    rng = np.random.default_rng(0)
    probabilities = rng.random(4000)
    found = calibrate(probabilities, rng.random(4000) < probabilities**2)
    assert len(found) > 8
    assert found == sorted(found)
    assert all(low[1] <= high[1] for low, high in pairwise(found))
    for probability, agreement in found:
        assert agreement == pytest.approx(probability**2, abs=0.1)
    assert calibrate(np.array([0.1, 0.9]), np.array([True, False])) == [[0.5, 0.5]]
    assert calibrate(np.array([0.4]), np.array([True])) == [[0.4, 1.0]]


def test_each_epoch_has_every_dialogue_in_another_order() -> None:
    dialogues = texts([5] * 40)
    for each, dialogue in enumerate(dialogues):
        dialogue.tokens[0] = each
    rounds = list(plan_rounds(dialogues, LoopSettings(2, 60, 4, 1.0, 0)))
    order = [int(dialogue.tokens[0]) for each in rounds for dialogue in each]
    assert sorted(order[:40]) == sorted(order[40:]) == list(range(40))
    assert order[:40] != order[40:]
    assert all(sum(len(dialogue.tokens) for dialogue in each) < 65 for each in rounds)


def test_the_rate_warms_up_and_falls() -> None:
    rates = [rate(step / 1000) for step in range(1001)]
    peak = int(np.argmax(rates))
    assert 20 < peak < 40
    assert rates[0] < 0.2
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(0.05)


@pytest.mark.parametrize("count", [3, 4, 5, 12, 30])
def test_layers_are_spread(count: int) -> None:
    target: Any = SimpleNamespace(config=SimpleNamespace(num_layers=count))
    layers = spread_layers(target, (0.1, 0.5, 0.9))
    assert list(layers) == sorted(set(layers))
    assert layers[-1] < count
    assert count < 12 or layers == (int(0.1 * count), count // 2, int(0.9 * count))


def test_weights_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"fc\.weight of the head has values"):
        write_tensors(tmp_path, {"fc.weight": torch.tensor([[1e6]])}, torch.arange(3))


def test_a_head_pays_only_if_it_adds_something() -> None:
    def answer(seconds: float, num_steps: int, tokens: int = 11) -> Answer:
        return Answer([[7] * tokens], seconds, num_steps, 8, 5)

    row = [answer(4.0, 10), answer(3.0, 8), answer(2.0, 6), answer(1.0, 5)]
    measured = summarize([row, row])
    assert (measured.num_tokens, measured.tokens_per_step, measured.different) == (20, 2.0, 0)
    assert (measured.speedup, measured.speedup_without) == (2.0, pytest.approx(4 / 3))
    assert judge(measured).startswith("It pays: 2.00 times plain decoding with it and 1.33 times without it")
    slower = summarize([[answer(4.0, 10), answer(2.0, 6), answer(2.0, 6), answer(1.0, 5, 12)]])
    assert slower.different == 1
    with pytest.raises(EngineError, match="1 of 1 answers with the head differ"):
        check_answers(slower)
    assert judge(slower).startswith("It does not pay")
