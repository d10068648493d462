"""Arrays of strings in a GGUF file, decoded on demand: only tokenizers use the large ones.

The native extension reads them if it is available. Otherwise Python does, with the same result. Tokens and merges need
not become Python strings at all: `Strings.make_bpe`.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

from quire.kernels.cpu import native

U64 = struct.Struct("<Q")

Bad = Callable[[str], Exception]


@cache
def extension() -> ModuleType | None:
    module = native.load()
    return module if isinstance(module, ModuleType) else None


def skip(data: mmap.mmap, at: int, count: int) -> tuple[int, int]:
    """How many of `count` strings from offset `at` on are complete, and the offset behind the last complete one."""
    if (module := extension()) is not None:
        done, end = module.skip_strings(data, at, count)
        return done, end
    length_at: Callable[[mmap.mmap, int], tuple[int]] = U64.unpack_from
    size = len(data)
    for done in range(count):
        end = at + 8 + length_at(data, at)[0] if at + 8 <= size else size + 1
        if end > size:
            return done, at
        at = end
    return count, at


class Strings:
    """`count` complete strings from offset `first` on. `bad` makes the error for a string that is not UTF-8."""

    def __init__(self, data: mmap.mmap, first: int, count: int, bad: Bad) -> None:
        self._data = data
        self._first = first
        self._count = count
        self._bad = bad

    def __len__(self) -> int:
        return self._count

    def tolist(self) -> list[str]:
        if (module := extension()) is not None:
            strings: list[str] = module.read_strings(self._data, self._first, self._count)
        else:
            strings = list(self._decoded())
        if len(strings) < self._count:
            raise self._bad(f"string {len(strings)} of {{}} is not valid UTF-8")
        return strings

    def pairs(self) -> list[tuple[str, str]] | None:
        """Each string split at its first space; None if one of them cannot be split."""
        if (module := extension()) is not None:
            pairs: list[tuple[str, str]] = module.read_pairs(self._data, self._first, self._count)
        else:
            split = (string.partition(" ")[::2] for string in self._decoded())
            pairs = [(left, right) for left, right in split if left and right]
        return pairs if len(pairs) == self._count else None

    def make_bpe(self, merges: Strings) -> Any | None:
        """The extension's `BPE` of these tokens and their merges. It does not refer to the file.

        None without the extension, or if the strings are no vocabulary: `tolist` and `pairs` then tell what is wrong.
        """
        if (module := extension()) is None or merges._data is not self._data:
            return None
        return module.make_bpe(self._data, self._first, self._count, merges._first, merges._count)

    def _decoded(self) -> Iterator[str]:
        """The strings up to the first that is not UTF-8."""
        data, at = self._data, self._first
        for _ in range(self._count):
            start = at + 8
            at = start + U64.unpack_from(data, at)[0]
            try:
                yield data[start:at].decode()
            except UnicodeDecodeError:
                return
