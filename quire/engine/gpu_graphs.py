"""Graphs: steps captured as CUDA graphs, so that the host launches one thing instead of hundreds.

A captured step has a fixed size and serves every step up to it. Steps of single tokens are captured when the engine is
built, and a few sizes of steps with prompts; the others follow while the host has nothing else to do for long enough,
those first that steps have asked for. No step waits for a capture.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

log = logging.getLogger("quire.engine")

# Rows of one token each, or tokens of a step with prompts. Between them a step is filled up to the next larger one.
FIRST_TOKENS = {
    "mixed": tuple(range(256, 1281, 128)), "prompts": (256, 512, 1024), "crowded": (512, 1024),
}  # fmt: skip
TOKENS = (32, 64, 128, 192, *range(256, 1281, 128), 1536, 1792, 2048)
ALL_KERNELS = (1, 16, 32, 64, 128, 256)  # steps of other sizes launch no others than steps of these
CAPTURE_MARGIN = 5.0  # times what the last capture took: the time that another one must have. Some take much longer.


class Key(NamedTuple):
    """What is captured: `decode` is a step of single tokens, `mixed` one with prompts and single tokens, `prompts` one
    of prompts only, and `crowded` one of more rows than these have. The choice of tokens is launched after each."""

    kind: str
    size: int


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    hidden: Tensor


class Graphs:
    """Captured steps by kind and size. `body` runs a step of a key on buffers that never move."""

    def __init__(self, body: Callable[[Key], Tensor], max_rows: int, max_tokens: int, max_bytes: int) -> None:
        self._body = body
        self._captured: dict[Key, Captured] = {}
        self._sizes: dict[str, list[int]] = {}
        self._wanted: Counter[Key] = Counter()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._bytes_left = max_bytes
        self._capture_s = 0.0  # that the last capture took
        self._rows, self._tokens = decode_sizes(max_rows), [size for size in TOKENS if size <= max_tokens]
        kinds = ("decode", self._rows), ("mixed", self._tokens), ("prompts", self._tokens)
        self._pending = [Key(kind, size) for kind, sizes in kinds for size in sizes]

    def find(self, kind: str, size: int) -> Key | None:
        """The smallest captured step that holds one of this size; the fitting one is captured in time, if it is not."""
        wanted = self._fit(kind, size)
        if wanted is None:
            return None
        if wanted in self._captured:
            return wanted
        self._wanted[wanted] += 1
        if wanted not in self._pending and self._bytes_left > 0:
            self._pending.append(wanted)
        sizes = self._sizes.get(kind, [])
        place = bisect_left(sizes, size)
        return Key(kind, sizes[place]) if place < len(sizes) else None

    def _fit(self, kind: str, size: int) -> Key | None:
        sizes = self._rows if kind == "decode" else self._tokens
        place = bisect_left(sizes, size)
        return Key(kind, sizes[place]) if place < len(sizes) else None

    def replay(self, key: Key) -> Tensor:
        captured = self._captured[key]
        captured.graph.replay()
        return captured.hidden

    def begin(self, kinds: Sequence[str]) -> None:
        """Run and capture the first sizes of these kinds, and all of single tokens. Every kernel of a step is loaded by
        that, and its workspaces are made."""
        first = [key for key in self._pending if key.kind == "decode"]
        first += [Key(kind, size) for kind in kinds for size in FIRST_TOKENS[kind] if size in self._tokens]
        # Without a graph for the most rows no step of single tokens could run. Smaller ones fit into its memory.
        was_run = set[str]()
        for key in sorted(first, key=lambda key: (key.kind != "decode", -key.size)):
            if key.size in ALL_KERNELS or key.kind not in was_run:
                # What uses a workspace first makes it. Made in a capture, it would be zeroed by that graph only.
                self._body(key)
                was_run.add(key.kind)
            if self._bytes_left > 0:
                self._capture(key)
        torch.cuda.synchronize()

    def capture_next(self, seconds: float) -> bool:
        """Capture what steps have asked for most often, if it is done in so many seconds; whether it was."""
        if not self._pending or seconds < CAPTURE_MARGIN * self._capture_s:
            return False
        try:
            self._capture(max(self._pending, key=lambda key: self._wanted[key]))
        except RuntimeError as error:  # steps of this size go on in the next larger one
            self._stop(f"a capture failed: {error}")
        return True

    @torch.inference_mode()
    def _capture(self, key: Key) -> None:
        begin_s, free = time.monotonic(), torch.cuda.mem_get_info()[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                hidden = self._body(key)
            finally:
                graph.capture_end()
        self._captured[key] = Captured(graph, hidden)
        self._sizes[key.kind] = sorted([*self._sizes.get(key.kind, []), key.size])
        if key in self._pending:
            self._pending.remove(key)
        self._bytes_left -= free - torch.cuda.mem_get_info()[0]
        self._capture_s = time.monotonic() - begin_s
        if self._bytes_left <= 0 and self._pending:
            self._stop("the memory set aside for them is used up")

    def _stop(self, reason: str) -> None:
        log.warning("No more steps are captured: %s.", reason)
        self._bytes_left = 0
        self._pending.clear()


def decode_sizes(max_rows: int) -> list[int]:
    """Powers of two up to 16, then multiples of 16, from 128 on of 32."""
    sizes = [*(1 << power for power in range(5)), *range(32, 129, 16), *range(160, max_rows + 32, 32)]
    return sorted({min(size, max_rows) for size in sizes})
