"""Paging: the block tables, lengths and slots of one step's rows. `store_kv` and `attention` take it.

The runner fills a `Paging` once a step from the scheduler's plan. Kernels read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.kernels.arrays import Array

MAX_TREE_NODES = 63  # of one row, without its first token: masks of CUDA kernels have 64 bits
NO_TOKEN = -1  # fills a row of `Paging.paths` behind the path's end


@dataclass(slots=True)
class Paging:
    """The rows of one step. Arrays are on the model's device; lists are the same numbers on the host.

    A row is one request's next tokens: row r owns tokens query_starts[r] : query_starts[r + 1] of the step, and its
    context, those tokens included, is seq_lens[r] long. Its tokens are the last ones of that context.

    The tokens of a row are a chain, each after the one before it, or a draft tree. In a tree, a token sees the context
    and its path: its ancestors, root first, and itself. Its slot is that of its index in the row, as in a chain. Its
    position is the length of the context plus its depth.
    """

    query_starts: Array  # [rows + 1] int32
    seq_lens: Array  # [rows] int32
    block_tables: list[Array]  # per group: [rows, max_blocks] int32; entries before a window are 0 and never read
    slot_mapping: list[Array]  # per group that grows: [tokens] int64, slots of k and v: block * block_size + offset
    block_size: int
    host_query_starts: list[int]
    host_seq_lens: list[int]
    paths: Array | None = None  # [tokens, longest path] int32, if any row has a draft tree: see `tree_paths`
    encoder_lens: Array | None = None  # [rows] int32: tokens in the encoder groups, if any
    work: Any = None  # a backend's own data about these rows, computed once a step

    def has_tree(self, row: int) -> bool:
        return self.paths is not None and bool(self.paths[self.host_query_starts[row], 0] >= 0)

    @property
    def max_query_len(self) -> int:
        return max((stop - start for start, stop in pairwise(self.host_query_starts)), default=0)

    @property
    def max_seq_len(self) -> int:
        return max(self.host_seq_lens, default=0)


def tree_paths(query_starts: Sequence[int], parents: Sequence[Sequence[int] | None]) -> NDArray[np.int32]:
    """`Paging.paths` of a step: for each token the indices in its row of its ancestors, root first, and of itself.

    parents[r] are the `Drafts.parents` of row r: its token i + 1 is node i, and its token 0, the root, is `ROOT`. For a
    row that is a chain it is None, and its tokens have no path. So long prompts need no wide array.

        row 0: a tree, nodes 0 and 1 a chain, 2 and 3 a branch      row 1: a chain of two tokens
        parents [[-1, 0, -1, 2], None]
        paths   [[0 - -] [0 1 -] [0 1 2] [0 3 -] [0 3 4] [- - -] [- - -]], where - is NO_TOKEN
    """
    paths: list[list[int]] = []
    for start, stop, nodes in zip(query_starts, query_starts[1:], parents, strict=False):
        if nodes is None:
            paths += [[] for _ in range(start, stop)]
            continue
        assert len(nodes) + 1 == stop - start, (len(nodes), stop - start)
        assert len(nodes) <= MAX_TREE_NODES
        paths.append([0])
        for index, parent in enumerate(nodes, 1):
            assert -1 <= parent < index - 1, nodes
            paths.append([*paths[start + parent + 1], index])
    return fill_paths(paths)


def forest_paths(query_starts: Sequence[int], parents: Sequence[Sequence[int] | None]) -> NDArray[np.int32] | None:
    """The same for rows without a root: token i of row r is node i, and the context comes directly before nodes whose
    parent is `ROOT`. None if all rows are chains."""
    if all(nodes is None for nodes in parents):
        return None
    paths: list[list[int]] = []
    for start, stop, nodes in zip(query_starts, query_starts[1:], parents, strict=False):
        own: list[list[int]] = [[] for _ in range(start, stop)]
        for node, parent in enumerate(nodes or ()):
            own[node] = [*own[parent], node] if parent >= 0 else [node]
        paths += own
    return fill_paths(paths)


def fill_paths(paths: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    filled = np.full((len(paths), max(1, *map(len, paths)) if paths else 1), NO_TOKEN, np.int32)
    for path, row in zip(paths, filled, strict=True):
        row[: len(path)] = path
    return filled


def skip_tokens(paging: Paging, skips: Sequence[int]) -> tuple[NDArray[np.int64], Paging]:
    """The step without the first `skips[r]` tokens of each row r: the indices of the tokens that are left, and their
    paging. A row of which none is left is dropped. Of a row with a tree, all tokens are skipped or none. On a CPU only.
    """
    starts, lens = paging.host_query_starts, paging.host_seq_lens
    rows = [row for row in range(len(lens)) if starts[row] + skips[row] < starts[row + 1]]
    tokens = [np.arange(starts[row] + skips[row], starts[row + 1]) for row in rows]
    index = np.concatenate(tokens) if tokens else np.zeros(0, np.int64)
    query_starts = list(accumulate(map(len, tokens), initial=0))
    seq_lens = [lens[row] for row in rows]
    return index, Paging(
        np.array(query_starts, np.int32),
        np.array(seq_lens, np.int32),
        [table[rows] for table in paging.block_tables],
        [slots[index] for slots in paging.slot_mapping],
        paging.block_size,
        query_starts,
        seq_lens,
        paths=None if paging.paths is None else paging.paths[index],
    )


@dataclass(frozen=True, slots=True)
class Ends:
    """The last tokens of a step's rows. If only these are sampled from, the last layer computes no other tokens."""

    tokens: Array  # [rows] int64: their indices in the step
    paging: Paging  # without a slot mapping: the step's own paging stores all keys and values


@dataclass(slots=True)
class LayerCache:
    """One layer's keys and values. Layers of different groups may share storage: their block ids are disjoint.

    A block of keys or values is contiguous. Between two blocks there may be other layers' data, so kernels step from
    block to block by `k.stride(0)` and `v.stride(0)`.
    """

    k: Array  # [blocks, block_size, kv_heads, head_dim] in the reference; a backend may have another layout
    v: Array  # as k; for a latent (MLA) the first columns of `k`, for a state `k` itself
    group: int  # this layer's index in Paging.block_tables and Paging.slot_mapping
    block_size: int
