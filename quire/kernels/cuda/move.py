"""Moves the keys and values of accepted side branches of draft trees to the front of their rows, in all layers.

The paths are on the device (`sampling/accept.py`), so the host is not needed between the choice of tokens and the
moves. A program moves the tokens of one row in one layer's keys or values, in order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous
from quire.kernels.cuda.sampling.accept import FIELDS
from quire.kernels.paging import LayerCache

WORD = 4  # bytes: the unit of all copies


@triton.jit
def _move(
    rows, num_accepted, paths, path_row, starts, seq_lens, table, table_row, planes, block_size, block_stride,
    head_stride, num_heads, num_words, FIELDS: tl.constexpr, HEADS: tl.constexpr, WORDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.load(rows + tl.program_id(0) * FIELDS).to(tl.int64)
    plane = tl.load(planes + tl.program_id(1)).to(tl.pointer_type(tl.int32))
    front = tl.load(seq_lens + row) - tl.load(starts + row + 1) + tl.load(starts + row) + 1  # the first draft's place
    heads, words = tl.arange(0, HEADS)[:, None], tl.arange(0, WORDS)[None, :]
    inside = (heads < num_heads) & (words < num_words)
    offsets = heads.to(tl.int64) * head_stride + words
    for index in range(tl.load(num_accepted + row)):
        node = tl.load(paths + row * path_row + index)
        if node != index:
            source, target = front + node, front + index
            from_block = tl.load(table + row * table_row + source // block_size).to(tl.int64)
            to_block = tl.load(table + row * table_row + target // block_size).to(tl.int64)
            moved = tl.load(
                plane + from_block * block_stride + source % block_size * num_words + offsets, mask=inside, other=0
            )
            tl.store(plane + to_block * block_stride + target % block_size * num_words + offsets, moved, mask=inside)


class Planes(NamedTuple):
    """Keys or values of one shape, of one group. Strides and widths are in words."""

    group: int
    block_stride: int
    head_stride: int
    num_heads: int
    num_words: int  # of a token and head
    block_size: int


class TokenMover:
    """Moves tokens in these layers, whose keys and values are [blocks, kv_heads, block_size, head_dim] each."""

    def __init__(self, layers: Sequence[LayerCache], num_groups: int, device: torch.device) -> None:
        """Of the groups that grow, which come first."""
        addresses = defaultdict[Planes, list[int]](list)
        for layer in layers:
            is_latent = layer.v.data_ptr() == layer.k.data_ptr()
            for kept in () if layer.group >= num_groups else (layer.k,) if is_latent else (layer.k, layer.v):
                item_bytes = kept.element_size()
                block_stride, head_stride, token_stride, _ = (stride * item_bytes // WORD for stride in kept.stride())
                shape = Planes(
                    layer.group, block_stride, head_stride, kept.shape[1], token_stride, layer.block_size
                )  # fmt: skip
                addresses[shape].append(kept.data_ptr())
        self._planes = [
            (shape, torch.tensor(each, dtype=torch.int64, device=device)) for shape, each in addresses.items()
        ]

    def __call__(
        self, rows: Tensor, num_accepted: Tensor, paths: Tensor, starts: Tensor, seq_lens: Tensor,
        tables: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """rows [n, FIELDS], num_accepted and paths as of `accept_drafts`; the others as in `Paging`."""
        for shape, planes in self._planes:
            table = tables[shape.group]
            _move[(rows.shape[0], len(planes))](
                rows, num_accepted, paths, paths.stride(0), starts, seq_lens, table, table.stride(0), planes,
                shape.block_size, shape.block_stride, shape.head_stride, shape.num_heads, shape.num_words,
                FIELDS=FIELDS, HEADS=triton.next_power_of_2(shape.num_heads),
                WORDS=triton.next_power_of_2(shape.num_words), num_warps=4, **pdl_options(),
            )  # fmt: skip
