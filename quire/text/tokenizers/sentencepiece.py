"""BPE merges of a SentencePiece vocabulary, which stores only tokens and scores.

SentencePiece merges the neighbours whose union has the highest score. So every split of a token into two tokens is a
merge, ordered by score. A vocabulary of 262,144 tokens has 1.5 million splits, so they are looked up by hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

_BASE = np.uint64(0x9E3779B97F4A7C15)
_SIEVE_BITS = 22


@dataclass(frozen=True, slots=True)
class _Spans:
    """All tokens concatenated, with prefix sums that give the hash of any span in constant time."""

    starts: Ints
    ends: Ints
    sums: Hashes
    powers: Hashes

    def hash(self, start: Ints, end: Ints) -> Hashes:
        """Equal spans have equal hashes at every position, because each is scaled to the same power."""
        return (self.sums[end] - self.sums[start]) * self.powers[len(self.sums) - 1 - start]


def derive_merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, highest score first.

    Among equal scores the longest token comes first: SentencePiece merges the leftmost pair, so a run of equal
    characters grows at its left end before the next run starts.
    """
    if not tokens:
        return []
    spans = _lay_out(tokens)
    owners, cuts = _find_cuts(spans)
    lengths = spans.ends - spans.starts
    order = np.lexsort((-lengths[owners], -np.asarray(scores, np.float64)[owners]))
    owners, cuts = owners[order], cuts[order]
    offsets = (cuts - spans.starts[owners]).tolist()
    return [((token := tokens[owner])[:at], token[at:]) for owner, at in zip(owners.tolist(), offsets, strict=True)]


def _lay_out(tokens: Sequence[str]) -> _Spans:
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    ends = np.cumsum(lengths)
    values = _scramble(np.frombuffer("".join(tokens).encode("utf-32-le"), np.uint32).astype(np.uint64))
    powers = np.full(len(values) + 1, _BASE, np.uint64)
    powers[0] = 1
    powers = np.cumprod(powers, dtype=np.uint64)
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values * powers[:-1], out=sums[1:])
    return _Spans(ends - lengths, ends, sums, powers)


def _scramble(values: Hashes) -> Hashes:
    """Mix code points into 64 bits, so that their sums do not collide."""
    values = (values + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(31)
    values *= np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(29))


def _find_cuts(spans: _Spans) -> tuple[Ints, Ints]:
    """For each split whose two halves are tokens: the index of the token, and the position of the split."""
    inner = np.maximum(spans.ends - spans.starts - 1, 0)
    owners = np.repeat(np.arange(len(inner)), inner)
    cuts = np.arange(len(owners)) - np.repeat(np.cumsum(inner) - inner, inner) + spans.starts[owners] + 1
    known = np.sort(spans.hash(spans.starts, spans.ends))
    sieve = np.zeros(1 << _SIEVE_BITS, np.bool_)
    sieve[_sieve_index(known)] = True
    for side in ("left", "right"):
        halves = spans.hash(spans.starts[owners], cuts) if side == "left" else spans.hash(cuts, spans.ends[owners])
        kept = np.flatnonzero(sieve[_sieve_index(halves)])
        nearest = np.minimum(np.searchsorted(known, halves[kept]), len(known) - 1)
        kept = kept[known[nearest] == halves[kept]]
        owners, cuts = owners[kept], cuts[kept]
    return owners, cuts


def _sieve_index(hashes: Hashes) -> Ints:
    return (hashes >> np.uint64(64 - _SIEVE_BITS)).astype(np.int64)
