"""Ranks as threads of one process: the code of every rank, without the start of processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from quire.engine.cache import CacheTensors, lay_out, shape_blocks
from quire.engine.memory import CacheSize
from quire.engine.rank_process import CommandLoop
from quire.engine.ranks import RankedCache
from quire.kernels import Kernels, select_native
from quire.kernels.cpu.ranks import CpuRanks
from quire.kernels.cpu.shared_pages import SharedArrays, SharedPages
from quire.models.config import ModelConfig
from tests.tools.native import native_of
from tests.tools.tiny import TinyEngine

JOIN_S = 60


class ThreadRanks:
    """A TinyEngine whose other ranks are threads. They have one thread each: a process has one pool."""

    def __init__(
        self,
        config: ModelConfig,
        size: int,
        make_model: Callable[[Kernels], Any],
        *,
        isa: str,
        kv_dtype: str = "float32",
        block_size: int = 4,
        num_blocks: int = 512,
        max_tokens: int = 64,
        num_host_blocks: int = 0,
        **options: Any,
    ) -> None:
        pages = [SharedPages.create()]
        pages += [SharedPages(pages[0].file) for _ in range(size - 1)]
        native = native_of(isa, threads=1)
        self.ranks = [CpuRanks(native.module, own, rank, size, crowded=True) for rank, own in enumerate(pages)]
        ops = [select_native(native, ranks) for ranks in self.ranks]
        models = [make_model(each) for each in ops]
        loops: list[Callable[[Any], CommandLoop]] = []
        for own_ops, model, ranks in zip(ops[1:], models[1:], self.ranks[1:], strict=True):
            specs = model.cache_specs()
            layout = lay_out(specs, shape_blocks(specs, own_ops, kv_dtype, block_size))
            cache_size = CacheSize(num_blocks, block_size, 0, config.max_len, 1)
            cache = CacheTensors(layout, cache_size, own_ops.arrays, num_host_blocks, own_ops.move_kv)
            recorded = own_ops.record(model, cache.layers, max_tokens)
            loops.append(partial(CommandLoop, ranks, cache, recorded))
        self.engine = TinyEngine(
            config, model=models[0], ops=ops[0], kv_dtype=kv_dtype, block_size=block_size, num_blocks=num_blocks,
            max_tokens=max_tokens, num_host_blocks=num_host_blocks, make_cache=partial(RankedCache, self.ranks[0]),
            batch_arrays=SharedArrays(pages[0]), **options,
        )  # fmt: skip
        self.loops = [make(own.map_all(pages[0].num_bytes)) for make, own in zip(loops, pages[1:], strict=True)]
        self.threads = [threading.Thread(target=loop.run, daemon=True) for loop in self.loops]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        self.ranks[0].native.set_broken()
        for thread in self.threads:
            thread.join(JOIN_S)
            assert not thread.is_alive()
        self.ranks[0].pages.close()

    def __enter__(self) -> TinyEngine:
        return self.engine

    def __exit__(self, *error: object) -> None:
        self.close()
