"""Drafts from repeated text, replayed: how many tokens a step accepts, how long a call takes, how good the odds are.

python benchmarks/suffix.py answers PROMPTS.jsonl ANSWERS.jsonl [--model MODEL] [--prompts 20] [--tokens 256]
python benchmarks/suffix.py replay ANSWERS.jsonl [--drafts 3,5]
python benchmarks/suffix.py speed

PROMPTS.jsonl is Spec-Bench's question.jsonl. `answers` stores the model's greedy answers, `replay` runs no model.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from typing import NamedTuple

from arguments import count, count_list

from quire import LLM, SamplingParams
from quire.config import DEFAULT_MODEL

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
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
