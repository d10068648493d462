"""ToolParser: parses tool calls from an answer while it is generated.

A parser belongs to one answer. Text goes in with `push`, events come out (`events.py`). How the text is divided into
calls of `push` makes no difference, once successive events of a kind are joined.

Syntax of a call: the format's opening; then, depending on the format, an object with the tool's name and its arguments
(under "arguments" or "parameters", in any order, optionally with an "id" and a "type"), a list of such objects, or the
name followed by the arguments; then the closing. A call starts once its name matches a tool and its arguments have
begun. The text before that is held back; if it turns out not to be a call, it is emitted as text.

Each character belongs to one of these:
- Characters of arguments are emitted as arguments, unchanged.
- Other characters of a call, from the opening to the closing, are not emitted. Whitespace before a call and after the
  last call belongs to the call. The closing may be missing.
- All other characters are emitted as text, unchanged and in order. That includes invalid calls, calls of tools that may
  not be called, and calls whose arguments have not begun when the answer ends. If the choice forces a call there is no
  text beside calls, so an incomplete call at the end of the answer is dropped.

If arguments stop being JSON, or the answer ends within them, the call ends as not complete: what was emitted stays, and
what follows is text. If only one call is allowed, the answer ends after it: `finished` is set, later text is ignored.
"""

from __future__ import annotations

from quire.text.tools.definitions import ToolChoice
from quire.text.tools.events import ArgumentsDelta, Event, TextDelta, ToolCallEnd, ToolCallStart, make_call_id
from quire.text.tools.formats import ARGS, CALL_ID, ToolFormat
from quire.text.tools.incremental_reader import SPACE, IncrementalReader, JSONObjectScanner, Mismatch, Reading

_ARGUMENTS = ("arguments", "parameters")
_EXTRA_KEYS = ("id", "type")
_KEYS = ("name", *_ARGUMENTS, *_EXTRA_KEYS)


class ToolParser:
    """Call `push` for each piece of the answer, then `finish` once. The ids of calls are derived from `id_source`."""

    def __init__(self, format: ToolFormat, choice: ToolChoice, id_source: str | None = None) -> None:
        self.finished = False
        self._format = format
        self._names = frozenset(tool.name for tool in choice.tools if choice.mode != "none")
        self._parallel = choice.parallel
        self._is_forced = choice.is_forced
        self._id_source = id_source
        self._events = EventBuffer()
        self._reader = IncrementalReader()
        self._attempt: Reading[None] | None = None  # the generator that is reading calls
        self._in_call = False  # the attempt has started a call
        self._num_calls = 0
        self._at_start = True  # only whitespace so far
        self._follows_call = False  # only whitespace since the last call

    def push(self, text: str) -> list[Event]:
        """Add a piece of the answer. Returns the events that are final."""
        if not self._names:
            return [TextDelta(text)] if text else []
        if not self.finished:
            self._reader.extend(text)
            self._run()
        return self._events.drain()

    def finish(self) -> list[Event]:
        """End the answer. Returns the events of text that was held back."""
        self._reader.is_closed = True
        self._run()
        return self._events.drain()

    def _run(self) -> None:
        while not self.finished and (self._attempt is not None or self._skip_text()):
            assert self._attempt is not None
            try:
                next(self._attempt)
                return
            except StopIteration:
                self._reader.offset = self._reader.consumed
            except Mismatch:
                self._handle_mismatch()
            self._attempt, self._in_call = None, False

    def _skip_text(self) -> bool:
        """Emit text that cannot begin a call. If text is left, start to read it as a call and return True."""
        reader = self._reader
        if not (self._format.is_bare and self._at_start):
            found = reader.text.find(self._format.opening[0], reader.consumed)
            passed = reader.text[reader.consumed : found if found >= 0 else len(reader.text)].rstrip(SPACE)
            self._emit_text(reader.consumed + len(passed))
        if reader.consumed == len(reader.text):
            return False
        self._attempt = self._read_calls()
        return True

    def _emit_text(self, end: int) -> None:
        if text := self._reader.consume(end):
            self._events.add_text(None, text)
            self._at_start = self._follows_call = False

    def _handle_mismatch(self) -> None:
        """After a call, treat held text like any other. Otherwise its first character is text and is emitted."""
        reader = self._reader
        first = reader.end_of_space(reader.consumed)
        if reader.at_end and (self._in_call or self._is_forced or (self._follows_call and first == len(reader.text))):
            reader.consume(len(reader.text))
        elif self._in_call:
            reader.offset = reader.consumed
        else:
            self._emit_text(min(first + 1, len(reader.text)))

    def _read_calls(self) -> Reading[None]:
        """Read from an opening to its closing. Characters that certainly belong to a call are consumed."""
        reader, format = self._reader, self._format
        may_be_bare = format.is_bare and self._at_start
        yield from reader.skip_space()
        if not may_be_bare or (yield from reader.peek()) == format.opening[0]:
            yield from reader.read(format.opening)
        yield from reader.skip_space()
        if format.is_named:
            yield from self._read_named()
        elif not format.is_bare and (yield from reader.peek()) == "[":
            yield from self._read_list()
        else:
            yield from self._read_sequence()
        if format.closing:
            yield from reader.skip_space()
            yield from reader.read(format.closing)
            reader.consume(reader.offset)

    def _read_list(self) -> Reading[None]:
        reader, separator = self._reader, "["
        while separator != "]":
            yield from reader.read(separator)
            yield from reader.skip_space()
            yield from self._read_object()
            yield from reader.skip_space()
            separator = "," if (yield from reader.peek()) == "," else "]"
        yield from reader.read("]")
        reader.consume(reader.offset)

    def _read_sequence(self) -> Reading[None]:
        """Read objects that are separated by whitespace, a semicolon or nothing."""
        reader, following = self._reader, "{"
        while following == "{":
            yield from self._read_object()
            yield from reader.skip_space()
            following = yield from reader.peek()
            if following == ";":
                reader.consume(reader.offset + 1)
                yield from reader.skip_space()
                following = yield from reader.peek()

    def _read_object(self) -> Reading[None]:
        """Read {"name": ..., "arguments": {...}}. Arguments before the name are held back until the name is known."""
        reader, separator = self._reader, "{"
        name: str | None = None
        arguments: str | None = None
        while name is None or arguments is None:
            yield from reader.read(separator)
            separator = ","
            key = yield from self._read_key()
            if key == "name" and name is None:
                name = yield from reader.read_word(self._names)
            elif key in _ARGUMENTS and arguments is None:
                if name is not None:
                    yield from self._stream_arguments(name)
                    break
                arguments = yield from self._read_arguments()
            elif key in _EXTRA_KEYS:
                yield from reader.read_word(None)
            else:
                raise Mismatch
            yield from reader.skip_space()
            if name is not None and (yield from reader.peek()) == "}":
                arguments = arguments or "{}"
        else:
            self._emit_call(name, arguments)
        yield from self._read_rest()

    def _read_rest(self) -> Reading[None]:
        """Read what follows the arguments in an object. The closing bracket may be missing."""
        reader = self._reader
        yield from reader.skip_space()
        while (yield from reader.peek()) == ",":
            yield from reader.read(",")
            if (yield from self._read_key()) not in _EXTRA_KEYS:
                raise Mismatch
            yield from reader.read_word(None)
            yield from reader.skip_space()
        if (yield from reader.peek()) == "}":
            reader.consume(reader.offset + 1)

    def _read_key(self) -> Reading[str]:
        reader = self._reader
        yield from reader.skip_space()
        key = yield from reader.read_word(_KEYS)
        yield from reader.skip_space()
        yield from reader.read(":")
        yield from reader.skip_space()
        return key

    def _read_named(self) -> Reading[None]:
        """Read the name, an optional id, and the arguments."""
        reader = self._reader
        name = yield from reader.read_until("[", self._names)
        yield from reader.read("[")
        if (yield from reader.peek()) == CALL_ID[1]:
            yield from reader.read(CALL_ID[1:])
            yield from reader.read_until("[", None)
            yield from reader.read("[")
        yield from reader.read(ARGS[1:])
        yield from reader.skip_space()
        yield from self._stream_arguments(name)

    def _read_arguments(self) -> Reading[str]:
        scanner, pieces = JSONObjectScanner(), list[str]()
        while not scanner.done:
            pieces.append((yield from self._reader.scan(scanner)))
            if not pieces[-1]:
                raise Mismatch
        return "".join(pieces)

    def _stream_arguments(self, name: str) -> Reading[None]:
        """Start a call and emit its arguments as they arrive."""
        reader, scanner = self._reader, JSONObjectScanner()
        if (yield from reader.peek()) != "{":
            raise Mismatch
        self._begin_call(name)
        while not scanner.done and (piece := (yield from reader.scan(scanner))):
            self._events.add_text(self._num_calls - 1, piece)
            reader.consume(reader.offset)
        self._end_call(scanner.done)

    def _emit_call(self, name: str, arguments: str) -> None:
        self._begin_call(name)
        self._events.add_text(self._num_calls - 1, arguments)
        self._end_call(complete=True)

    def _begin_call(self, name: str) -> None:
        index = self._num_calls
        self._num_calls += 1
        self._in_call, self._at_start, self._follows_call = True, False, True
        self._reader.consume(self._reader.offset)
        self._events.add(ToolCallStart(index, make_call_id(self._id_source, index), name))

    def _end_call(self, complete: bool) -> None:
        self._events.add(ToolCallEnd(self._num_calls - 1, complete))
        self.finished = not self._parallel
        if self.finished or not complete:
            raise Mismatch


class EventBuffer:
    """Collects events. Successive texts of a kind become one event."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._texts: list[str] = []
        self._call: int | None = None  # index of the call whose arguments the texts are; None: text outside of calls

    def add(self, event: Event) -> None:
        self._flush()
        self._events.append(event)

    def drain(self) -> list[Event]:
        self._flush()
        events, self._events = self._events, []
        return events

    def add_text(self, call: int | None, text: str) -> None:
        """Add text, or arguments of a call."""
        assert call == self._call or not self._texts, "calls begin and end between text and arguments"
        self._call = call
        self._texts.append(text)

    def _flush(self) -> None:
        text = "".join(self._texts)
        self._texts.clear()
        if text:
            self._events.append(TextDelta(text) if self._call is None else ArgumentsDelta(self._call, text))
