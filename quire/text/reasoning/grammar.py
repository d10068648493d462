"""Grammars of answers with reasoning, in llguidance's Lark.

A frame is a grammar around a required format, which it refers to as `@answer` (`StructuredOutputs.frame`). Reasoning is
any text up to its closing; only what follows has the format. Harmony's calls of tools have a grammar of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from quire.text.reasoning.formats import Phase, ReasoningFormat
from quire.text.reasoning.harmony import CHANNEL, END, FINAL_HEADER, MESSAGE, START
from quire.text.tools.definitions import ToolChoice
from quire.text.tools.formats import HARMONY
from quire.text.tools.grammar import call_rules, needs_grammar, write_text

Special = Mapping[str, int]  # markers that are special tokens, with their ids


def reasoning_frame(format: ReasoningFormat, phase: Phase, special: Special) -> str | None:
    """Reasoning and then the answer; None if there can be no reasoning."""
    if phase == "answer":
        return None
    opening = write_text(format.opening, special)
    start = {"reasoning": "body SPACE? @answer", "either": f"({opening} body SPACE?)? @answer"}[phase]
    return write_rules(f"start: {start}", *rules_up_to("body", format.closing, special), r"SPACE: /[ \t\r\n]{1,4}/")


def harmony_frame(special: Special, *, in_final: bool) -> str | None:
    """Messages of the analysis channel, and then the answer in the final channel. None if that channel is open."""
    if in_final:
        return None
    final, json_final = (
        write_text(header, special) for header in (FINAL_HEADER, f"{CHANNEL}final <|constrain|>json{MESSAGE}")
    )
    return write_rules(f"start: analysis* ({final} | {json_final}) @answer", *analysis_rules(special))


def harmony_grammar(choice: ToolChoice, special: Special) -> str | None:
    """The grammar of an answer with calls, or None if the choice needs none. A message to a function ends the answer.

    If a call is not forced, the answer may have a preamble in the commentary channel before a call, or be final.
    """
    if not needs_grammar(choice):
        return None
    call = f"{write_text(HARMONY.opening, special)} call"
    rules = [*analysis_rules(special), *call_rules(HARMONY, choice, special)]
    if choice.is_forced:
        return write_rules(f"start: analysis* {call}", *rules)
    preamble, final = (write_text(header, special) for header in (f"{CHANNEL}commentary{MESSAGE}", FINAL_HEADER))
    return write_rules(
        f"start: (analysis | preamble)* ({call} | {final} TEXT?)",
        f"preamble: {preamble} thought {next_message(special)}",
        *rules,
        *([] if END in special else ["TEXT: /(?s:.+)/"]),
    )


def analysis_rules(special: Special) -> list[str]:
    header = write_text(f"{CHANNEL}analysis{MESSAGE}", special)
    return [f"analysis: {header} thought {next_message(special)}", *rules_up_to("thought", END, special)]


def next_message(special: Special) -> str:
    return write_text(f"{START}assistant", special)


def rules_up_to(name: str, closing: str, special: Special) -> list[str]:
    """A rule for any text up to a closing, the closing included. Text does not match special tokens."""
    if closing in special:
        return [f"{name}: TEXT? {write_text(closing, special)}", "TEXT: /(?s:.+)/"]
    return [f"{name}[lazy]: /(?s:.*){re.escape(closing).replace('/', chr(92) + '/')}/"]


def write_rules(*rules: str) -> str:
    return "\n".join([*rules, ""])
