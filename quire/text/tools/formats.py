"""ToolFormat: the texts that a model writes around the name and the arguments of a tool call.

A format is data for three users: `write_calls` here, the parser (`parser.py`), and the grammar of forced calls
(`grammar.py`). Which format a model uses is detected in `templates/capabilities.py`. Harmony's calls are messages among
others, so it has a parser and a grammar of its own (`text/reasoning/`).

A marker may be a special token. The detokenizer skips special tokens, so those of `special_markers` must be kept in the
text for the parser.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quire.text.tools.events import ToolCall

if TYPE_CHECKING:
    from quire.text.tokenizers.tokenizer import Tokenizer

ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The texts around calls.

    opening     before a call, or before the list of calls
    head        between the opening and the arguments; NAME is replaced by the tool's name
    tail        between the arguments and the closing
    closing     after a call, or after the list of calls
    between     between two calls
    is_list     all calls are in one JSON list, between one opening and one closing
    is_bare     calls have no opening, so they must begin the answer
    is_named    the name is before the arguments, not in a JSON object with them
    short_ids   the template accepts only ids of nine letters and digits
    markers     the texts of this format that may be tokens of a vocabulary
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
HARMONY = ToolFormat(
    name="harmony",
    opening="<|channel|>commentary to=functions.",
    head="NAME <|constrain|>json<|message|>",
    tail="",
    closing="<|call|>",
    markers=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
)
FORMATS = (HERMES, MISTRAL, MISTRAL_NAMED, LLAMA)  # that `ToolParser` reads


def write_calls(format: ToolFormat, calls: Sequence[ToolCall]) -> str:
    """The calls in this format."""
    bodies = [f"{format.head_of(call.name)}{call.arguments}{format.tail}" for call in calls]
    opening = "" if format.is_bare else format.opening
    if format.is_list:
        return f"{opening}[{format.between.join(bodies)}]{format.closing}"
    return format.between.join(f"{opening}{body}{format.closing}" for body in bodies)


class HasMarkers(Protocol):
    """A format, of tool calls or of reasoning."""

    @property
    def markers(self) -> tuple[str, ...]: ...


def special_markers(format: HasMarkers, tokenizer: Tokenizer) -> dict[str, int]:
    """The markers that are special tokens of the tokenizer, with their ids."""
    ids = {marker: tokenizer.token_to_id(marker) for marker in format.markers}
    return {
        marker: token for marker, token in ids.items() if token in tokenizer.special_token_ids and token is not None
    }
