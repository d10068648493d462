"""What one rendering of a chat template may spend: time, text, structure, depth.

A template comes with a model file, so it is code from a stranger that runs in our process. Every operation of it that
can take long or make something big asks here first. Nothing here knows Jinja; `template_sandbox.py` does the asking.
"""

from __future__ import annotations

import sys
import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from dataclasses import dataclass, field
from typing import Any

_ELEMENT_WEIGHT = 16  # an element of a list weighs as much as this many characters
_MAX_DEPTH = 128
_WORK_FACTOR = 32  # text made on the way may be this many times what may come out
_STRUCTURES = (list, tuple, dict, KeysView, ValuesView, ItemsView)


class BoundExceeded(Exception):
    """The template has spent all it may. Not for users: `ChatTemplate` turns it into a `TemplateError`."""


@dataclass(slots=True)
class Budget:
    """Spent by one rendering, in one thread; `renew` makes it whole for the next."""

    max_seconds: float
    max_chars: int  # of any one text, of a structure with all that is in it, and of the output
    deadline: float = field(init=False)
    work_left: int = field(init=False)
    depth: int = field(init=False)
    # The weight of each structure met so far; the structure itself is kept, or its id could come to mean another one.
    _weights: dict[int, tuple[Any, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Nothing has been spent yet."""
        self.depth = 0
        self._weights.clear()
        self.deadline = time.monotonic() + self.max_seconds
        self.work_left = _WORK_FACTOR * self.max_chars

    def tick(self) -> None:
        """A step has been taken."""
        if time.monotonic() > self.deadline:
            raise BoundExceeded(f"it ran longer than {self.max_seconds:g} s")

    def spend(self, work: int) -> None:
        """This many bytes are about to be made, or have been."""
        self.tick()
        self.work_left -= work
        if self.work_left < 0:
            raise BoundExceeded(f"it made more than {_WORK_FACTOR * self.max_chars} bytes of text on its way")

    def fit(self, num_chars: int) -> None:
        """A text of this length is about to be made."""
        if num_chars > self.max_chars:
            raise BoundExceeded(f"it made a text of more than {self.max_chars} characters")
        self.spend(num_chars)

    def fit_elements(self, num_elements: int) -> None:
        """A list of this length is about to be made."""
        if num_elements * _ELEMENT_WEIGHT > self.max_chars:
            raise BoundExceeded(f"it made a list of more than {self.max_chars // _ELEMENT_WEIGHT} elements")
        self.spend(num_elements * _ELEMENT_WEIGHT)

    def enter(self) -> None:
        """A call begins; `depth` goes down again when it ends."""
        if self.depth >= _MAX_DEPTH:
            raise BoundExceeded(f"its calls are nested more than {_MAX_DEPTH} deep")
        self.depth += 1

    def weigh(self, value: Any) -> int:
        """How much there is to see in a value when all of it is walked, shared parts as often as they are met.

        Bounding this bounds what printing, comparing or hashing the value can cost.
        """
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, _STRUCTURES):
            return 1
        seen = self._weights.get(id(value))
        if seen is None:
            seen = self._weights[id(value)] = (value, self.weigh_all(_elements(value)))
        return seen[1]

    def weigh_all(self, elements: Iterable[Any]) -> int:
        """What a structure of these elements would weigh."""
        weight = count = 0
        for element in elements:
            count += 1
            weight += _ELEMENT_WEIGHT + self.weigh(element)
            self._check_weight(weight)
        self.spend(count * _ELEMENT_WEIGHT)
        return weight

    def _check_weight(self, weight: int) -> None:
        if weight > self.max_chars:
            raise BoundExceeded(f"it made a structure with more than {self.max_chars} characters in it")

    def admit_sum(self, value: Any, left: Any, right: Any) -> Any:
        """Let in a list that is two others, without walking it: templates gather messages this way, one by one."""
        weight = self.weigh(left) + self.weigh(right)
        self._check_weight(weight)
        self._weights[id(value)] = (value, weight)
        return value

    def admit(self, value: Any) -> Any:
        """Let a new value into the template's world."""
        if isinstance(value, str):
            self.fit(len(value))
            self.spend(sys.getsizeof(value))
        elif isinstance(value, _STRUCTURES):
            self.weigh(value)
        elif isinstance(value, Iterator):
            return self.watch(value)
        return value

    def watch(self, values: Iterable[Any]) -> Iterator[Any]:
        """The same values, each a step."""
        for value in values:
            self.tick()
            yield value

    def collect(self, values: Iterable[Any]) -> list[Any]:
        """A list of them, if it is not too long."""
        collected = []
        for value in self.watch(values):
            collected.append(value)
            if len(collected) * _ELEMENT_WEIGHT > self.max_chars:
                self.fit_elements(len(collected))
        self.weigh(collected)
        return collected


def _elements(value: Any) -> Iterable[Any]:
    return (part for item in value.items() for part in item) if isinstance(value, dict) else value
