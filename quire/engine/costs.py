"""How long it takes to copy blocks to the host and back. `build.py` measures it once."""

from __future__ import annotations

import time

from quire.engine.cache import CacheTensors
from quire.kernels.arrays import Arrays


def time_copies(cache: CacheTensors, arrays: Arrays) -> float:
    """Seconds to copy a block to the host and back. Measured with block 0, which is never read."""
    count: int = cache.host.blocks_per_piece
    host_blocks = range(count)

    def copy() -> None:
        cache.swap_blocks(
            [(0, host_block) for host_block in host_blocks], [(host_block, 0) for host_block in host_blocks]
        )

    copy()  # allocates the buffers
    arrays.synchronize()
    begin_s = time.perf_counter()
    copy()
    arrays.synchronize()
    return (time.perf_counter() - begin_s) / count
