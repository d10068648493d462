"""A script: kernels by Triton's interpreter, beside the reference. `test_interpreted.py` runs it.

Triton looks at TRITON_INTERPRET when it is imported, so this needs a process of its own. bfloat16 is not computed right
there, so float16 is used.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime import interpreter

from quire.kernels import reference
from quire.kernels.cuda.activation import activate
from quire.kernels.cuda.attention.decode import decode_attention
from quire.kernels.cuda.attention.dispatch import Work, attention, find_splits
from quire.kernels.cuda.attention.scoring import Scoring
from quire.kernels.cuda.norm import layer_norm, rms_norm
from quire.kernels.paging import LayerCache
from tests.cuda.sampling import check_logits_processors, check_logprobs, check_random
from tests.tools.paged import PagedCache
from tests.tools.trees import draw_paths, paths_of

patch_tensor = interpreter._patch_lang_tensor


def patch_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 asks numpy for the only number of an array in a way that numpy 2.4 has dropped."""
    patch_tensor(tensor, scope)
    tensor.__index__ = lambda self: self.handle.data.item()


def check_attention(dim: int, window: int | None, contexts: list[int], slopes: torch.Tensor | None = None) -> None:
    torch.manual_seed(0)
    paged = PagedCache(
        kv_heads=1, head_dim=dim, windows=[window], num_blocks=1000, block_size=16, dtype=torch.float16, seed=1
    )
    plain = paged.layers[0]
    k, v = (torch.randn(sum(contexts), 1, dim).half() for _ in "kv")
    reference.store_kv(k, v, plain, paged.step(list(enumerate(contexts))).slot_mapping[0])
    paging = paged.step([(row, 1) for row in range(len(contexts))])
    k, v = (torch.randn(len(contexts), 1, dim).half() for _ in "kv")
    reference.store_kv(k, v, plain, paging.slot_mapping[0])
    q = torch.randn(len(contexts), 2, dim).half()
    expected = reference.attention(q, plain, paging, scale=dim**-0.5, window=window, slopes=slopes)
    both = torch.stack((plain.k.transpose(1, 2), plain.v.transpose(1, 2)), dim=1)  # a block may hold keys and values
    for k, v in ((both[:, 0].contiguous(), both[:, 1].contiguous()), (both[:, 0], both[:, 1])):
        got, work = torch.empty_like(q), Work(True, False)
        splits = find_splits(work, paging, window, 2, 1, exact=False)
        decode_attention(q, LayerCache(k, v, 0, 16), paging, splits, got, Scoring(dim**-0.5, window, slopes, None))
        worst = float((got - expected).abs().max())
        assert worst < 0.01, (dim, window, worst)


def check_trees(window: int | None, slopes: torch.Tensor | None) -> None:
    """Two trees beside a chain and a single token."""
    torch.manual_seed(0)
    paged = PagedCache(kv_heads=1, head_dim=32, windows=[window], block_size=16, dtype=torch.float16)
    trees = [[-1, 0, -1, 2, 2, 0], None, None, [-1, -1, 0, 1]]
    later = [(0, 7), (1, 1), (2, 20), (3, 5)]
    for rows, paths in (([(0, 40), (1, 33)], None), (later, paths_of([7, 1, 20, 5], trees))):
        num_tokens = sum(count for _, count in rows)
        paging, layer = paged.step(rows, paths), paged.layers[0]
        q, k, v = (torch.randn(num_tokens, heads, 32).half() for heads in (2, 1, 1))
        reference.store_kv(k, v, layer, paging.slot_mapping[0])
        expected = reference.attention(q, layer, paging, scale=0.2, window=window, slopes=slopes)
        k, v = (x.transpose(1, 2).nan_to_num(0.0).contiguous() for x in (layer.k, layer.v))
        close(attention(q, LayerCache(k, v, 0, 16), paging, scale=0.2, window=window, slopes=slopes), expected)


def check_verify(
    dim: int, group: int, counts: list[int], *, exact: bool = False, with_trees: bool = False, **options: Any
) -> None:
    """Rows of a few queries after contexts of any length, as chains or as trees."""
    torch.manual_seed(0)
    window = options.get("window")
    paged = PagedCache(
        kv_heads=2, head_dim=dim, windows=[window], num_blocks=1000, block_size=16, dtype=torch.float16, seed=1
    )
    plain, contexts = paged.layers[0], [row * 61 % 200 for row in range(len(counts))]
    before = [(row, context) for row, context in enumerate(contexts) if context]
    trees = draw_paths(counts, 1) if with_trees else None
    for rows in (before, list(enumerate(counts))):
        paging = paged.step(rows, trees if rows is not before else None)
        k, v = (torch.randn(sum(count for _, count in rows), 2, dim).half() for _ in "kv")
        reference.store_kv(k, v, plain, paging.slot_mapping[0])
    q = torch.randn(sum(counts), 2 * group, dim).half()
    expected = reference.attention(q, plain, paging, scale=dim**-0.5, **options)
    own = LayerCache(plain.k.transpose(1, 2).contiguous(), plain.v.transpose(1, 2).contiguous(), 0, 16)
    got = attention(q, own, paging, scale=dim**-0.5, exact=exact, **options)
    worst = float((got - expected).abs().max())
    assert worst < 0.01, (dim, group, counts, options, worst)


def check_norms(size: int) -> None:
    x, residual, (weight, bias) = 1 + torch.randn(3, size), torch.randn(3, size), torch.randn(2, size)
    close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    for shift in (None, bias):
        close(layer_norm(x, weight, shift, 1e-2), reference.layer_norm(x, weight, shift, 1e-2))
        got = layer_norm(x, weight, shift, 1e-2, residual.clone())
        for mine, wanted in zip(got, reference.layer_norm(x, weight, shift, 1e-2, residual), strict=True):
            close(mine, wanted)


def check_activations() -> None:
    x = 3 * torch.randn(3, 700)
    for activation in ("gelu", "gelu_tanh", "relu", "silu"):
        close(activate(x, activation), reference.activate(x, activation))
        close(activate(x.half(), activation), reference.activate(x.half(), activation))


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    half = expected.dtype == torch.float16
    torch.testing.assert_close(got, expected, atol=2e-3 if half else 1e-5, rtol=2e-3 if half else 1e-5)


if __name__ == "__main__":
    interpreter._patch_lang_tensor = patch_index
    contexts = [*range(1, 12), *range(60, 140, 7)]
    for dim, window in ((160, 40), (160, None), (64, 40)):
        check_attention(dim, window, contexts)
    check_attention(64, None, contexts, slopes=torch.tensor([0.25, 0.0625]))
    for tree_window in (None, 3):
        check_trees(tree_window, None)
        check_trees(tree_window, torch.tensor([0.25, 0.0625]))
    for counts in ([2, 1, 2, 1, 1], [7, 3, 3, 4], [4, 1, 3, 4, 4, 4, 4, 4, 4, 4], [16, 1, 5, 9, 16]):
        check_verify(64, 4, counts)
        check_verify(80, 3, counts, window=6)
        check_verify(64, 1, counts, slopes=torch.tensor([0.25, 0.0625]), softcap=3.0)
        for exact in (False, True):
            check_verify(64, 2, counts, with_trees=True, exact=exact)
            check_verify(64, 2, counts, with_trees=True, exact=exact, window=3)
            slopes = torch.tensor([0.25, 0.0625, 0.5, 0.125])
            check_verify(64, 2, counts, with_trees=True, exact=exact, slopes=slopes, window=40)
    check_verify(64, 4, [40, 64, 1, 18], with_trees=True)
    for size in (1, 48, 577):
        check_norms(size)
    check_activations()
    check_random(3, 1, torch.float32, torch.device("cpu"))  # with a cap, and ids behind the vocabulary
    for size in (1, 9, 4100):
        check_logits_processors(size, torch.device("cpu"))
    for size, softcap in ((1, None), (5, 12.0), (4100, None), (4100, 12.0)):
        check_logprobs(size, torch.float32, torch.device("cpu"), softcap, equals=softcap is None)
