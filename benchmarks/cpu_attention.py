"""The time of attention with quire's own CPU kernels, for rows of one and of several queries.

    python benchmarks/cpu_attention.py [--queries 1,2,4,6,8] [--context 128,1024] [--rows 1] [--trees]

Each number is the time of all layers, in microseconds: the least of many runs. A factor is relative to one query. The
default shape is that of smollm2:135m, with one cache for each layer, so that a layer finds its keys as a model does.
With --trees the queries of a row are a draft tree: half of them are a chain, and each other one is a branch of it.
"""

from __future__ import annotations

import argparse
import timeit
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from quire.kernels import isa
from quire.kernels.arrays import ITEM_BYTES, numpy_type
from quire.kernels.cache_spec import KVCacheSpec
from quire.kernels.cpu.native import Missing, find
from quire.kernels.cpu.native_ops import NativeOps
from quire.kernels.cpu.tape import Tape
from quire.kernels.paging import LayerCache, Paging, tree_paths


class Layers:
    """Attention of some layers on one tape."""

    def __init__(self, ops: NativeOps, options: argparse.Namespace, max_tokens: int, num_blocks: int) -> None:
        k, v, dtype = ops.cache_shapes(
            KVCacheSpec(options.kv_heads, options.head_dim), options.kv_dtype, options.block_size
        )
        assert v is not None
        self.tape = Tape(ops.native, max_tokens)
        rng = np.random.default_rng(0)
        q = self.tape.new((options.heads, options.head_dim))
        q.read()
        for _ in range(options.layers):
            held = [self._fill(rng, (num_blocks, *shape), dtype) for shape in (k, v)]
            ops.attention(q, LayerCache(*held, 0, options.block_size), None, scale=0.125)
        self.tape.finish()
        self.tape.result(q, max_tokens)[...] = rng.standard_normal((max_tokens, q.width))

    def _fill(self, rng: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """Small numbers in any of the types: the byte of the exponent is 0x3f."""
        held = np.zeros(shape, numpy_type(dtype))
        numbers = held.view(np.uint8).reshape(-1, ITEM_BYTES[dtype])
        numbers[...] = rng.integers(0, 128, numbers.shape, np.uint8)
        numbers[:, -1] = 0x3F
        return held

    def time(self, paging: Paging, num_runs: int) -> float:
        """Microseconds of all layers."""
        num_tokens = paging.host_query_starts[-1]
        return 1e6 * min(
            timeit.repeat(lambda: self.tape.run(None, None, paging, num_tokens), repeat=num_runs, number=1)
        )


def step(num_rows: int, num_queries: int, context: int, block_size: int, *, trees: bool) -> Paging:
    seq_len = context + num_queries
    starts = [0, *accumulate([num_queries] * num_rows)]
    width = -(-seq_len // block_size)
    tables = np.arange(1, num_rows * width + 1, dtype=np.int32).reshape(num_rows, width)
    np.random.default_rng(1).shuffle(tables.reshape(-1))
    lens = [seq_len] * num_rows
    chain = num_queries // 2
    parents = [*range(-1, chain - 1), *(nth % (chain + 1) - 1 for nth in range(num_queries - 1 - chain))]
    paths = tree_paths(starts, [parents] * num_rows) if trees and num_queries > 1 else None
    return Paging(np.array(starts, np.int32), np.array(lens, np.int32), [tables], [], block_size, starts, lens, paths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", default="1,2,4,6,8")
    parser.add_argument("--context", default="128,1024")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv-dtype", default="bfloat16")
    parser.add_argument("--trees", action="store_true")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--isa", help="an instruction set; the best one otherwise")
    parser.add_argument("--runs", type=int, default=100)
    options = parser.parse_args()
    native = find(isa.prepare(), options.threads)
    assert not isinstance(native, Missing), native.reason
    native = replace(native, isa=options.isa or native.isa)
    counts = [int(count) for count in options.queries.split(",")]
    contexts = [int(context) for context in options.context.split(",")]
    width = -(-(max(contexts) + max(counts)) // options.block_size)
    layers = Layers(NativeOps(native), options, options.rows * max(counts), options.rows * width + 1)
    print(f"{native.isa}, {native.threads} threads, {options.kv_dtype}, {options.rows} rows, {options.layers} layers")
    for context in contexts:
        first = None
        for count in counts:
            time_us = layers.time(
                step(options.rows, count, context, options.block_size, trees=options.trees), options.runs
            )
            first = first or time_us
            print(f"  context {context:5}, {count:2} queries a row: {time_us:8.0f} us  x {time_us / first:.2f}")


if __name__ == "__main__":
    main()
