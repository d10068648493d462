"""A script: attention of single queries by Triton's interpreter, beside the reference. `test_interpreted.py` runs it.

Triton looks at TRITON_INTERPRET when it is imported, so this needs a process of its own. bfloat16 is not computed right
there, so float16 is used.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime import interpreter

from quire.kernels import reference
from quire.kernels.cuda.attention.decode import decode_attention
from quire.kernels.cuda.attention.dispatch import Work, find_splits
from quire.kernels.cuda.attention.scoring import Scoring
from quire.kernels.paging import LayerCache
from tests.tools.paged import PagedCache

patch_tensor = interpreter._patch_lang_tensor


def patch_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 asks numpy for the only number of an array in a way that numpy 2.4 has dropped."""
    patch_tensor(tensor, scope)
    tensor.__index__ = lambda self: self.handle.data.item()


def check(dim: int, window: int | None, contexts: list[int]) -> None:
    torch.manual_seed(0)
    paged = PagedCache(
        kv_heads=1, head_dim=dim, windows=[window], num_blocks=1000, block_size=16, dtype=torch.float16, seed=1
    )
    plain = paged.layers[0]
    k, v = (torch.randn(sum(contexts), 1, dim).half() for _ in "kv")
    reference.store_kv(k, v, plain, paged.step(list(enumerate(contexts))).slots[0])
    paging = paged.step([(row, 1) for row in range(len(contexts))])
    k, v = (torch.randn(len(contexts), 1, dim).half() for _ in "kv")
    reference.store_kv(k, v, plain, paging.slots[0])
    q = torch.randn(len(contexts), 2, dim).half()
    expected = reference.attention(q, plain, paging, scale=dim**-0.5, window=window)
    both = torch.stack((plain.k.transpose(1, 2), plain.v.transpose(1, 2)), dim=1)  # a block may hold keys and values
    for k, v in ((both[:, 0].contiguous(), both[:, 1].contiguous()), (both[:, 0], both[:, 1])):
        got, work = torch.empty_like(q), Work(True, False)
        splits = find_splits(work, paging, window, 1, exact=False)
        decode_attention(q, LayerCache(k, v, 0, 16), paging, splits, got, Scoring(dim**-0.5, window, None, None))
        worst = float((got - expected).abs().max())
        assert worst < 0.01, (dim, window, worst)


if __name__ == "__main__":
    interpreter._patch_lang_tensor = patch_index
    for dim, window in ((160, 40), (160, None), (64, 40)):
        check(dim, window, [*range(1, 12), *range(60, 140, 7)])
