"""Tasks: prompts about texts that the model has written in earlier rounds. They make long prompts, whose words return
in the answers, as in summaries and in answers from documents. `Interviewer` mixes them with questions. No torch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

QUESTIONED = (
    "Answer the question from the text.\n\nText: {text}\n\nQuestion: {question}",
    "{text}\n\n{question}",
    "{question} Use only what these passages say.\n\n{text}",
)
INSTRUCTIONS = (
    "Summarize the following text.\n\n{text}",
    "Write a short summary of this: {text}",
    "{text}\n\nGive the main points of the text above as a list.",
    "What is this text about? Answer in one or two sentences.\n\n{text}",
    "Rewrite this text in simpler words.\n\n{text}",
    "Find a title for this text and explain your choice.\n\n{text}",
    "Translate into {language}: {text}",
    "Continue this text.\n\n{text}",
)
LANGUAGES = ("French", "German", "Spanish", "Italian")
QUESTIONED_SHARE = 0.4
MAX_PASSAGES = 3


def choose_passages(lengths: Sequence[int], max_tokens: int, chooser: random.Random) -> list[int]:
    """Indices of one to three texts, given by their lengths, that have at most `max_tokens` together."""
    wanted, picked, num_tokens = chooser.randint(1, MAX_PASSAGES), list[int](), 0
    for _ in range(2 * wanted):
        index = chooser.randrange(len(lengths))
        if len(picked) < wanted and num_tokens + lengths[index] <= max_tokens and index not in picked:
            picked.append(index)
            num_tokens += lengths[index]
    return picked


def write_task(passages: Sequence[str], question: str | None, chooser: random.Random) -> str:
    """`question` is one that one of the passages answers, if it is not a task itself."""
    text = "\n\n".join(passages)
    if chooser.random() < QUESTIONED_SHARE and question is not None:
        return chooser.choice(QUESTIONED).format(text=text, question=question)
    return chooser.choice(INSTRUCTIONS).format(text=text, language=chooser.choice(LANGUAGES))
