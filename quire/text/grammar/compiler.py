"""From what a user asks for to llguidance's matchers. No tokenizer and no process here, so that both the engine and the
worker that tries grammars out (`grammar_worker.py`) do the very same work; `grammar.py` makes constraints of matchers.
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

# Between the parts of a JSON value: a space, or a new line and its indentation. Without a bound a small model may never
# come to an end of it.
WHITESPACE = r" |\n(?: {0,32}|\t{0,8})"

INITIAL_FUEL = 300_000  # llguidance's measure of the work before the first token
MAX_LEXER_STATES = 50_000  # about a kilobyte each
MAX_GRAMMAR_SYMBOLS = 200_000
MAX_SPELLED_BYTES = 1024
MAX_REASON_CHARS = 400

# Options of a rule that ask for more than a mask can give.
NOT_HONOURED = re.compile(r"^[ \t]*[a-z_][\w-]*(?:\.-?\d+)?[ \t]*\[[^\]\n]*\b(temperature|stop)[ \t]*=", re.MULTILINE)

POINTER = re.compile(r"\d+ \| |\^+$")  # a line of source, or what stands below the place in it

# The formats that JSON Schema defines. Any other is a remark, which by the standard allows every text.
FORMATS = {
    "date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname", "ipv4", "ipv6", "iri",
    "iri-reference", "json-pointer", "regex", "relative-json-pointer", "time", "uri", "uri-reference", "uri-template",
    "uuid",
}  # fmt: skip
VALUES = {"const", "default", "enum", "examples"}  # keywords that hold values, not schemas


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a grammar has to know about a tokenizer: the bytes of each token, which are special, which end an answer."""

    tokens: list[bytes]
    special_ids: list[int]
    end_ids: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, end_token_ids: frozenset[int]) -> Vocabulary:
        """Ids that the model has no logits for are left out."""
        size = min(tokenizer.vocab_size, vocab_size)
        ends = sorted(token for token in end_token_ids if token < size)
        if not ends:
            raise UnsupportedModel("The model has no token that ends an answer, so a structured one could not end.")
        special = sorted({token for token in tokenizer.special_token_ids if token < size}.union(ends))
        return cls([tokenizer.pieces[token] for token in range(size)], special, ends)


class Spelling:
    """Text to tokens, for the parts of an answer that a grammar leaves no choice in. llguidance calls it.

    The model's own way is taken as long as its tokens are exactly the text; an encoder may begin with a space that is
    not there, or read the name of a special token as that token. Of a very long text only the beginning is spelled: the
    rest comes when the answer has got there.
    """

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]] | None) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.end_ids[0]
        self.bos_token_id = None
        self._encode = encode
        self._special = frozenset(vocabulary.special_ids)
        self._ids: dict[bytes, int] = {}  # by bytes, once it is needed
        self._max_len = 0

    def __call__(self, text: bytes) -> list[int]:
        if len(text) > MAX_SPELLED_BYTES:
            text = text[:MAX_SPELLED_BYTES].decode(errors="ignore").encode()
        tokens = self._encode(text.decode()) if self._encode is not None else []
        known = all(token < len(self.tokens) and token not in self._special for token in tokens)
        spelled = b"".join(self.tokens[token] for token in tokens) if known else b""
        if spelled == text:
            return tokens
        if spelled == b" " + text:
            return self._spell_greedily(self.tokens[tokens[0]][1:]) + tokens[1:]
        return self._spell_greedily(text)

    def _spell_greedily(self, text: bytes) -> list[int]:
        """The longest token that fits, again and again."""
        if not self._ids:
            self._ids = {piece: token for token, piece in enumerate(self.tokens) if token not in self._special}
            self._max_len = max(map(len, self._ids))
        tokens, place = [], 0
        while place < len(text):
            for end in range(min(len(text), place + self._max_len), place, -1):
                if (token := self._ids.get(text[place:end])) is not None:
                    tokens.append(token)
                    break
            place = end
        return tokens


class Compiler:
    """Makes matchers for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]] | None = None) -> None:
        try:
            import llguidance
        except ImportError:
            raise EngineError("structured_outputs needs llguidance; install it: pip install llguidance") from None
        self._llguidance = llguidance
        spelling = llguidance.TokenizerWrapper(Spelling(vocabulary, encode))
        self._tokenizer: LLTokenizer = llguidance.LLTokenizer(spelling, eos_token=vocabulary.end_ids)
        self._limits: LLParserLimits = llguidance.LLParserLimits(
            initial_lexer_fuel=INITIAL_FUEL,
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=MAX_GRAMMAR_SYMBOLS,
            verbose_errors=False,
        )

    def compile(self, spec: StructuredOutputs) -> LLMatcher:
        """A matcher at the beginning of an answer, the first mask computed: some of the work is put off until then."""
        matcher = self._llguidance.LLMatcher(self._tokenizer, self._write(spec), log_level=0, limits=self._limits)
        matcher.compute_bitmask()
        if matcher.is_error():
            raise refusal(matcher.get_error())
        return matcher

    def _write(self, spec: StructuredOutputs) -> str:
        """In llguidance's own words."""
        matcher = self._llguidance.LLMatcher
        if (schema := spec.schema) is not None:
            try:
                return matcher.grammar_from_json_schema(drop_remarks(schema), *whitespace_options(spec))
            except ValueError as error:
                raise refusal(str(error)) from None
        if spec.regex is not None:
            return matcher.grammar_from_regex(narrow_digits(spec.regex))
        if spec.choice is not None:
            return matcher.grammar_from_lark(write_choice(spec.choice))
        assert spec.grammar is not None
        return matcher.grammar_from_lark(read_grammar(spec.grammar))


def whitespace_options(spec: StructuredOutputs) -> tuple[JsonCompileOptions, JsonCompileOptions]:
    """Defaults and overrides of llguidance's: what a schema says itself, under x-guidance, is between them."""
    if spec.disable_any_whitespace:
        return {}, {"whitespace_flexible": False}
    if spec.whitespace_pattern is not None:
        return {}, {"whitespace_pattern": spec.whitespace_pattern}
    return {"whitespace_pattern": WHITESPACE}, {}


def drop_remarks(schema: str) -> str:
    """The schema without formats that JSON Schema does not define; llguidance would refuse them."""
    if '"format"' not in schema:
        return schema
    parsed = json.loads(schema)
    open_parts = [parsed]
    while open_parts:
        part = open_parts.pop()
        if isinstance(part, dict):
            if isinstance(name := part.get("format"), str) and name not in FORMATS:
                del part["format"]
            open_parts += [value for key, value in part.items() if key not in VALUES]
        elif isinstance(part, list):
            open_parts += part
    return json.dumps(parsed, ensure_ascii=False)


def narrow_digits(regex: str) -> str:
    r"""With [0-9] in place of \d, which means the digits of every script to some and these ten to others."""
    return re.sub(r"\\(?s:.)", lambda match: "[0-9]" if match[0] == r"\d" else match[0], regex)


def write_choice(texts: Sequence[str]) -> str:
    """Lark for one of the texts: a single terminal, so that a thousand of them are one automaton."""
    return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, texts))


def read_grammar(text: str) -> str:
    """Lark, also where GBNF was given."""
    if match := NOT_HONOURED.search(text):
        raise BadGrammar(f"The grammar has a rule with {match[1]}=, which quire does not honour; remove it.")
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except RecursionError:
        raise BadGrammar("The grammar nests too deep to be read; give its inner parts rules of their own.") from None
    except Exception as error:  # the converter raises plain Exceptions
        raise refusal(str(error)) from None


def refusal(reason: str) -> BadGrammar:
    """Why llguidance would not have it."""
    return BadGrammar(f"The schema or grammar cannot be followed: {in_one_line(reason)}")


def in_one_line(reason: str) -> str:
    """What llguidance says, without the lines that point into a source which may not be the user's."""
    if reason.startswith("NoExtension"):
        return "no text fits it"
    lines = [line.strip() for line in reason.replace("<non-verbose/>", "").splitlines()]
    line = " ".join(line for line in lines if line and not POINTER.match(line))
    half = MAX_REASON_CHARS // 2
    return line if len(line) <= MAX_REASON_CHARS else f"{line[:half]} … {line[-half:]}"
