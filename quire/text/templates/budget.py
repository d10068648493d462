"""RenderBudget: the limits of one rendering of a chat template, on time, text size, structure size and call depth.

A template comes from a model file or a request, so it is untrusted code. Every operation that can take long or create
something large is checked here first. `sandbox.py` and `filters.py` make the checks; this file does not use Jinja.
"""

from __future__ import annotations

import sys
import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from dataclasses import dataclass, field
from typing import Any

_ELEMENT_SIZE = 16  # the size of a list element, in characters
_MAX_DEPTH = 128
_WORK_FACTOR = 32  # intermediate text may be this many times the output limit
_STRUCTURES = (list, tuple, dict, KeysView, ValuesView, ItemsView)


class BoundExceeded(Exception):
    """A limit is exceeded. `ChatTemplate` converts it into a `TemplateError`."""


@dataclass(slots=True)
class RenderBudget:
    """Used by one rendering in one thread. `reset` prepares it for the next."""

    max_seconds: float
    max_chars: int  # of each text, of each structure with its contents, and of the output
    deadline: float = field(init=False)
    work_left: int = field(init=False)
    depth: int = field(init=False)
    # The size of each structure by id. The structure is referenced, so that its id is not reused.
    _sizes: dict[int, tuple[Any, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start a new rendering."""
        self.depth = 0
        self._sizes.clear()
        self.deadline = time.monotonic() + self.max_seconds
        self.work_left = _WORK_FACTOR * self.max_chars

    def check_time(self) -> None:
        """Raise if the time is over."""
        if time.monotonic() > self.deadline:
            raise BoundExceeded(f"it ran longer than {self.max_seconds:g} s")

    def spend(self, work: int) -> None:
        """Count bytes of intermediate text."""
        self.check_time()
        self.work_left -= work
        if self.work_left < 0:
            raise BoundExceeded(f"it made more than {_WORK_FACTOR * self.max_chars} bytes of text on its way")

    def check_chars(self, num_chars: int) -> None:
        """Check the length of a text before it is created."""
        if num_chars > self.max_chars:
            raise BoundExceeded(f"it made a text of more than {self.max_chars} characters")
        self.spend(num_chars)

    def check_elements(self, num_elements: int) -> None:
        """Check the length of a list before it is created."""
        if num_elements * _ELEMENT_SIZE > self.max_chars:
            raise BoundExceeded(f"it made a list of more than {self.max_chars // _ELEMENT_SIZE} elements")
        self.spend(num_elements * _ELEMENT_SIZE)

    def enter_call(self) -> None:
        """Count a nested call. The caller decrements `depth` when the call ends."""
        if self.depth >= _MAX_DEPTH:
            raise BoundExceeded(f"its calls are nested more than {_MAX_DEPTH} deep")
        self.depth += 1

    def measure(self, value: Any) -> int:
        """The size of a value with all its contents. A shared part counts each time it occurs.

        A limit on this size limits the cost of printing, comparing or hashing the value.
        """
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, _STRUCTURES):
            return 1
        seen = self._sizes.get(id(value))
        if seen is None:
            seen = self._sizes[id(value)] = (value, self.measure_all(_elements(value)))
        return seen[1]

    def measure_all(self, elements: Iterable[Any]) -> int:
        """The size of a structure with these elements."""
        size = count = 0
        for element in elements:
            count += 1
            size += _ELEMENT_SIZE + self.measure(element)
            self._check_size(size)
        self.spend(count * _ELEMENT_SIZE)
        return size

    def _check_size(self, size: int) -> None:
        if size > self.max_chars:
            raise BoundExceeded(f"it made a structure with more than {self.max_chars} characters in it")

    def check_sum(self, value: Any, left: Any, right: Any) -> Any:
        """Check the sum of two lists without iterating over it. Templates append messages this way, one by one."""
        size = self.measure(left) + self.measure(right)
        self._check_size(size)
        self._sizes[id(value)] = (value, size)
        return value

    def check_value(self, value: Any) -> Any:
        """Check a new value of the template. An iterator is wrapped, so that its values are checked."""
        if isinstance(value, str):
            self.check_chars(len(value))
            self.spend(sys.getsizeof(value))
        elif isinstance(value, _STRUCTURES):
            self.measure(value)
        elif isinstance(value, Iterator):
            return self.iterate(value)
        return value

    def iterate(self, values: Iterable[Any]) -> Iterator[Any]:
        """The same values, with a time check for each."""
        for value in values:
            self.check_time()
            yield value

    def to_list(self, values: Iterable[Any]) -> list[Any]:
        """The values as a list, if it is not too long."""
        collected = []
        for value in self.iterate(values):
            collected.append(value)
            if len(collected) * _ELEMENT_SIZE > self.max_chars:
                self.check_elements(len(collected))
        self.measure(collected)
        return collected


def _elements(value: Any) -> Iterable[Any]:
    return (part for item in value.items() for part in item) if isinstance(value, dict) else value
