"""GrammarCompiler: a StructuredOutputs becomes a matcher of llguidance.

The engine and the checker's worker process both compile here, so a grammar that passes the check also compiles in the
engine. It takes a `TokenizerInfo`, not a tokenizer, because the worker has none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.core.structured import StructuredOutputs
from quire.errors import BadGrammar, EngineError, UnsupportedModel

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

    from quire.text.tokenizers.tokenizer import Tokenizer

# Whitespace in JSON: a space, or a newline with indentation. It is bounded because a small model may repeat it forever.
WHITESPACE = r" |\n(?: {0,32}|\t{0,8})"

INITIAL_LEXER_FUEL = 300_000  # limits the work before the first token, in llguidance's unit
MAX_LEXER_STATES = 50_000  # about a kilobyte each
MAX_GRAMMAR_SYMBOLS = 200_000
MAX_FORCED_BYTES = 1024
MAX_REASON_CHARS = 400

# Options of a Lark rule that a token mask cannot implement.
UNSUPPORTED_OPTION = re.compile(
    r"^[ \t]*[a-z_][\w-]*(?:\.-?\d+)?[ \t]*\[[^\]\n]*\b(temperature|stop)[ \t]*=", re.MULTILINE
)

SOURCE_LINE = re.compile(r"\d+ \| |\^+$")  # a quoted source line, or the carets below it

# The formats that JSON Schema defines. By the standard any other format allows every string.
FORMATS = {
    "date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname", "ipv4", "ipv6", "iri",
    "iri-reference", "json-pointer", "regex", "relative-json-pointer", "time", "uri", "uri-reference", "uri-template",
    "uuid",
}  # fmt: skip
VALUE_KEYWORDS = {"const", "default", "enum", "examples"}  # keywords that hold values, not schemas


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """What llguidance needs of a tokenizer: the bytes of each token, the special tokens and the end tokens."""

    tokens: list[bytes]
    special_ids: list[int]
    end_ids: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, end_token_ids: frozenset[int]) -> TokenizerInfo:
        """Ids that the model has no logits for are excluded."""
        size = min(tokenizer.vocab_size, vocab_size)
        ends = sorted(token for token in end_token_ids if token < size)
        if not ends:
            raise UnsupportedModel("The model has no token that ends an answer, so a structured one could not end.")
        special = sorted({token for token in tokenizer.special_token_ids if token < size}.union(ends))
        return cls([tokenizer.pieces[token] for token in range(size)], special, ends)


class ForcedTextTokenizer:
    """Tokenizes text that a grammar forces. llguidance calls it.

    The result of the model's tokenizer is used if its tokens are exactly the text. They are not if the tokenizer adds a
    leading space or turns the name of a special token into that token. Only the first `MAX_FORCED_BYTES` of a text are
    tokenized; the rest follows when the answer has reached it.
    """

    def __init__(self, tokenizer_info: TokenizerInfo, encode: Callable[[str], list[int]] | None) -> None:
        self.tokens = tokenizer_info.tokens
        self.special_token_ids = tokenizer_info.special_ids
        self.eos_token_id = tokenizer_info.end_ids[0]
        self.bos_token_id = None
        self._encode = encode
        self._special = frozenset(tokenizer_info.special_ids)
        self._ids: dict[bytes, int] = {}  # token id by bytes; filled on first use
        self._max_len = 0

    def __call__(self, text: bytes) -> list[int]:
        if len(text) > MAX_FORCED_BYTES:
            text = text[:MAX_FORCED_BYTES].decode(errors="ignore").encode()
        tokens = self._encode(text.decode()) if self._encode is not None else []
        known = all(token < len(self.tokens) and token not in self._special for token in tokens)
        decoded = b"".join(self.tokens[token] for token in tokens) if known else b""
        if decoded == text:
            return tokens
        if decoded == b" " + text:
            return self._encode_longest_match(self.tokens[tokens[0]][1:]) + tokens[1:]
        return self._encode_longest_match(text)

    def _encode_longest_match(self, text: bytes) -> list[int]:
        """Take the longest token that matches, repeatedly."""
        if not self._ids:
            self._ids = {piece: token for token, piece in enumerate(self.tokens) if token not in self._special}
            self._max_len = max(map(len, self._ids))
        tokens, start = [], 0
        while start < len(text):
            for end in range(min(len(text), start + self._max_len), start, -1):
                if (token := self._ids.get(text[start:end])) is not None:
                    tokens.append(token)
                    break
            start = end
        return tokens


class GrammarCompiler:
    """Compiles grammars for one tokenizer."""

    def __init__(self, tokenizer_info: TokenizerInfo, encode: Callable[[str], list[int]] | None = None) -> None:
        try:
            import llguidance
        except ImportError:
            raise EngineError("structured_outputs needs llguidance; install it: pip install llguidance") from None
        self._llguidance = llguidance
        tokenizer = llguidance.TokenizerWrapper(ForcedTextTokenizer(tokenizer_info, encode))
        self._tokenizer: LLTokenizer = llguidance.LLTokenizer(tokenizer, eos_token=tokenizer_info.end_ids)
        self._limits: LLParserLimits = llguidance.LLParserLimits(
            initial_lexer_fuel=INITIAL_LEXER_FUEL,
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=MAX_GRAMMAR_SYMBOLS,
            verbose_errors=False,
        )

    def compile(self, spec: StructuredOutputs) -> LLMatcher:
        """A matcher at the start of an answer. The first mask is computed, because that does some of the work."""
        matcher = self._llguidance.LLMatcher(
            self._tokenizer, self._to_llguidance(spec), log_level=0, limits=self._limits
        )
        matcher.compute_bitmask()
        if matcher.is_error():
            raise bad_grammar(matcher.get_error())
        return matcher

    def _to_llguidance(self, spec: StructuredOutputs) -> str:
        """The grammar in llguidance's own format."""
        format = self._format_to_llguidance(spec)
        return format if spec.frame is None else put_in_frame(spec.frame, format)

    def _format_to_llguidance(self, spec: StructuredOutputs) -> str:
        matcher = self._llguidance.LLMatcher
        if (schema := spec.schema) is not None:
            try:
                return matcher.grammar_from_json_schema(drop_unknown_formats(schema), *whitespace_options(spec))
            except ValueError as error:
                raise bad_grammar(str(error)) from None
        if spec.regex is not None:
            return matcher.grammar_from_regex(ascii_digits(spec.regex))
        if spec.choice is not None:
            return matcher.grammar_from_lark(choice_to_lark(spec.choice))
        assert spec.grammar is not None
        return matcher.grammar_from_lark(grammar_to_lark(spec.grammar))


def put_in_frame(frame: str, format: str) -> str:
    """Two grammars, the second of which the first refers to as `@answer`. A format is Lark, or JSON that holds one."""
    held = json.loads(format)["grammars"][0] if format.startswith("{") else {"lark_grammar": format}
    return json.dumps({"grammars": [{"lark_grammar": grammar_to_lark(frame)}, {**held, "name": "answer"}]})


def whitespace_options(spec: StructuredOutputs) -> tuple[JsonCompileOptions, JsonCompileOptions]:
    """Two sets of llguidance options: defaults, which a schema's own x-guidance overrides, and overrides of that."""
    if spec.disable_any_whitespace:
        return {}, {"whitespace_flexible": False}
    if spec.whitespace_pattern is not None:
        return {}, {"whitespace_pattern": spec.whitespace_pattern}
    return {"whitespace_pattern": WHITESPACE}, {}


def drop_unknown_formats(schema: str) -> str:
    """Remove formats that JSON Schema does not define, because llguidance refuses them."""
    if '"format"' not in schema:
        return schema
    parsed = json.loads(schema)
    pending = [parsed]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            if isinstance(name := node.get("format"), str) and name not in FORMATS:
                del node["format"]
            pending += [value for key, value in node.items() if key not in VALUE_KEYWORDS]
        elif isinstance(node, list):
            pending += node
    return json.dumps(parsed, ensure_ascii=False)


def ascii_digits(regex: str) -> str:
    r"""Replace \d by [0-9]: \d matches the digits of every script in some engines, these ten in others."""
    return re.sub(r"\\(?s:.)", lambda match: "[0-9]" if match[0] == r"\d" else match[0], regex)


def choice_to_lark(texts: Sequence[str]) -> str:
    """A Lark grammar for one of the texts. One terminal holds them all, so llguidance builds one automaton."""
    return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, texts))


def grammar_to_lark(text: str) -> str:
    """A Lark grammar, converted from GBNF if needed."""
    if match := UNSUPPORTED_OPTION.search(text):
        raise BadGrammar(f"The grammar has a rule with {match[1]}=, which quire does not honour; remove it.")
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except RecursionError:
        raise BadGrammar("The grammar nests too deep; move inner expressions into rules of their own.") from None
    except Exception as error:  # the converter raises plain Exceptions
        raise bad_grammar(str(error)) from None


def bad_grammar(reason: str) -> BadGrammar:
    """The error for a grammar that llguidance refuses."""
    return BadGrammar(f"The schema or grammar cannot be followed: {shorten_reason(reason)}")


def shorten_reason(reason: str) -> str:
    """An error of llguidance in one line, without quoted source lines, which may not be the user's own text."""
    if reason.startswith("NoExtension"):
        return "no text fits it"
    lines = [line.strip() for line in reason.replace("<non-verbose/>", "").splitlines()]
    line = " ".join(line for line in lines if line and not SOURCE_LINE.match(line))
    half = MAX_REASON_CHARS // 2
    return line if len(line) <= MAX_REASON_CHARS else f"{line[:half]} … {line[-half:]}"
