"""JSONObjectScanner: accepts exactly the prefixes of JSON objects and finds their end."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text.tools.incremental_reader import MAX_DEPTH, JSONObjectScanner
from tests.text.tools.answers import write_arguments

pytestmark = pytest.mark.core


def scan(text: str) -> tuple[int, bool]:
    scanner = JSONObjectScanner()
    return scanner.scan(text, 0), scanner.done


@pytest.mark.parametrize("seed", range(50))
def test_an_object_ends_where_it_ends(seed):
    text = write_arguments(random.Random(seed))
    assert scan(text) == (len(text), True)
    assert scan(text + "} more") == (len(text), True)
    for end in range(len(text)):
        assert scan(text[:end]) == (end, False)


@pytest.mark.parametrize("seed", range(20))
def test_it_can_be_told_piece_by_piece(seed):
    text = write_arguments(random.Random(seed))
    scanner = JSONObjectScanner()
    assert all(scanner.scan(character, 0) == 1 for character in text)
    assert scanner.done


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("[1]", 0),
        (" {}", 0),
        ("{,", 1),
        ('{"a" 1', 5),
        ('{"a":}', 5),
        ('{"a":1,}', 7),
        ('{"a":[1,]}', 8),
        ('{"a":[1}', 7),
        ('{"a":01', 6),
        ('{"a":1.}', 7),
        ('{"a":-}', 6),
        ('{"a":1e}', 7),
        ('{"a":.5', 5),
        ('{"a":+1', 5),
        ('{"a":tru}', 8),
        ('{"a":None', 5),
        ("{'a'", 1),
        ('{"a\n"', 3),
        ('{"\\x"', 3),
        ('{"\\{"', 3),
        ('{"\\u12g4"', 6),
        ('{"a":1 2', 7),
        ('{"a":١', 5),
    ],
)
def test_the_first_character_that_is_not_json(text, end):
    scanner = JSONObjectScanner()
    assert (scanner.scan(text, 0), scanner.done) == (end, False)
    assert scanner.scan('"}', 0) == 0, "nor does anything after it belong to the object"


@given(st.text('{}[],:"\\ \n-+.eE0159truefalsn', max_size=12))
def test_it_takes_what_python_reads(text):
    """Whatever it takes as a whole is an object for Python, and the other way round."""
    try:
        is_object = isinstance(json.loads(text), dict) and text[:1] == "{" and text[-1:] == "}"
    except ValueError:
        is_object = False
    assert (scan(text) == (len(text), True)) == is_object


def test_depth_is_bounded():
    deep = '{"a":' + "[" * MAX_DEPTH
    assert scan(deep) == (len(deep) - 1, False)
    fits = '{"a":' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}"
    assert scan(fits) == (len(fits), True)
    assert json.loads(fits)
