"""ToolParser on random answers: the division into parts does not change the events, and no character is lost."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.tools.events import (
    ArgumentsDelta,
    Event,
    TextDelta,
    ToolCall,
    ToolCallEnd,
    ToolCallStart,
    collect_events,
)
from quire.text.tools.formats import FORMATS, ToolFormat, write_calls
from quire.text.tools.parser import ToolParser
from tests.text.tools.answers import AUTO, ONE, TOOLS, brief, merge, parse, stream, write_arguments

pytestmark = pytest.mark.core

BITS = [
    *(marker for format in FORMATS for marker in format.markers),
    *(format.head_of(tool.name) for format in FORMATS for tool in TOOLS),
    *('{"name": "get"', '"arguments": {}', '"parameters": ', '"id": "x"', "get", "get_time", '"name"', "null", "1.5e3"),
    *'{}[],:;"<>| \nax\\',
]
formats = st.sampled_from(FORMATS)
garbage = st.lists(st.sampled_from(BITS) | st.text(max_size=3), max_size=16).map("".join)


@st.composite
def answers(draw):
    """A format and text with words, calls and bits of calls in it."""
    format = draw(formats)
    call = st.builds(
        lambda seed, tool: write_calls(format, [ToolCall("", tool.name, write_arguments(random.Random(seed)))]),
        st.integers(0, 999),
        st.sampled_from(TOOLS),
    )
    return format, "".join(draw(st.lists(garbage | call, max_size=4)))


def cut(data: st.DataObject, text: str) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in pairwise([0, *places, len(text)])]


def check_accounts(format: ToolFormat, text: str, events: list[Event]) -> None:
    """Text and arguments, with nothing but a call's trappings between them, make up the answer."""
    places = {0}  # in the text, where the events so far may have led
    for event in events:
        match event:
            case TextDelta(said):
                places = {place + len(said) for place in places if text.startswith(said, place)}
            case ToolCallStart() | ToolCallEnd():
                places = past_trappings(format, text, places)
            case ArgumentsDelta(_, arguments):
                found = {place + len(arguments) for place in places if text.startswith(arguments, place)}
                places = found | (places if arguments == "{}" else set())
    spaces = {place for place in places if not text[place:].strip(" \t\r\n")}
    assert spaces if any(isinstance(event, ToolCallEnd) for event in events) else len(text) in places, (text, events)


def past_trappings(format: ToolFormat, text: str, places: set[int]) -> set[int]:
    """Where what may stand around arguments can end."""
    parts = [
        *map(re.escape, format.markers),
        r"[ \t\r\n\[\]{},:;]",
        r'"[^"\\]*"',
        *([r"[^\[]"] if format.is_named else []),
    ]
    for marker in format.markers:
        parts += [re.escape(marker[:end]) + r"\Z" for end in range(1, len(marker))]
    patterns = [re.compile(part) for part in parts]
    reached, fresh = set(places), list(places)
    while fresh:
        place = fresh.pop()
        ends = {found.end() for pattern in patterns if (found := pattern.match(text, place))} - reached
        reached |= ends
        fresh += ends
    return reached


@given(answers(), st.sampled_from([AUTO, ONE]), st.data())
@settings(deadline=None, max_examples=300)
def test_cutting_changes_nothing(answer, choice, data):
    format, text = answer
    whole = merge(stream(format, [text], choice))
    assert merge(stream(format, cut(data, text), choice)) == whole
    assert merge(stream(format, text, choice)) == whole


@given(answers())
@settings(deadline=None, max_examples=300)
def test_nothing_is_lost(answer):
    format, text = answer
    events = stream(format, [text])
    check_accounts(format, text, events)
    for call in collect_events(events).calls:
        assert not call.complete or isinstance(json.loads(call.arguments), dict)


def random_answer(chance: random.Random, format: ToolFormat) -> str:
    """Bits of calls, calls, and calls with a flaw."""
    parts = []
    for _ in range(chance.randrange(1, 6)):
        names = [chance.choice(TOOLS).name for _ in range(chance.randrange(1, 3))]
        part = write_calls(format, [ToolCall("", name, write_arguments(chance)) for name in names])
        if chance.random() < 0.4:
            place = chance.randrange(len(part))
            part = part[:place] + chance.choice(["", *BITS]) + part[place + chance.randrange(3) :]
        parts.append(part if chance.random() < 0.5 else "".join(chance.choices(BITS, k=chance.randrange(40))))
    return "".join(parts)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("seed", range(100))
def test_flawed_answers(format, seed):
    chance = random.Random(seed)
    text = random_answer(chance, format)
    events = merge(stream(format, [text]))
    places = [0, *sorted(chance.choices(range(len(text) + 1), k=9)), len(text)]
    assert merge(stream(format, [text[start:end] for start, end in pairwise(places)])) == events
    assert merge(stream(format, text)) == events
    check_accounts(format, text, events)
    answer = collect_events(events)
    assert answer.calls or answer.content == text
    assert all(isinstance(json.loads(call.arguments), dict) for call in answer.calls if call.complete)


@given(formats, st.lists(st.integers(0, 999), min_size=1, max_size=4), st.text("abc .\n", max_size=8))
@settings(deadline=None, max_examples=100)
def test_calls_come_back_as_written(format, seeds, words):
    calls = [ToolCall("", TOOLS[seed % 3].name, write_arguments(random.Random(seed))) for seed in seeds]
    if format.is_bare and words.strip():
        words = ""
    expected = (words.rstrip(" \n"), [(call.name, call.arguments) for call in calls])
    assert brief(parse(format, words + write_calls(format, calls))) == expected


@given(formats, garbage)
@settings(deadline=None, max_examples=200)
def test_only_what_may_begin_a_call_is_held(format, text):
    parser = ToolParser(format, AUTO)
    given_out = 0
    for place, character in enumerate(text, 1):
        events = parser.push(character)
        if any(not isinstance(event, TextDelta) for event in events):
            return
        given_out += sum(len(event.text) for event in events)
        held = text[given_out:place].lstrip(" \t\r\n")
        begins_bare = format.is_bare and not text[:given_out].strip() and held[:1] in "{"
        assert begins_bare or held.startswith(format.opening) or format.opening.startswith(held)
