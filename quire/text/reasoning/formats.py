"""ReasoningFormat: the texts that a model writes around its reasoning, as `<think>` and `</think>`.

`detect_reasoning` finds the format of a chat template. `prompt_phase` says what a rendered prompt leaves open: some
templates open the reasoning (DeepSeek-R1), some close it at once (Qwen3 without thinking), most leave it to the model.
gpt-oss's channels are another format, `harmony.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["reasoning", "answer", "either"]  # what comes next; either: reasoning if its opening is written


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    opening: str
    closing: str
    markers: tuple[str, ...]  # the texts of this format that may be special tokens

    @classmethod
    def of(cls, opening: str, closing: str) -> ReasoningFormat:
        return cls(opening, closing, (opening, closing))


THINK = ReasoningFormat.of("<think>", "</think>")
FORMATS = (
    THINK,
    ReasoningFormat.of("[THINK]", "[/THINK]"),  # Ministral and Magistral
    ReasoningFormat.of("<seed:think>", "</seed:think>"),  # Seed-OSS
    ReasoningFormat.of("<mm:think>", "</mm:think>"),  # MiniMax
    ReasoningFormat("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),  # Gemma 4
)


def detect_reasoning(source: str) -> ReasoningFormat | None:
    """The format whose two texts are in the source of a chat template.

    A template that only mentions them does no harm: an answer that does not begin with the opening is not split.
    """
    return next((each for each in FORMATS if each.opening in source and each.closing in source), None)


def prompt_phase(format: ReasoningFormat, prompt: str) -> Phase:
    """What follows a rendered prompt. Only its end is read, because users may write markers too."""
    end = prompt.rstrip()
    if end.endswith(format.opening):
        return "reasoning"
    return "answer" if end.endswith(format.closing) else "either"
