"""Paging: the block tables, lengths and slots of one step's rows. `store_kv` and `attention` take it.

The runner fills a `Paging` once a step from the scheduler's plan. Kernels read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from quire.kernels.arrays import Array


@dataclass(slots=True)
class Paging:
    """The rows of one step. Arrays are on the model's device; lists are the same numbers on the host.

    A row is one request's next tokens: row r owns tokens query_starts[r] : query_starts[r + 1] of the step, and its
    context, those tokens included, is seq_lens[r] long. Its tokens are the last ones of that context.
    """

    query_starts: Array  # [rows + 1] int32
    seq_lens: Array  # [rows] int32
    block_tables: list[Array]  # per group: [rows, max_blocks] int32; entries before a window are 0 and never read
    slot_mapping: list[Array]  # per group that grows: [tokens] int64, slots of k and v: block * block_size + offset
    block_size: int
    host_query_starts: list[int]
    host_seq_lens: list[int]
    ancestors: Array | None = None  # [tokens, max_query] bool, for draft trees: which of its row's tokens a token sees
    # [tokens, max_depth + 1] int32, for draft trees: a token's ancestors within its row's tokens, root first, itself
    # last, then -1. A token whose first entry is -1 is in a row that is a chain.
    paths: Array | None = None
    encoder_lens: Array | None = None  # [rows] int32: tokens in the encoder groups, if any
    work: Any = None  # a backend's own data about these rows, computed once a step

    @property
    def max_query_len(self) -> int:
        return max((stop - start for start, stop in pairwise(self.host_query_starts)), default=0)

    @property
    def max_seq_len(self) -> int:
        return max(self.host_seq_lens, default=0)


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
