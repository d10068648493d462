"""Graphs: steps captured as CUDA graphs, so that the host launches one graph instead of hundreds of kernels.

A graph has a fixed size and serves every step up to it. All decode sizes and a few sizes of steps with prompts are
captured when the engine is built. The others are captured when the host is idle, the most frequent first. No step waits
for a capture; without a latency target, a capture may delay the tokens of a step that has ended.
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

# Tokens of steps with prompts. A step is padded to the next larger size.
FIRST_TOKENS = {
    "mixed": tuple(range(256, 1281, 128)), "prompts": (256, 512, 1024), "crowded": (512, 1024),
}  # fmt: skip
TOKENS = (32, 64, 128, 192, *range(256, 1281, 128), 1536, 1792, 2048)
FIRST_VERIFY_TOKENS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
VERIFY_TOKENS = (2, 4, 8, 16, *range(32, 129, 16), *range(160, 257, 32), *range(320, 513, 64), *range(640, 1025, 128))
WARMUP_SIZES = (1, 16, 32, 64, 128, 256)  # together these launch every kernel
CAPTURE_MARGIN = 5.0  # idle time for a capture, as a multiple of the last one's duration. Some take much longer.


class Key(NamedTuple):
    """`decode` is a step of single tokens, `mixed` one of prompts and single tokens, `prompts` one of prompts only, and
    `crowded` one of more rows than `mixed` has. `verify` is a step of drafts: each of its tokens is sampled. Its rows
    are chains, and those of `trees` are trees or chains. Sampling is not captured."""

    kind: str
    size: int  # rows of `decode`, tokens of the others
    max_queries: int = 1  # of a row, for `verify` and `trees`
    depth: int = 0  # more than 0: what comes behind such a step, so many drafts for each row (`GpuDrafter`)


Behind = Callable[[Key], Sequence[Key]]


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    hidden: Tensor


class Graphs:
    """Captured graphs by kind and size. `body` runs the step of a key on buffers with fixed addresses. `behind`: what
    may come behind such a step, the longest last. It is captured together with the step, and not when it is first
    needed: requests would wait for that, and it would look like the duration of drafting."""

    def __init__(
        self,
        body: Callable[[Key], Tensor],
        max_rows: int,
        max_tokens: int,
        max_bytes: int,
        behind: Behind = lambda key: (),
    ) -> None:
        self._body = body
        self._behind = behind
        self._captured: dict[Key, Captured] = {}
        self._num_missed: Counter[Key] = Counter()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._bytes_left = max_bytes
        self._capture_s = 0.0  # duration of the last capture
        self._rows, self._tokens = decode_sizes(max_rows), [size for size in TOKENS if size <= max_tokens]
        self._verify_tokens = [size for size in VERIFY_TOKENS if size <= max_tokens]
        kinds = ("decode", self._rows), ("mixed", self._tokens), ("prompts", self._tokens)
        self._pending = [Key(kind, size) for kind, sizes in kinds for size in sizes]

    def find(self, kind: str, size: int, max_queries: int = 1) -> Key | None:
        """The smallest captured graph that fits. If the best size is not captured, it becomes pending."""
        best = self._fit(kind, size, max_queries)
        if best is None:
            return None
        if best in self._captured:
            return best
        self._num_missed[best] += 1
        if best not in self._pending and self._bytes_left > 0:
            self._pending.append(best)
        larger = [
            key
            for key in self._captured
            if key.kind == kind and key.size >= size and key.max_queries >= max_queries and not key.depth
        ]
        return min(larger, default=None)

    def _fit(self, kind: str, size: int, max_queries: int) -> Key | None:
        by_kind = {"decode": self._rows, "verify": self._verify_tokens, "trees": self._verify_tokens}
        sizes = by_kind.get(kind, self._tokens)
        index = bisect_left(sizes, size)
        return Key(kind, sizes[index], max_queries) if index < len(sizes) else None

    def replay(self, key: Key) -> Tensor:
        captured = self._captured[key]
        captured.graph.replay()
        return captured.hidden

    def run(self, key: Key) -> Tensor:
        """Replay what comes behind a step. It is run op by op if there was no memory to capture it."""
        return self.replay(key) if key in self._captured else self._body(key)

    def warm_up(self, kinds: Sequence[str], verify_kinds: Sequence[str] = (), max_queries: Sequence[int] = ()) -> None:
        """Run and capture the first sizes of these kinds, and all decode sizes. Of `verify_kinds` those for the largest
        of `max_queries` are captured, because they serve steps of fewer too, and one is run for each of the others.
        This loads every kernel of a step and allocates the workspaces."""
        first = [key for key in self._pending if key.kind == "decode"]
        first += [Key(kind, size) for kind in kinds for size in FIRST_TOKENS[kind] if size in self._tokens]
        sizes = [size for size in FIRST_VERIFY_TOKENS if size in self._verify_tokens]
        first += [Key(kind, size, max(max_queries)) for kind in verify_kinds for size in sizes]
        # Largest first: the largest decode graph is required, and smaller ones reuse its memory.
        was_run = set[str]()
        for key in sorted(first, key=lambda key: (key.kind != "decode", -key.size)):
            if key.size in WARMUP_SIZES or key.kind not in was_run:
                # The first use allocates a workspace. Inside a capture, only that graph would zero it.
                for each in (key, *self._behind(key)[-1:]):
                    self._body(each)
                was_run.add(key.kind)
            if self._bytes_left > 0:
                self._capture(key)
        for kind in verify_kinds:
            for queries in max_queries:
                for size in (self._verify_tokens[0], self._verify_tokens[-1]):
                    self._body(Key(kind, size, queries))
        torch.cuda.synchronize()

    def capture_next(self, seconds: float) -> bool:
        """Capture the pending graph that most steps missed, if `seconds` are enough. Returns whether it was tried."""
        if not self._pending or seconds < CAPTURE_MARGIN * self._capture_s:
            return False
        try:
            self._capture(max(self._pending, key=lambda key: self._num_missed[key]))
        except RuntimeError as error:  # steps of this size use the next larger graph
            self._stop(f"a capture failed: {error}")
        return True

    def _capture(self, key: Key) -> None:
        """Capture a step and what may come behind it."""
        begin_s, free = time.monotonic(), torch.cuda.mem_get_info()[0]
        for each in (key, *self._behind(key)):
            self._captured[each] = self._record(each)
        if key in self._pending:
            self._pending.remove(key)
        self._bytes_left -= free - torch.cuda.mem_get_info()[0]
        self._capture_s = time.monotonic() - begin_s
        if self._bytes_left <= 0 and self._pending:
            self._stop("the memory set aside for them is used up")

    @torch.inference_mode()
    def _record(self, key: Key) -> Captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                result = self._body(key)
            finally:
                graph.capture_end()
        return Captured(graph, result)

    def _stop(self, reason: str) -> None:
        log.warning("No more steps are captured: %s.", reason)
        self._bytes_left = 0
        self._pending.clear()


def decode_sizes(max_rows: int) -> list[int]:
    """Powers of two up to 16, then multiples of 16 up to 128, then multiples of 32."""
    sizes = [*(1 << power for power in range(5)), *range(32, 129, 16), *range(160, max_rows + 32, 32)]
    return sorted({min(size, max_rows) for size in sizes})
