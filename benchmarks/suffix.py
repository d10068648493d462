"""Drafts from repeated text, replayed: how many tokens a step accepts, how long a call takes, how good the odds are.

python benchmarks/suffix.py answers PROMPTS.jsonl ANSWERS.jsonl [--model MODEL] [--prompts 20] [--tokens 256]
python benchmarks/suffix.py replay ANSWERS.jsonl [--drafts 3,5]
python benchmarks/suffix.py speed
python benchmarks/suffix.py fit ANSWERS.jsonl

PROMPTS.jsonl is Spec-Bench's question.jsonl. `answers` stores the model's greedy answers, `replay` runs no model.
`fit` prints the constants of `estimate` in csrc/suffix.cpp.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from arguments import count, count_list

from quire import LLM, SamplingParams
from quire.config import DEFAULT_MODEL
from quire.core.drafts import ROOT, Drafts
from quire.kernels.cpu.native import load
from quire.speculative.proposer import Context
from quire.speculative.suffix import SuffixProposer

CHAT_KINDS = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


class Answer(NamedTuple):
    kind: str
    prompt: list[int]
    tokens: list[int]


def read_prompts(path: str, num_prompts: int) -> list[tuple[str, str]]:
    """The first questions of each kind. MT-bench's kinds are one kind, and take turns."""
    found: dict[str, list[str]] = defaultdict(list)
    with open(path) as lines:
        for line in lines:
            question = json.loads(line)
            found[question["category"]].append(question["turns"][0])
    chats = [found.pop(kind) for kind in CHAT_KINDS if kind in found]
    found["mt_bench"] = [question for each in zip(*chats, strict=True) for question in each]
    return [(kind, text) for kind, texts in found.items() for text in texts[:num_prompts]]


def make_answers(options: argparse.Namespace) -> None:
    prompts = read_prompts(options.prompts_file, options.prompts)
    llm = LLM(options.model)
    messages = [[{"role": "user", "content": text}] for _, text in prompts]
    outputs = llm.chat(messages, SamplingParams(temperature=0, max_tokens=options.tokens))
    with open(options.answers_file, "w") as file:
        for (kind, _), output in zip(prompts, outputs, strict=True):
            answer = Answer(kind, list(output.prompt_token_ids), list(output.outputs[0].token_ids))
            file.write(json.dumps(answer._asdict()) + "\n")
    print(f"{len(outputs)} answers, {sum(len(output.outputs[0].token_ids) for output in outputs)} tokens")


class Replay:
    """Decodes stored answers with drafts of at most `max_drafts` nodes. `steps` are in the order of the answers."""

    def __init__(self, proposer: SuffixProposer, max_drafts: int, control: bool) -> None:
        self.proposer = proposer
        self.max_drafts = max_drafts
        self.control = control
        self.costs: dict[str, float] = defaultdict(float)  # by kind, in steps of one token
        self.tokens: dict[str, int] = defaultdict(int)
        self.steps: dict[str, int] = defaultdict(int)
        self.seconds: list[float] = []  # of each call
        self.outcomes: list[tuple[float, bool]] = []  # odds and whether the draft is right, where its parent is

    def run(self, answers: Sequence[Answer]) -> None:
        for nth, answer in enumerate(answers):
            self._decode(str(nth), answer)
            self.proposer.finish(str(nth))

    def _decode(self, request_id: str, answer: Answer) -> None:
        tokens, text = list(answer.prompt), answer.prompt + answer.tokens
        self.proposer.propose([Context(request_id, tokens, len(answer.prompt), b"")], [0])  # indexes the prompt
        tokens.append(text[len(tokens)])  # the prompt's own step
        while len(tokens) < len(text):
            context = Context(request_id, tokens, len(answer.prompt), b"")
            start = perf_counter()
            (drafts,) = self.proposer.propose([context], [self.max_drafts])
            self.seconds.append(perf_counter() - start)
            if drafts is not None and self.control:
                drafts = choose(drafts)
            num_drafts = len(drafts) if drafts is not None else 0
            num_right = self._accept(drafts, text[len(tokens) :]) if drafts is not None else 0
            new = text[len(tokens) : len(tokens) + num_right + 1]
            tokens += new
            self.costs[answer.kind] += step_cost(1 + num_drafts)
            self.tokens[answer.kind] += len(new)
            self.steps[answer.kind] += 1

    def _accept(self, drafts: Drafts, following: Sequence[int]) -> int:
        node = ROOT
        for depth, token in enumerate(following):
            for each in range(len(drafts)):
                if drafts.parent(each) == node:
                    self.outcomes.append((drafts.odds[each], drafts.tokens[each] == token))
            child = drafts.child(node, token)
            if child is None:
                return depth
            node = child
        return len(following)


def step_cost(num_tokens: int) -> float:
    """In steps of one token: a 135M model on two cores."""
    costs = (1.0, 1.15, 1.19, 1.22, 1.34, 1.39, 1.53, 1.66)
    return costs[num_tokens - 1] if num_tokens <= len(costs) else costs[-1] + 0.12 * (num_tokens - len(costs))


def survival(drafts: Drafts) -> list[float]:
    chances: list[float] = []
    for node, odds in enumerate(drafts.odds):
        parent = drafts.parent(node)
        chances.append(odds if parent == ROOT else odds * chances[parent])
    return chances


def choose(drafts: Drafts) -> Drafts | None:
    """The nodes that give the most tokens for a step's cost if the odds are true."""
    chances = survival(drafts)
    ranked = sorted(range(len(drafts)), key=lambda node: (-chances[node], node))
    best, best_count, expected = 1.0, 0, 1.0
    for count_, node in enumerate(ranked, 1):
        expected += chances[node]
        if expected / step_cost(1 + count_) > best:
            best, best_count = expected / step_cost(1 + count_), count_
    return drafts.keep(sorted(ranked[:best_count])) if best_count else None


def read_answers(path: str) -> list[Answer]:
    """In an order that mixes the kinds."""
    with open(path) as lines:
        answers = [Answer(**json.loads(line)) for line in lines]
    random.Random(0).shuffle(answers)
    return answers


def replay(options: argparse.Namespace) -> None:
    answers = read_answers(options.answers_file)
    kinds = sorted({answer.kind for answer in answers})
    num_tokens = sum(len(answer.tokens) for answer in answers)
    print(f"{len(answers)} answers, {num_tokens} tokens. Tokens a step, and the speed as a multiple of plain decoding")
    print(f"{'':32}" + "".join(f"{kind[:11]:>14}" for kind in [*kinds, "all"]))
    for max_drafts in options.drafts:
        for tenant in (False, True):
            for only_chains in (True, False):
                for control in (False, True):
                    proposer = SuffixProposer(max_tenants=int(tenant), only_chains=only_chains)
                    run = Replay(proposer, max_drafts, control)
                    run.run(answers)
                    report(run, kinds, only_chains, tenant)
    report_odds(run)
    report_seconds("a call in the replay", run.seconds)


def report(run: Replay, kinds: Sequence[str], only_chains: bool, tenant: bool) -> None:
    names = [f"k={run.max_drafts}", "chain" if only_chains else "tree"]
    names += ["answers"] * tenant + ["chosen"] * run.control
    columns = [(run.tokens[kind], run.steps[kind], run.costs[kind]) for kind in kinds]
    columns.append((sum(run.tokens.values()), sum(run.steps.values()), sum(run.costs.values())))
    cells = [f"{tokens / steps:6.2f} {tokens / cost:5.2f}x" for tokens, steps, cost in columns]
    print(f"{' '.join(names):32}" + "".join(f"{cell:>14}" for cell in cells))


def report_odds(run: Replay) -> None:
    outcomes = sorted(run.outcomes)
    print("odds, and how many of these drafts are right, by decile of odds:")
    for nth in range(10):
        part = outcomes[len(outcomes) * nth // 10 : len(outcomes) * (nth + 1) // 10]
        odds, right = (sum(column) / len(part) for column in zip(*part, strict=True))
        print(f"  {odds:.3f} {right:.3f}")


def report_seconds(name: str, seconds: Sequence[float]) -> None:
    ranked = sorted(seconds)
    median, late = ranked[len(ranked) // 2] * 1e6, ranked[len(ranked) * 99 // 100] * 1e6
    print(f"{name:48} p50 {median:8.1f} us, p99 {late:8.1f} us, most {ranked[-1] * 1e6:8.1f} us")


def make_text(num_tokens: int, seed: int) -> list[int]:
    """Tokens with the frequencies of words in a language, and with passages that occur again."""
    random_ = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        if tokens and random_.random() < 0.5:
            start = random_.randrange(len(tokens))
            tokens += tokens[start : start + random_.randrange(2, 40)]
        else:
            tokens += [int(random_.paretovariate(0.6)) % 49152 for _ in range(20)]
    return tokens[:num_tokens]


def speed(options: argparse.Namespace) -> None:
    for num_tokens in (1024, 8192, 32768):
        for batch in (1, 64):
            measure_batch(num_tokens, batch)
    measure_calls("100,000 equal tokens, 1 request", [[7] * 100_000], 200)


def measure_batch(num_tokens: int, batch: int) -> None:
    texts = [make_text(num_tokens + 200, seed) for seed in range(batch)]
    measure_calls(f"{num_tokens} tokens, {batch} request(s)", texts, num_tokens)


def measure_calls(name: str, texts: Sequence[list[int]], num_prompt: int) -> None:
    """Indexes the texts but for their last 200 tokens, then proposes after each of those."""
    proposer = SuffixProposer()
    for nth in range(16):  # earlier answers of the tenant
        proposer.propose([Context(f"old{nth}", make_text(4096, -nth), 0, b"")], [0])
        proposer.finish(f"old{nth}")
    first, seconds = [], []
    grown = [text[:-200] for text in texts]
    contexts = [Context(str(nth), tokens, num_prompt, b"") for nth, tokens in enumerate(grown)]
    for context in contexts:
        start = perf_counter()
        proposer.propose([context], [5])
        first.append(perf_counter() - start)
    for nth in range(200):
        for tokens, text in zip(grown, texts, strict=True):
            tokens.append(text[nth - 200])
        start = perf_counter()
        proposer.propose(contexts, [5] * len(texts))
        seconds.append((perf_counter() - start) / len(texts))
    report_seconds(f"{name}: first call", first)
    report_seconds(f"{name}: a request", seconds)


def fit(options: argparse.Namespace) -> None:
    """Logistic regression of whether a token is right, over the three likeliest tokens at each position."""
    native: Any = load()
    tenant = native.TenantText(65536)
    features: list[list[float]] = []
    right: list[bool] = []
    for owner, answer in enumerate(read_answers(options.answers_file), 1):
        request = native.RequestText(owner, [], len(answer.prompt))
        tokens = list(answer.prompt)
        for token in answer.tokens:
            native.propose_repeats([request], [None], [tokens], [0], True)
            for other, columns in rank_choices(request.occurrences(), request.occurrences(tenant))[:3]:
                features.append(columns)
                right.append(other == token)
            tokens.append(token)
        native.publish_answer(request, tenant, tokens)
    names = ("constant", "log length", "log count", "log share / (1 - share + 0.02)")
    for name, value in zip(names, regress(np.array(features), np.array(right, float)), strict=True):
        print(f"{name:32} {value:6.3f}")


def rank_choices(own: Sequence[tuple], others: Sequence[tuple]) -> list[tuple[int, list[float]]]:
    """Tokens by their weight, as csrc/suffix.cpp weighs them, with the features of `estimate`."""
    weights: dict[int, float] = defaultdict(float)
    counts: dict[int, float] = defaultdict(float)
    lengths: dict[int, int] = defaultdict(int)
    total = 0.0
    votes = [(*each, 1.0, 1.0) for each in own] + [(*each, 0.03, 0.25) for each in others]
    for token, length, weight, count_ in votes:
        total += weight * min(length, 16) ** 3
        if token is not None:  # else the answer ended there
            weights[token] += weight * min(length, 16) ** 3
            counts[token] += count_
            lengths[token] = max(lengths[token], length)
    ranked = []
    for token in sorted(weights, key=lambda token: -weights[token]):
        share = weights[token] / total
        odds_of_share = math.log(share / (1 - share + 0.02))
        ranked.append((token, [math.log(lengths[token]), math.log(counts[token]), odds_of_share]))
    return ranked


def regress(features: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Newton's method."""
    x = np.c_[np.ones(len(features)), features]
    constants = np.zeros(x.shape[1])
    for _ in range(30):
        chance = 1 / (1 + np.exp(-x @ constants))
        curvature = x.T @ (x * (chance * (1 - chance))[:, None])
        constants += np.linalg.solve(curvature, x.T @ (right - chance))
    return constants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    answers = commands.add_parser("answers")
    answers.add_argument("prompts_file")
    answers.add_argument("answers_file")
    answers.add_argument("--model", default=DEFAULT_MODEL)
    answers.add_argument("--prompts", type=count, default=20, help="prompts of each kind")
    answers.add_argument("--tokens", type=count, default=256, help="tokens of an answer, at most")
    answers.set_defaults(run=make_answers)
    replays = commands.add_parser("replay")
    replays.add_argument("answers_file")
    replays.add_argument("--drafts", type=count_list, default=[3, 5], help="numbers of drafts")
    replays.set_defaults(run=replay)
    commands.add_parser("speed").set_defaults(run=speed)
    fits = commands.add_parser("fit")
    fits.add_argument("answers_file")
    fits.set_defaults(run=fit)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
