"""Where the rows of one step live in the paged cache: what `store_kv` and `attention` need beside q, k and v.

The runner fills a `Paging` once a step from the scheduler's plan; kernels read it and keep nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class Paging:
    """The rows of one step. Tensors are on the model's device; lists are the same numbers on the host.

    A row is one request's next tokens: row r owns tokens query_starts[r] : query_starts[r + 1] of the step, and its
    context, those tokens included, is seq_lens[r] long. Its tokens are the last ones of that context.
    """

    query_starts: Tensor  # [rows + 1] int32
    seq_lens: Tensor  # [rows] int32
    block_tables: list[Tensor]  # per group: [rows, max_blocks] int32; entries behind a window are 0 and never read
    slot_mapping: list[Tensor]  # per group that grows: [tokens] int64, block * block_size + offset: where k and v go
    block_size: int
    host_query_starts: list[int]
    host_seq_lens: list[int]
    ancestors: Tensor | None = None  # [tokens, max_query] bool, for trees of drafts: which of its row's tokens one sees
    encoder_lens: Tensor | None = None  # [rows] int32: tokens in the encoder groups, if there are such groups
    work: Any = None  # what a backend has worked out about these rows, so that it does so once a step

    def ends(self) -> Ends:
        """The same rows, each with its last token only."""
        num_rows = len(self.host_seq_lens)
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=self.query_starts.device)
        tokens = self.query_starts[1 : num_rows + 1].long() - 1
        host_starts = list(range(num_rows + 1))
        return Ends(
            tokens,
            Paging(starts, self.seq_lens, self.block_tables, [], self.block_size, host_starts, self.host_seq_lens),
        )

    @property
    def max_query_len(self) -> int:
        return max((stop - start for start, stop in pairwise(self.host_query_starts)), default=0)

    @property
    def max_seq_len(self) -> int:
        return max(self.host_seq_lens, default=0)


@dataclass(frozen=True, slots=True)
class Ends:
    """The last tokens of a step's rows, when nothing else of the step is wanted: its last layer computes no others."""

    tokens: Tensor  # [rows] int64: where in the step they are
    paging: Paging  # without a slot mapping: their keys and values are stored with the others'


@dataclass(slots=True)
class LayerCache:
    """One layer's part of the cache. Layers of different groups may share storage: their block ids never meet.

    A block of keys, and one of values, is contiguous. Between two blocks there may be other layers' parts, so kernels
    step from block to block by `k.stride(0)` and `v.stride(0)`.
    """

    k: Tensor  # [blocks, block_size, kv_heads, head_dim] in the reference; a backend may lay a block out its own way
    v: Tensor  # the same; of a latent (MLA) the first columns of `k`, and of a state all of it
    group: int  # which of Paging.block_tables and Paging.slot_mapping is this layer's
    block_size: int
