"""ToolParser: reads calls out of an answer while it is being written.

One belongs to one answer. It is told the text piece by piece and gives back events (`tool_events.py`). However the text
is cut into pieces, the events are the same once neighbours of a kind are joined.

What is a call. The format's opening; an object with a tool's name and its arguments (under "arguments" or "parameters",
in any order, perhaps with an "id" and a "type"), or a list of such objects, or the name and the arguments one after the
other, whichever the format has; the closing. A call begins once its name is known to be one of the tools' and its
arguments have opened; until then everything is held back, and if it turns out to be something else it is text.

What becomes of each character:
- Those of arguments are given out as arguments, unchanged.
- Those around them, from the opening to the closing, are the call's and are not given out. White space in front of a
  call, and behind the last one, counts as the call's too. A closing that is missing is not missed.
- All others are given out as text, unchanged and in order. So are calls that never begin: broken ones, ones of tools
  that may not be called, ones that the answer ends in before their arguments open. Where the choice forces a call there
  is no text beside calls, so what the answer ends in is a call cut short, and is left out.

Arguments that stop being JSON, or that the answer ends in, end their call as not complete: what was given out stays,
and what follows is text. Where only one call is wanted the answer ends with it: `finished` is set, and whatever follows
is not looked at.
"""

from __future__ import annotations

from quire.text.tools.definitions import ToolChoice
from quire.text.tools.events import ArgumentsPiece, CallBegins, CallEnds, Event, TextPiece, make_call_id
from quire.text.tools.formats import ARGS, CALL_ID, ToolFormat
from quire.text.tools.stream_reader import SPACE, Cursor, Mismatch, ObjectScanner, Reading

_ARGUMENTS = ("arguments", "parameters")
_NOTES = ("id", "type")
_KEYS = ("name", *_ARGUMENTS, *_NOTES)


class ToolParser:
    """Text in, events out: `push` pieces, then `finish` once. The ids of calls are made from `id_source`."""

    def __init__(self, format: ToolFormat, choice: ToolChoice, id_source: str | None = None) -> None:
        self.finished = False
        self._format = format
        self._names = frozenset(tool.name for tool in choice.tools if choice.mode != "none")
        self._parallel = choice.parallel
        self._is_forced = choice.is_forced
        self._id_source = id_source
        self._outbox = Outbox()
        self._cursor = Cursor()
        self._attempt: Reading[None] | None = None  # at reading calls
        self._in_call = False  # the attempt has found one
        self._num_calls = 0
        self._is_fresh = True  # nothing but white space has come
        self._follows_call = False  # nothing but white space has come since the last call

    def push(self, text: str) -> list[Event]:
        """Take more of the answer. Returns what has become certain."""
        if not self._names:
            return [TextPiece(text)] if text else []
        if not self.finished:
            self._cursor.extend(text)
            self._run()
        return self._outbox.drain()

    def finish(self) -> list[Event]:
        """The answer is complete. Returns what was held back."""
        self._cursor.is_closed = True
        self._run()
        return self._outbox.drain()

    def _run(self) -> None:
        while not self.finished and (self._attempt is not None or self._pass_text()):
            assert self._attempt is not None
            try:
                next(self._attempt)
                return
            except StopIteration:
                self._cursor.position = self._cursor.settled
            except Mismatch:
                self._give_up()
            self._attempt, self._in_call = None, False

    def _pass_text(self) -> bool:
        """Give out what cannot begin a call. True if something is left that can: it is going to be read as one."""
        cursor = self._cursor
        if not (self._format.is_bare and self._is_fresh):
            found = cursor.text.find(self._format.opening[0], cursor.settled)
            passed = cursor.text[cursor.settled : found if found >= 0 else len(cursor.text)].rstrip(SPACE)
            self._give_text(cursor.settled + len(passed))
        if cursor.settled == len(cursor.text):
            return False
        self._attempt = self._read_calls()
        return True

    def _give_text(self, end: int) -> None:
        if text := self._cursor.settle(end):
            self._outbox.add_piece(None, text)
            self._is_fresh = self._follows_call = False

    def _give_up(self) -> None:
        """Behind a call, look at what is held as at any text. Otherwise its first character is text for certain."""
        cursor = self._cursor
        first = cursor.end_of_space(cursor.settled)
        if cursor.at_end and (self._in_call or self._is_forced or (self._follows_call and first == len(cursor.text))):
            cursor.settle(len(cursor.text))
        elif self._in_call:
            cursor.position = cursor.settled
        else:
            self._give_text(min(first + 1, len(cursor.text)))

    def _read_calls(self) -> Reading[None]:
        """From an opening to its closing. Whatever has become certain to belong to a call is settled on the way."""
        cursor, format = self._cursor, self._format
        may_be_bare = format.is_bare and self._is_fresh
        yield from cursor.skip_space()
        if not may_be_bare or (yield from cursor.peek()) == format.opening[0]:
            yield from cursor.read(format.opening)
        yield from cursor.skip_space()
        if format.is_named:
            yield from self._read_named()
        elif not format.is_bare and (yield from cursor.peek()) == "[":
            yield from self._read_list()
        else:
            yield from self._read_sequence()
        if format.closing:
            yield from cursor.skip_space()
            yield from cursor.read(format.closing)
            cursor.settle(cursor.position)

    def _read_list(self) -> Reading[None]:
        cursor, separator = self._cursor, "["
        while separator != "]":
            yield from cursor.read(separator)
            yield from cursor.skip_space()
            yield from self._read_object()
            yield from cursor.skip_space()
            separator = "," if (yield from cursor.peek()) == "," else "]"
        yield from cursor.read("]")
        cursor.settle(cursor.position)

    def _read_sequence(self) -> Reading[None]:
        """Objects with white space, a semicolon or nothing between them."""
        cursor, following = self._cursor, "{"
        while following == "{":
            yield from self._read_object()
            yield from cursor.skip_space()
            following = yield from cursor.peek()
            if following == ";":
                cursor.settle(cursor.position + 1)
                yield from cursor.skip_space()
                following = yield from cursor.peek()

    def _read_object(self) -> Reading[None]:
        """{"name": ..., "arguments": {...}}. Arguments that come before the name wait for it."""
        cursor, separator = self._cursor, "{"
        name: str | None = None
        arguments: str | None = None
        while name is None or arguments is None:
            yield from cursor.read(separator)
            separator = ","
            key = yield from self._read_key()
            if key == "name" and name is None:
                name = yield from cursor.read_word(self._names)
            elif key in _ARGUMENTS and arguments is None:
                if name is not None:
                    yield from self._pass_arguments(name)
                    break
                arguments = yield from self._hold_arguments()
            elif key in _NOTES:
                yield from cursor.read_word(None)
            else:
                raise Mismatch
            yield from cursor.skip_space()
            if name is not None and (yield from cursor.peek()) == "}":
                arguments = arguments or "{}"
        else:
            self._give_call(name, arguments)
        yield from self._read_rest()

    def _read_rest(self) -> Reading[None]:
        """What an object may have behind its arguments. Its bracket is not missed if it is missing."""
        cursor = self._cursor
        yield from cursor.skip_space()
        while (yield from cursor.peek()) == ",":
            yield from cursor.read(",")
            if (yield from self._read_key()) not in _NOTES:
                raise Mismatch
            yield from cursor.read_word(None)
            yield from cursor.skip_space()
        if (yield from cursor.peek()) == "}":
            cursor.settle(cursor.position + 1)

    def _read_key(self) -> Reading[str]:
        cursor = self._cursor
        yield from cursor.skip_space()
        key = yield from cursor.read_word(_KEYS)
        yield from cursor.skip_space()
        yield from cursor.read(":")
        yield from cursor.skip_space()
        return key

    def _read_named(self) -> Reading[None]:
        """The name, perhaps an id, and the arguments."""
        cursor = self._cursor
        name = yield from cursor.read_until("[", self._names)
        yield from cursor.read("[")
        if (yield from cursor.peek()) == CALL_ID[1]:
            yield from cursor.read(CALL_ID[1:])
            yield from cursor.read_until("[", None)
            yield from cursor.read("[")
        yield from cursor.read(ARGS[1:])
        yield from cursor.skip_space()
        yield from self._pass_arguments(name)

    def _hold_arguments(self) -> Reading[str]:
        scanner, pieces = ObjectScanner(), list[str]()
        while not scanner.done:
            pieces.append((yield from self._cursor.scan(scanner)))
            if not pieces[-1]:
                raise Mismatch
        return "".join(pieces)

    def _pass_arguments(self, name: str) -> Reading[None]:
        """Begin a call, and give its arguments out as they come."""
        cursor, scanner = self._cursor, ObjectScanner()
        if (yield from cursor.peek()) != "{":
            raise Mismatch
        self._begin_call(name)
        while not scanner.done and (piece := (yield from cursor.scan(scanner))):
            self._outbox.add_piece(self._num_calls - 1, piece)
            cursor.settle(cursor.position)
        self._end_call(scanner.done)

    def _give_call(self, name: str, arguments: str) -> None:
        self._begin_call(name)
        self._outbox.add_piece(self._num_calls - 1, arguments)
        self._end_call(complete=True)

    def _begin_call(self, name: str) -> None:
        index = self._num_calls
        self._num_calls += 1
        self._in_call, self._is_fresh, self._follows_call = True, False, True
        self._cursor.settle(self._cursor.position)
        self._outbox.add(CallBegins(index, make_call_id(self._id_source, index), name))

    def _end_call(self, complete: bool) -> None:
        self._outbox.add(CallEnds(self._num_calls - 1, complete))
        self.finished = not self._parallel
        if self.finished or not complete:
            raise Mismatch


class Outbox:
    """Events on their way out. Neighbours of a kind leave as one."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._pieces: list[str] = []
        self._call: int | None = None  # whose arguments the pieces are; None: they are text

    def add(self, event: Event) -> None:
        self._join()
        self._events.append(event)

    def drain(self) -> list[Event]:
        self._join()
        events, self._events = self._events, []
        return events

    def add_piece(self, call: int | None, text: str) -> None:
        """More text, or more arguments of a call."""
        assert call == self._call or not self._pieces, "calls begin and end between text and arguments"
        self._call = call
        self._pieces.append(text)

    def _join(self) -> None:
        text = "".join(self._pieces)
        self._pieces.clear()
        if text:
            self._events.append(TextPiece(text) if self._call is None else ArgumentsPiece(self._call, text))
