"""Dialogues: questions that a model asks itself, and its answers. They are made by quire and kept on disk. No torch.

For a chat model the prompt is the beginning of a user's turn, so the model writes the question, and a third of the
prompts are tasks on its earlier answers (`tasks.py`). Other models continue text that they have sampled themselves.
Given prompts make up to a third.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from quire.core.params import SamplingParams
from quire.core.request import Finish
from quire.errors import BadModelFile, InvalidParams
from quire.llm import LLM
from quire.train.answers import answer
from quire.train.settings import write_atomically
from quire.train.tasks import choose_passages, write_task

TEMPERATURES = (0.0, 0.7, 0.0, 1.0)  # of answers, in turn
QUESTION_TOKENS = 96
QUESTION_TOP_P = 0.95  # at temperature 1
MIN_ENDED = 0.1  # share of questions that end by themselves, else all are taken
MIN_CHARACTERS = 8  # of a question
MIN_ANSWER = 4  # tokens
LOOP_TOKENS = 8  # that occur a second time in an answer ...
MAX_LOOP = 32  # ... as often in a row end it there: small models repeat themselves for ever
MAX_REPEATS = 0.5  # share of a question's tokens that repeat what came before
HELD_OUT_EVERY = 16  # dialogues: it is greedy, and is measured instead of trained on
MAX_EMPTY_ROUNDS = 3  # in a row
TASK_TOKENS = 64  # room for the words of a task
MARK = "QUIRE-QUESTION"  # in place of a question: what a template writes before it opens a user's turn

ENDS = (Finish.STOP, Finish.LENGTH)  # of answers that are used

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A prompt and its answer, as tokens."""

    tokens: Ids
    num_prompt: int
    is_held_out: bool

    @property
    def num_answer(self) -> int:
        return len(self.tokens) - self.num_prompt


@dataclass(frozen=True, slots=True)
class Limits:
    """In tokens, but for `round_questions`, which are asked in one go."""

    round_questions: int
    answer_tokens: int
    text_tokens: int


@dataclass(slots=True)
class Interviewer:
    """Makes dialogues in rounds. A round depends on the seed, its number and the questions before it."""

    llm: LLM
    limits: Limits
    seed: int
    prompts: Sequence[str] = ()
    _asked: set[tuple[int, ...]] = field(default_factory=set)  # prompts of all dialogues so far
    _given: list[list[int]] = field(default_factory=list)  # the given prompts that fit, in a random order
    _earlier: list[Dialogue] = field(default_factory=list)  # of earlier rounds, those that are trained on

    def __post_init__(self) -> None:
        texts = list(self.prompts)
        random.Random(self.seed).shuffle(texts)
        rendered = [self._render(text) for text in texts]
        self._given = [prompt for prompt in rendered if len(prompt) <= self.limits.text_tokens // 2]

    @property
    def num_too_long(self) -> int:
        """Given prompts that are left out, because they leave too little room for an answer."""
        return len(self.prompts) - len(self._given)

    def remember(self, dialogues: Sequence[Dialogue]) -> None:
        """Dialogues of earlier rounds: their questions are not asked again."""
        self._asked |= {prompt_key(dialogue.tokens[: dialogue.num_prompt]) for dialogue in dialogues}
        self._earlier += [dialogue for dialogue in dialogues if not dialogue.is_held_out]

    def make_round(self, number: int) -> list[Dialogue]:
        questions = self._new_questions(number)
        params = [
            SamplingParams(
                temperature=TEMPERATURES[nth % len(TEMPERATURES)],
                max_tokens=self._room(question),
                seed=self._seed(number, nth, 1),
            )
            for nth, question in enumerate(questions)
        ]
        found = []
        for nth, (question, made) in enumerate(zip(questions, answer(self.llm, questions, params), strict=True)):
            if made.finish not in ENDS or len(made.tokens) < MIN_ANSWER:
                continue
            tokens = np.array([*question, *cut_loop(made.tokens)], np.int32)
            found.append(Dialogue(tokens, len(question), nth % HELD_OUT_EVERY == 0))
        self._earlier += [dialogue for dialogue in found if not dialogue.is_held_out]
        return found

    def _new_questions(self, number: int) -> list[list[int]]:
        """Of a round, as prompts. Given prompts take every third place until they are used up."""
        count = self.limits.round_questions
        share = count // 3
        given = self._given[number * share : (number + 1) * share]
        tasks = self._tasks(number, (count - len(given)) // 3)
        own = self._ask(number, count - len(given) - len(tasks))
        questions: list[list[int]] = []
        for prompt in mix(list(mix(own, tasks)), given):
            key = prompt_key(prompt)
            if key not in self._asked and self._room(prompt) >= MIN_ANSWER:
                self._asked.add(key)
                questions.append(prompt)
        return questions

    def _ask(self, number: int, count: int) -> list[list[int]]:
        """The model's own questions, without the bad ones."""
        opening = find_opening(self.llm)
        most = min(QUESTION_TOKENS, self.limits.text_tokens // 2 - len(opening))
        if most < 1:
            raise InvalidParams(
                f"The chat template takes {len(opening)} tokens before a question, and a dialogue may have "
                f"{self.limits.text_tokens}. Raise max_len."
            )
        params = [
            SamplingParams(temperature=1.0, top_p=QUESTION_TOP_P, max_tokens=most, seed=self._seed(number, nth, 0))
            for nth in range(count)
        ]
        tokenizer, ends = self.llm.get_tokenizer(), self.llm._input_processor.end_token_ids
        made = [each for each in answer(self.llm, [opening] * count, params) if each.finish in ENDS]
        texts = [decode(self.llm, each.tokens) for each in made]
        usable = [(each, text) for each, text in zip(made, texts, strict=True) if is_question(text, each.tokens)]
        if not tokenizer.chat_template:
            return [[*opening, *(token for token in each.tokens if token not in ends)] for each, _ in usable]
        ended = [pair for pair in usable if pair[0].finish is Finish.STOP]  # those that are cut off are often nonsense
        chosen = ended if len(ended) >= MIN_ENDED * count else usable
        return [self._render(text.strip()) for _, text in chosen]

    def _tasks(self, number: int, count: int) -> list[list[int]]:
        """Prompts about answers of earlier rounds, which leave room for an answer."""
        tokenizer = self.llm.get_tokenizer()
        if not tokenizer.chat_template or not self._earlier:
            return []
        before, after = find_turn(self.llm)
        lengths = [dialogue.num_answer for dialogue in self._earlier]
        most = self.limits.text_tokens - self.limits.answer_tokens - len(before) - len(after) - TASK_TOKENS
        tasks = []
        for nth in range(count):
            chooser = random.Random(self._seed(number, nth, 2))
            chosen = [self._earlier[index] for index in choose_passages(lengths, most, chooser)]
            if chosen:
                passages = [decode(self.llm, each.tokens[each.num_prompt :].tolist()) for each in chosen]
                question = strip(chooser.choice(chosen), before, after)
                text = decode(self.llm, question) if len(question) <= QUESTION_TOKENS else None
                tasks.append(self._render(write_task(passages, text, chooser)))
        return tasks

    def _render(self, text: str) -> list[int]:
        tokenizer = self.llm.get_tokenizer()
        if not tokenizer.chat_template:
            return tokenizer.encode(text)
        return list(self.llm.render([{"role": "user", "content": text}])["prompt_token_ids"])

    def _room(self, prompt: Sequence[int]) -> int:
        """Tokens of an answer."""
        return min(self.limits.answer_tokens, self.limits.text_tokens - len(prompt))

    def _seed(self, number: int, nth: int, use: int) -> int:
        return random.Random(f"{self.seed} {number} {nth} {use}").getrandbits(62)


def find_turn(llm: LLM) -> tuple[list[int], list[int]]:
    """The tokens that a chat template writes before a question, and those behind it."""
    before, found, after = llm.render([{"role": "user", "content": MARK}])["prompt"].partition(MARK)
    if not found or not before:
        raise InvalidParams(
            "The model's chat template does not open a user's turn, so the model cannot ask itself questions. Take "
            "a model with another template."
        )
    encode = llm.get_tokenizer().encode
    return encode(before, add_special_tokens=False), encode(after, add_special_tokens=False)


def strip(dialogue: Dialogue, before: Sequence[int], after: Sequence[int]) -> list[int]:
    """The tokens of a dialogue's question, without what the template writes around it."""
    tokens: list[int] = dialogue.tokens[: dialogue.num_prompt].tolist()
    return tokens[len(before) : len(tokens) - len(after)]


def decode(llm: LLM, tokens: Sequence[int]) -> str:
    """Without special tokens. A model may have more tokens than its tokenizer."""
    tokenizer = llm.get_tokenizer()
    return tokenizer.decode([token for token in tokens if token < tokenizer.vocab_size])


def find_opening(llm: LLM) -> list[int]:
    """The tokens after which the model writes a question: the beginning of a user's turn, or of a text."""
    tokenizer = llm.get_tokenizer()
    if tokenizer.chat_template:
        return find_turn(llm)[0]
    first = next((each for each in (tokenizer.bos_token_id, tokenizer.eos_token_id) if each is not None), None)
    if first is None:
        raise InvalidParams("The model has neither a chat template nor a token that begins a text.")
    return [first]


def is_question(text: str, tokens: Sequence[int]) -> bool:
    """Long enough, and not one phrase again and again."""
    if len(text.strip()) < MIN_CHARACTERS:
        return False
    pairs = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    return not pairs or 1 - len(set(pairs)) / len(pairs) <= MAX_REPEATS


def cut_loop(tokens: Sequence[int]) -> Sequence[int]:
    """An answer until it has repeated itself for MAX_LOOP tokens in a row."""
    known, num_repeated = set[tuple[int, ...]](), 0
    for stop in range(LOOP_TOKENS, len(tokens) + 1):
        last = tuple(tokens[stop - LOOP_TOKENS : stop])
        num_repeated = num_repeated + 1 if last in known else 0
        if num_repeated == MAX_LOOP:
            return tokens[:stop]
        known.add(last)
    return tokens


def mix(own: Sequence[list[int]], given: Sequence[list[int]]) -> Iterator[list[int]]:
    """Two own ones, then a given one, as long as there are any."""
    first, second = iter(own), iter(given)
    for nth in range(3 * max(len(own), len(given))):
        chosen = next(second if nth % 3 == 2 else first, None)
        if chosen is not None:
            yield chosen


def prompt_key(tokens: Sequence[int] | Ids) -> tuple[int, ...]:
    return tuple(int(token) for token in tokens)


class Dialogues:
    """The dialogues of a run, one file a round. A file that is there is whole."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.all: list[Dialogue] = []
        self.num_rounds = 0
        while (path := self._path(self.num_rounds)).exists():
            self.all += read_round(path)
            self.num_rounds += 1

    @property
    def num_answer_tokens(self) -> int:
        return sum(dialogue.num_answer for dialogue in self.all)

    @property
    def training(self) -> list[Dialogue]:
        return [dialogue for dialogue in self.all if not dialogue.is_held_out]

    @property
    def held_out(self) -> list[Dialogue]:
        return [dialogue for dialogue in self.all if dialogue.is_held_out]

    def add_round(self, dialogues: Sequence[Dialogue]) -> None:
        path = self._path(self.num_rounds)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_round(path, dialogues)
        self.all += dialogues
        self.num_rounds += 1

    def _path(self, number: int) -> Path:
        return self._directory / f"dialogues-{number:05}.safetensors"


def write_round(path: Path, dialogues: Sequence[Dialogue]) -> None:
    joined = np.concatenate([np.zeros(0, np.int32), *(dialogue.tokens for dialogue in dialogues)])
    columns = {
        "tokens": joined,
        "lengths": np.array([len(dialogue.tokens) for dialogue in dialogues], np.int32),
        "num_prompts": np.array([dialogue.num_prompt for dialogue in dialogues], np.int32),
        "held_out": np.array([dialogue.is_held_out for dialogue in dialogues], np.int32),
    }
    write_atomically(path, save(columns))


def read_round(path: Path) -> list[Dialogue]:
    try:
        columns = load_file(path)
        ends = np.cumsum(columns["lengths"])
        texts = np.split(columns["tokens"], ends[:-1]) if len(ends) else []
        rows = zip(texts, columns["num_prompts"].tolist(), columns["held_out"].tolist(), strict=True)
        return [Dialogue(tokens, num_prompt, bool(held_out)) for tokens, num_prompt, held_out in rows]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise BadModelFile(f"{path} cannot be read ({error}). Start the run again without it.") from error


def collect(
    interviewer: Interviewer,
    dialogues: Dialogues,
    num_tokens: int,
    is_over: Callable[[], bool],
    report: Callable[[int], None],
) -> None:
    """Make rounds until there are enough answer tokens, or until the time is over."""
    interviewer.remember(dialogues.all)
    num_empty = 0
    while dialogues.num_answer_tokens < num_tokens and not (dialogues.all and is_over()):
        report(dialogues.num_answer_tokens)
        made = interviewer.make_round(dialogues.num_rounds)
        num_empty = 0 if made else num_empty + 1
        if num_empty == MAX_EMPTY_ROUNDS:
            raise InvalidParams(
                f"The model has asked no new question in {num_empty * interviewer.limits.round_questions} tries. Give "
                "prompts, or fewer tokens."
            )
        dialogues.add_round(made)
    report(dialogues.num_answer_tokens)
