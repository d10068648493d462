"""Draft trees on the C++ kernels: a node's attention has the bits that its path has as a chain, whatever else is in the
tree and in the step. And moves of tokens in the cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.engine.cache import CacheTensors, lay_out, shape_blocks
from quire.engine.memory import CacheSize
from quire.kernels import reference
from quire.kernels.cache_spec import KVCacheSpec
from tests.tools.native import NativePagedCache, draw, each_cache_type, each_isa, kept, kernels_of, ops_of
from tests.tools.paged import PagedCache
from tests.tools.trees import Parents, draw_parents, path_of, paths_of

pytestmark = pytest.mark.cpu

HEAD_DIM = 32
TREE, COMPANY, CHAIN = 0, 50, 100  # numbers of sequences: the tree, the rows beside it, and its paths as chains


class Sequences:
    """Sequences in one cache. Contexts of equal length have the same keys and values."""

    def __init__(self, ops: Any, kind: str, options: dict[str, Any], **shape: Any) -> None:
        self.ops, self.options, self.shape = ops, options, {"heads": 6, "kv_heads": 2, **shape}
        self.kv_heads = self.shape["kv_heads"]
        self.cache = NativePagedCache(
            ops,
            kind,
            kv_heads=self.kv_heads,
            head_dim=HEAD_DIM,
            windows=[options.get("window")],
            num_blocks=6000 // self.shape["block_size"],
            block_size=self.shape["block_size"],
        )

    def run(
        self, step: list[tuple[int, int]], qkv: tuple[Tensor, Tensor, Tensor], paths: Tensor | None = None
    ) -> Tensor:
        q, k, v = qkv
        paging = self.cache.step(step, paths)
        self.ops.store_kv(k, v, self.cache.layers[0], paging.slot_mapping[0])
        return self.ops.attention(q, self.cache.layers[0], paging, scale=0.2, **self.options)

    def draw(self, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        heads = (self.shape["heads"], self.kv_heads, self.kv_heads)
        q, k, v = (draw(count, num, HEAD_DIM, seed=3 * seed + nth) for nth, num in enumerate(heads))
        return q, k, v

    def prefill(self, sequence: int, context: int) -> None:
        if context:
            self.run([(sequence, context)], self.draw(context, seed=context))

    def run_chain(self, sequence: int, context: int, tokens: list[int], qkv: tuple[Tensor, ...]) -> Tensor:
        """A path of a tree whose tokens are `qkv`, as a chain after the same context."""
        self.prefill(sequence, context)
        q, k, v = (x[tokens] for x in qkv)
        return self.run([(sequence, len(tokens))], (q, k, v))


def leaves(parents: Parents) -> list[int]:
    return [token for token in range(len(parents) + 1) if token - 1 not in parents]


def joined(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.cat(column) for column in zip(*parts, strict=True))
    return q, k, v


def check_bits(
    sequences: Sequences, context: int, parents: Parents, rng: random.Random, *, company: bool = True
) -> None:
    """The tree, among other rows, against each path of it as a chain that is alone in its step."""
    rows: list[tuple[int, int, Parents | None]] = []
    for number in range(rng.randint(1, 5) if company else 0):
        nodes = rng.choice([None, None, draw_parents(rng.randint(1, 20), rng)])
        count = rng.choice([1, 1, 3, 8, 300]) if nodes is None else len(nodes) + 1
        sequences.prefill(COMPANY + number, rng.choice([0, 1, 40, 300]))
        rows.append((COMPANY + number, count, nodes))
    tree_row = (TREE, len(parents) + 1, parents)
    at = rng.randint(0, len(rows))
    rows.insert(at, tree_row)
    qkv = [sequences.draw(count, seed=1000 + sequence) for sequence, count, _ in rows]
    sequences.prefill(TREE, context)
    counts = [count for _, count, _ in rows]
    paths = paths_of(counts, [nodes for _, _, nodes in rows])
    out = sequences.run([(sequence, count) for sequence, count, _ in rows], joined(qkv), paths).split(counts)[at]
    for leaf in rng.sample(leaves(parents), min(6, len(leaves(parents)))):
        path = path_of(parents, leaf)
        chain = sequences.run_chain(CHAIN + leaf, context, path, qkv[at])
        assert torch.equal(out[path], chain), (leaf, path)


@each_isa
@each_cache_type
@pytest.mark.parametrize("seed", range(24))
def test_a_path_has_the_bits_of_a_chain(name: str, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    kv_heads, group = rng.choice([1, 2]), rng.choice([1, 3, 3, 8])
    heads = kv_heads * group
    slopes = draw(heads, seed=seed).abs() * 0.1
    options = rng.choice(
        [{}, {}, {"softcap": 1.5}, {"slopes": slopes}, {"window": rng.choice([1, 2, 5, 40, 257])},
         {"window": rng.choice([3, 64]), "slopes": slopes, "softcap": 1.5}]
    )  # fmt: skip
    block_size = rng.choice([1, 3, 8, 16, 16, 32])
    sequences = Sequences(
        ops_of(name, rng.randint(1, 3)), kind, options, heads=heads, kv_heads=kv_heads, block_size=block_size
    )
    context = rng.choice([0, 5, 100, rng.randint(5, 600), rng.randint(230, 270), rng.randint(490, 520)])
    check_bits(sequences, context, draw_parents(rng.choice([1, 3, 7, 15, 16, 40, 63]), rng), rng)


@each_isa
@each_cache_type
@pytest.mark.parametrize("context", [5, 15, 16, 250, 255, 256, 257, 300, 508, 600])
@pytest.mark.parametrize("block_size", [5, 16])
def test_chunks_of_256_keys(name: str, kind: str, context: int, block_size: int) -> None:
    """A tree before, across and after the border of a chunk, by position and by slot."""
    rng = random.Random(context)
    for parents in ([-1, 0, -1, 2], [-1, -1, 0, 1, *range(3, 19)]):
        for threads in (1, 3):
            sequences = Sequences(ops_of(name, threads), kind, {}, block_size=block_size)
            check_bits(sequences, context, parents, rng, company=threads == 3)


@each_isa
@each_cache_type
@pytest.mark.parametrize("block_size", [3, 16])
def test_a_node_does_not_read_its_siblings(name: str, kind: str, block_size: int) -> None:
    """Keys and values of one node that are not numbers change its descendants and nothing else."""
    parents = [-1, 0, 1, -1, 3, 3, 0, 6]
    count, paths = len(parents) + 1, paths_of([len(parents) + 1], [parents])

    def run(context: int, threads: int, broken: int | None) -> Tensor:
        sequences = Sequences(ops_of(name, threads), kind, {}, block_size=block_size)
        q, k, v = sequences.draw(count, seed=1)
        if broken is not None:
            k[broken] = v[broken] = float("nan")
        sequences.prefill(TREE, context)
        return sequences.run([(TREE, count)], (q, k, v), paths)

    for context, threads in ((9, 1), (250, 2), (600, 3)):
        expected = run(context, threads, None)
        for broken in (1, 4):
            out = run(context, threads, broken)
            is_below = torch.tensor([broken in path_of(parents, token) for token in range(count)])
            assert is_below.tolist().count(True) == {1: 5, 4: 3}[broken]
            assert out[is_below].isnan().all()
            assert torch.equal(out[~is_below], expected[~is_below])


def test_a_tree_that_is_too_large_is_refused() -> None:
    sequences = Sequences(ops_of(), "float32", {}, block_size=16)
    paths = torch.zeros(97, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="97 tokens, more than 96"):
        sequences.run([(TREE, 97)], sequences.draw(97, seed=0), paths)


@each_isa
@each_cache_type
@pytest.mark.parametrize("seed", range(8))
def test_against_the_reference(name: str, kind: str, seed: int) -> None:
    """Two trees beside a prompt and a decode row. The reference derives what a node sees in another way."""
    rng = random.Random(seed)
    window, slopes = rng.choice([None, 1, 4, 70]), rng.choice([None, torch.tensor([0.5, 0.25, 0.1, 0.0])])
    block_size, ops = rng.choice([4, 16]), ops_of(name, rng.randint(1, 3))
    shape = {"kv_heads": 2, "head_dim": 16, "windows": [window], "block_size": block_size, "num_blocks": 400}
    own, plain = NativePagedCache(ops, kind, **shape), PagedCache(**shape)
    trees: list[Parents | None] = [draw_parents(rng.randint(1, 63), rng), None, draw_parents(3, rng), None]
    steps = [
        ([(0, rng.choice([1, 63, 250])), (1, 30), (2, rng.choice([9, 255]))], None),
        ([(0, len(trees[0] or []) + 1), (1, 1), (2, 4), (3, rng.choice([2, 120]))], trees),
    ]
    for number, (step, parents) in enumerate(steps):
        counts = [count for _, count in step]
        paths = None if parents is None else paths_of(counts, parents)
        q, k, v = (draw(sum(counts), heads, 16, seed=9 * seed + 3 * number + heads) for heads in (4, 2, 2))
        paging = own.step(step, paths)
        ops.store_kv(k, v, own.layers[0], paging.slot_mapping[0])
        out = ops.attention(q, own.layers[0], paging, scale=0.25, window=window, slopes=slopes)
        paging = plain.step(step, paths)
        reference.store_kv(kept(k, kind), kept(v, kind), plain.layers[0], paging.slot_mapping[0])
        expected = reference.attention(q, plain.layers[0], paging, scale=0.25, window=window, slopes=slopes)
        torch.testing.assert_close(out, expected, atol=3e-6, rtol=3e-6)


@each_isa
@each_cache_type
@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
@pytest.mark.parametrize("threads", [1, 3])
def test_moved_tokens_are_read_as_if_they_had_been_stored_there(
    name: str, kind: str, block_size: int, threads: int
) -> None:
    """Node by node of an accepted path, in two layers of each of two groups. Targets are sources of earlier moves."""
    ops, num_layers = ops_of(name, threads), 4
    shape = {"kv_heads": 3, "head_dim": 48, "groups": [0, 1, 1, 0], "windows": [None, None]}
    parents, path = [-1, 0, 0, -1, 3, 4], [0, 4, 5, 6]
    moved, stored = (
        NativePagedCache(ops, kind, num_blocks=600 // block_size, block_size=block_size, **shape) for _ in range(2)
    )
    count = len(parents) + 1
    tokens = [[draw(30 + count, 3, 48, seed=2 * layer + nth) for nth in range(2)] for layer in range(num_layers)]
    accepted = [*range(30), *(30 + token for token in path)]
    paging = moved.step([(0, 30 + count)])
    expected = stored.step([(0, len(accepted))])
    for layer, (k, v) in enumerate(tokens):
        group = moved.layers[layer].group
        ops.store_kv(k, v, moved.layers[layer], paging.slot_mapping[group])
        ops.store_kv(k[accepted], v[accepted], stored.layers[layer], expected.slot_mapping[group])
    slots = [slots[30:] for slots in paging.slot_mapping]
    targets = list(range(1, len(path)))
    ops.move_kv(moved.layers, [(own[path[1:]].contiguous(), own[targets].contiguous()) for own in slots])
    moved.lengths[0] = len(accepted) - 1
    stored.lengths[0] -= 1
    for layer in range(num_layers):
        q = draw(1, 6, 48, seed=layer + 100)
        out, want = (ops.attention(q, cache.layers[layer], retaken(cache), scale=0.2) for cache in (moved, stored))
        assert torch.equal(out, want)


@each_cache_type
@pytest.mark.parametrize("block_size", [4, 16])
def test_the_cache_of_an_engine_moves_tokens(kind: str, block_size: int) -> None:
    """Two layers, byte by byte against a cache where the tokens were stored at their targets."""
    ops = kernels_of()
    specs = [KVCacheSpec(2, 16), KVCacheSpec(2, 16)]
    layout, size = lay_out(specs, shape_blocks(specs, ops, kind, block_size)), CacheSize(4, block_size, 0, 16, 1)
    moved, stored = (CacheTensors(layout, size, ops.arrays, move_kv=ops.move_kv) for _ in range(2))
    slots, targets = np.array([5, 8, 13, 14]), np.array([5, 6, 7, 8])
    for layer in range(2):
        k, v = (draw(4, 2, 16, seed=2 * layer + nth).numpy() for nth in range(2))
        ops.store_kv(k, v, moved.layers[layer], slots)
        for at in (slots, targets):
            ops.store_kv(k, v, stored.layers[layer], at)
    moved.move_tokens([list(zip(slots.tolist()[1:], targets.tolist()[1:], strict=True))])
    for mine, wanted in zip(moved._stacks, stored._stacks, strict=True):
        assert mine.any()
        assert np.array_equal(mine, wanted)


def retaken(cache: PagedCache) -> Any:
    """A step for the last token of sequence 0, which is stored already."""
    paging = cache.step([(0, 1)])
    cache.lengths[0] -= 1
    return paging
