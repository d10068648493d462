"""A rank's process: its share of a model, its heads of the cache, and commands of rank 0.
`python -m quire.engine.rank_process SOCKET FILE PARENT`, started by `ranks.py`.

It ends when rank 0 closes the socket or dies.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from quire.config import EngineConfig, one_blas_thread
from quire.engine.rank_channel import (
    RankBuild,
    RankChannel,
    RankFailed,
    RankGo,
    RankLoaded,
    RankMessage,
    RankReady,
    RankStart,
)
from quire.errors import EngineError, QuireError
from quire.kernels.cpu.native import Missing, Native, load
from quire.kernels.numa import pin_thread

with one_blas_thread():
    import numpy as np
    from numpy.typing import NDArray

    from quire.engine.cache import CacheTensors, lay_out, shape_blocks
    from quire.engine.memory import CacheSize
    from quire.kernels import Kernels, select_native
    from quire.kernels.cpu.ranks import Command, CpuRanks, to_pairs
    from quire.kernels.cpu.recorded import RecordedModel
    from quire.kernels.cpu.shared_pages import SharedPages
    from quire.kernels.cpu.tape import address
    from quire.weights.config import read_config
    from quire.weights.loader import LoadedModel, build_random_model, load_model, shorten

Message = TypeVar("Message", bound=RankMessage)


@dataclass(frozen=True, slots=True)
class CommandLoop:
    """Carries out what rank 0 commands."""

    ranks: CpuRanks
    cache: CacheTensors
    model: RecordedModel
    shared: NDArray[np.uint8]  # the pages that rank 0 has allocated

    def run(self) -> None:
        while (received := self.ranks.receive()) is not None:
            self._carry_out(*received)
            self.ranks.native.report_done()

    def _carry_out(self, command: Command, words: list[int]) -> None:
        head = self.ranks.shared_head
        assert head is not None
        match command:
            case Command.STEP:
                self.model.run_words(words, address(self.shared))
            case Command.ARGMAX:
                head.find_largest(words[0])
            case Command.LOGITS:
                head.compute_logits(words[0])
            case Command.COPY_BLOCKS:
                self.cache.copy_blocks(to_pairs(words))
            case Command.SWAP_OUT:
                self.cache.swap_blocks(to_pairs(words), [])
            case Command.SWAP_IN:
                self.cache.swap_blocks([], to_pairs(words))
            case Command.MOVE_TOKENS:
                self.cache.move_tokens([*([] for _ in range(words[0])), to_pairs(words[1:])])


def load_share(start: RankStart, ops: Kernels) -> LoadedModel:
    """The model with this rank's share of the weights."""
    config, path = EngineConfig(**start.config), Path(start.path)
    if config.weights == "random":
        model = shorten(read_config(path), config.max_len, path)
        return build_random_model(model, dtype="float32", ops=ops, quantize=start.quantize)
    return load_model(path, dtype="float32", ops=ops, quantize=start.quantize, max_len=config.max_len)


def build(inbox: Inbox, channel: RankChannel, pages: SharedPages) -> CommandLoop:
    start = inbox.get(RankStart)
    pin_thread(start.cores)
    module = load()
    if isinstance(module, Missing):
        raise EngineError(f"{module.reason}.")
    ranks = CpuRanks(module, pages, start.rank, start.size, crowded=start.crowded, equal_threads=start.equal_threads)
    ops = select_native(Native(module, start.isa, start.threads), ranks)
    loaded = load_share(start, ops)
    specs, block_size = loaded.model.cache_specs(), start.config["block_size"]
    layout = lay_out(specs, shape_blocks(specs, ops, start.kv_dtype, block_size))
    channel.send(RankLoaded(loaded.weight_bytes, layout.block_bytes, [layer.group for layer in layout.layers]))
    wanted = inbox.get(RankBuild)
    size = CacheSize(wanted.num_blocks, block_size, layout.block_bytes, loaded.config.max_len, 1)
    cache = CacheTensors(layout, size, ops.arrays, wanted.num_host_blocks, ops.move_kv)
    recorded = ops.record(loaded.model, cache.layers, wanted.step_tokens)
    channel.send(RankReady())
    return CommandLoop(ranks, cache, recorded, pages.map_all(inbox.get(RankGo).num_bytes))


class Inbox:
    """The messages of rank 0, read by a thread. The process ends when there are no more."""

    def __init__(self, channel: RankChannel) -> None:
        self._channel = channel
        self._messages: queue.SimpleQueue[RankMessage] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for message in self._channel.messages():
                self._messages.put(message)
        finally:
            os._exit(0)  # the main thread may wait in C++

    def get(self, kind: type[Message]) -> Message:
        message = self._messages.get()
        assert isinstance(message, kind), message
        return message


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock, file, parent = map(int, sys.argv[1:])
    module = load()
    if not isinstance(module, Missing):
        module.end_with_parent()
    if os.getppid() != parent:  # it ended before
        return
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    channel = RankChannel(socket.socket(fileno=sock))
    try:
        loop = build(Inbox(channel), channel, SharedPages(file))
    except QuireError as error:
        channel.send(RankFailed(type(error).__name__, str(error)))
        return
    gc.freeze()  # garbage collection does not scan the model between two ops
    loop.run()


if __name__ == "__main__":
    main()
