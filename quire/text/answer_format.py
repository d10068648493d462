"""AnswerFormat: how the answer to one prompt is written: its reasoning, its tool calls, and what it may contain.

It makes the parser of an answer, and the grammar that follows from tools and structured outputs. The server makes one
for each prompt, of its chat template and the end of its text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidParams
from quire.text.detokenizer import Detokenizer
from quire.text.reasoning.formats import Phase, ReasoningFormat, prompt_phase
from quire.text.reasoning.grammar import harmony_frame, harmony_grammar, reasoning_frame
from quire.text.reasoning.harmony import FINAL_HEADER, HarmonyParser
from quire.text.reasoning.parser import AnswerParser, ReasoningParser
from quire.text.templates.capabilities import TemplateCapabilities
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tools.definitions import ToolChoice
from quire.text.tools.events import ReasoningDelta
from quire.text.tools.formats import HARMONY, ToolFormat, special_markers
from quire.text.tools.grammar import tool_call_grammar
from quire.text.tools.parser import ToolParser


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """`phase` is what the prompt leaves to the answer. In Harmony, "answer" is the body of the final message."""

    tools: ToolFormat
    choice: ToolChoice
    reasoning: ReasoningFormat | None
    phase: Phase

    @classmethod
    def of(cls, capabilities: TemplateCapabilities, choice: ToolChoice, prompt: str) -> AnswerFormat:
        format, reasoning = capabilities.format, capabilities.reasoning
        if format is HARMONY:
            return cls(format, choice, None, "answer" if prompt.endswith(FINAL_HEADER) else "either")
        phase: Phase = "answer" if reasoning is None else prompt_phase(reasoning, prompt)
        return cls(format, choice, reasoning, phase)

    @property
    def has_tools(self) -> bool:
        return self.choice.mode != "none"

    @property
    def is_harmony(self) -> bool:
        return self.tools is HARMONY

    def parser(self) -> AnswerParser:
        """A parser for one answer."""
        if self.is_harmony:
            return HarmonyParser(self.choice, in_final=self.phase == "answer")
        calls = ToolParser(self.tools, self.choice)
        if self.reasoning is None:
            return calls
        return ReasoningParser(self.reasoning, self.phase, calls)

    def after_prefill(self, prefill: str) -> tuple[str, AnswerFormat]:
        """The text that continues the prompt so that the answer begins with `prefill`, and the format behind it."""
        if not prefill:
            return "", self
        opened = ""
        if self.is_harmony:
            opened = FINAL_HEADER
        elif self.reasoning is not None and self.phase == "reasoning":
            opened = f"\n{self.reasoning.closing}\n\n"
        return opened + prefill, AnswerFormat(self.tools, self.choice, self.reasoning, "answer")

    def special_markers(self, tokenizer: Tokenizer) -> dict[str, int]:
        """Markers that are special tokens. They stay in the text, because the parser reads them."""
        markers = special_markers(self.tools, tokenizer) if self.has_tools or self.is_harmony else {}
        return markers if self.reasoning is None else markers | special_markers(self.reasoning, tokenizer)

    def count_reasoning_tokens(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
        """The tokens of an answer before its first text or call."""
        parser, kept = self.parser(), frozenset(self.special_markers(tokenizer).values())
        detokenizer = Detokenizer(tokenizer, keep_special_ids=kept, continues=True)
        for index, token in enumerate(token_ids):
            events = parser.push(detokenizer.push([token]))
            if not all(isinstance(event, ReasoningDelta) for event in events):
                return index
        return len(token_ids)

    def structured_outputs(self, required: Mapping[str, Any] | None, tokenizer: Tokenizer) -> dict[str, Any] | None:
        """The structured outputs that follow from tools and from the required format of the answer."""
        special = self.special_markers(tokenizer)
        if not self.has_tools:
            return None if required is None else self._put_in_frame(required, special)
        if required is not None and not self.choice.is_forced:
            raise InvalidParams(
                "The answer is to be JSON and may be a call of a tool as well; ask for one of the two: set tool_choice "
                "so that there must be a call, or none, or leave the format out."
            )
        if self.is_harmony:
            grammar = harmony_grammar(self.choice, special)
            return None if grammar is None else {"grammar": grammar}
        grammar = tool_call_grammar(self.tools, self.choice, special)
        return None if grammar is None else self._put_in_frame({"grammar": grammar}, special)

    def _put_in_frame(self, format: Mapping[str, Any], special: Mapping[str, int]) -> dict[str, Any]:
        """A format of the answer, and what may come before it."""
        if self.is_harmony:
            frame = harmony_frame(special, in_final=self.phase == "answer")
        else:
            frame = None if self.reasoning is None else reasoning_frame(self.reasoning, self.phase, special)
        if frame is not None and "frame" in format:
            raise InvalidParams(
                "structured_outputs.frame: this model reasons first, so the frame follows from its chat template; "
                "leave it out, or use completions."
            )
        return dict(format) if frame is None else {**format, "frame": frame}
