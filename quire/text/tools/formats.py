"""How models write calls: a `ToolFormat` is a row of texts that stand around a call's name and arguments.

The row serves three: `write_calls` here, the parser (`tool_parser.py`) and the grammar of forced calls
(`tool_grammar.py`). Which format a model speaks is found out in `tool_dialect.py`.

A marker may be a special token of the vocabulary, and special tokens are left out of an answer's text. Those of
`special_markers` must stay in it, or the parser sees no call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.text.tools.events import ToolCall

if TYPE_CHECKING:
    from quire.text.tokenizers.tokenizer import Tokenizer

ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The texts around calls.

    opening     stands before a call, or before the list of them
    head        between there and the arguments; NAME stands for the tool's name
    tail        between the arguments and the closing
    closing     ends a call, or the list
    between     separates calls
    is_list     all calls stand in one JSON list, between one opening and one closing
    is_bare     calls are written without the opening, and then must begin the answer
    is_named    the name stands before the arguments, not in a JSON object with them
    short_ids   templates take only ids of nine letters and digits
    markers     the texts of this format that a vocabulary may have as tokens
    """

    name: str
    opening: str
    head: str
    tail: str
    closing: str = ""
    between: str = ""
    is_list: bool = False
    is_bare: bool = False
    is_named: bool = False
    short_ids: bool = False
    markers: tuple[str, ...]

    def head_of(self, name: str) -> str:
        return self.head.replace("NAME", name)


HERMES = ToolFormat(
    name="hermes",
    opening="<tool_call>",
    head='\n{"name": "NAME", "arguments": ',
    tail="}\n",
    closing="</tool_call>",
    between="\n",
    markers=("<tool_call>", "</tool_call>"),
)
MISTRAL = ToolFormat(
    name="mistral",
    opening="[TOOL_CALLS]",
    head='{"name": "NAME", "arguments": ',
    tail="}",
    between=", ",
    is_list=True,
    short_ids=True,
    markers=("[TOOL_CALLS]",),
)
MISTRAL_NAMED = ToolFormat(
    name="mistral-named",
    opening="[TOOL_CALLS]",
    head=f"NAME{ARGS}",
    tail="",
    is_named=True,
    short_ids=True,
    markers=("[TOOL_CALLS]", CALL_ID, ARGS),
)
LLAMA = ToolFormat(
    name="llama",
    opening="<|python_tag|>",
    head='{"name": "NAME", "parameters": ',
    tail="}",
    between="; ",
    is_bare=True,
    markers=("<|python_tag|>",),
)
FORMATS = (HERMES, MISTRAL, MISTRAL_NAMED, LLAMA)


def write_calls(format: ToolFormat, calls: Sequence[ToolCall]) -> str:
    """The calls as a model of this format would write them."""
    bodies = [f"{format.head_of(call.name)}{call.arguments}{format.tail}" for call in calls]
    opening = "" if format.is_bare else format.opening
    if format.is_list:
        return f"{opening}[{format.between.join(bodies)}]{format.closing}"
    return format.between.join(f"{opening}{body}{format.closing}" for body in bodies)


def special_markers(format: ToolFormat, tokenizer: Tokenizer) -> dict[str, int]:
    """The markers that are special tokens of this vocabulary, with their ids."""
    ids = {marker: tokenizer.token_to_id(marker) for marker in format.markers}
    return {
        marker: token for marker, token in ids.items() if token in tokenizer.special_token_ids and token is not None
    }
