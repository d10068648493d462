"""RankGroup: the processes of the other ranks, on rank 0's side: it starts them, builds them and notices their end.

`build.py` uses it with tensor parallelism. What runs in each process is `rank_process.py`. A thread starts the
processes and reads their messages. If a process ends, the thread marks the shared page, and nobody waits at a meeting
any more; the next command raises `RankLost`.
"""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quire.config import EngineConfig, parse_speculate
from quire.engine.cache import CacheLayout, CacheTensors
from quire.engine.launch import describe_exit
from quire.engine.rank_channel import (
    RankBuild,
    RankChannel,
    RankFailed,
    RankGo,
    RankLoaded,
    RankMessage,
    RankStart,
)
from quire.errors import EngineError, InvalidParams, UnsupportedModel, make_error
from quire.kernels import Kernels, isa, select_native
from quire.kernels.cpu.ranks import Command, CpuRanks, Pair
from quire.kernels.cpu.shared_pages import SharedArrays, SharedPages
from quire.kernels.numa import allowed_cores, pin_thread, rank_cores, read_nodes
from quire.kernels.shares import max_ranks
from quire.models.config import ModelConfig

EXIT_S = 5.0  # for a process to end by itself
MODEL_METHODS = ("draft", "block", "medusa", "eagle", "mtp", "self")
PROCESS = ["-m", "quire.engine.rank_process"]


def check_ranks(config: EngineConfig, model: ModelConfig, ops: Kernels) -> None:
    """Raise if the model cannot be shared by so many ranks, or an option needs one process."""
    size = config.tensor_parallel_size
    what = f"tensor_parallel_size is {size}"
    if ops.native is None:
        where = "on a GPU" if ops.device == "cuda" else "with torch's ops"
        raise InvalidParams(
            f"{what}, which needs quire's own CPU kernels, and the model runs {where}; leave it out, or set device to "
            "'cpu'.",
            "tensor_parallel_size",
        )
    if model.gemma4 is not None:
        raise InvalidParams(
            f"{what}, and quire does not share Gemma 4 among ranks; leave it out.", "tensor_parallel_size"
        )
    for what_has, most in find_limits(model, ops.native.module.MAX_RANKS):
        if size > most:
            raise InvalidParams(
                f"{what}, but {what_has} can be shared by at most {most}. Lower it.", "tensor_parallel_size"
            )
    if config.threads is not None and config.threads < size:
        raise InvalidParams(
            f"{what}, but the ranks have {config.threads} threads to divide; raise threads to at least {size}.",
            "tensor_parallel_size",
        )
    methods = [method.kind for method in parse_speculate(config.speculate) or () if method.kind in MODEL_METHODS]
    if methods or config.exit_head is not None:
        option = f"speculate names {methods[0]!r}" if methods else "exit_head is given"
        raise InvalidParams(
            f"{option}, which needs the whole model in one process, and {what}; leave one out. Repeated text and "
            "grammars (auto) are drafted with any number of ranks.",
            "tensor_parallel_size",
        )


def find_limits(model: ModelConfig, most: int) -> list[tuple[str, int]]:
    """What the ranks share, and how many ranks can."""
    limits = [("a model", most), (f"a vocabulary of {model.vocab_size:,} tokens", max_ranks(model.vocab_size))]
    limits.append((f"a hidden size of {model.hidden_size:,}", max_ranks(model.hidden_size)))
    if model.latent is None and model.structure.qk_norm != "whole":
        limits.append((f"{model.num_heads} attention heads", model.num_heads))
    if model.experts is None or not all(model.experts.layers):
        limits.append((f"an MLP of {model.intermediate_size:,} columns", max_ranks(model.intermediate_size)))
    if model.experts is not None and model.experts.shared_size:
        size = model.experts.shared_size
        limits.append((f"a shared expert of {size:,} columns", max_ranks(size)))
    return limits


@dataclass(slots=True)
class RankProcess:
    rank: int
    process: subprocess.Popen[bytes]
    channel: RankChannel


class RankGroup:
    """Ranks 1 to size - 1."""

    def __init__(self) -> None:
        self.ranks: CpuRanks | None = None
        self.threads: list[int] = []  # of each rank
        self._processes: list[RankProcess] = []
        self._messages: queue.SimpleQueue[tuple[int, RankMessage | None]] = queue.SimpleQueue()
        self._loss = ""
        # Called in a thread, with an explanation and the return code of the process, which is negative for a signal.
        self.on_loss: Callable[[str, int], None] = lambda loss, code: None
        self._closing = False
        self._owner = os.getpid()
        self._pinned_thread: int | None = None  # the caller's, while it is rank 0's
        self._unpinned: set[int] = set()  # the cores that it had before
        self._thread: threading.Thread | None = None

    def start(self, config: EngineConfig, path: Path, model: ModelConfig, ops: Kernels, kv_dtype: str) -> Kernels:
        """Start the other ranks, which begin to load. Returns rank 0's ops."""
        check_ranks(config, model, ops)
        native, size = ops.native, config.tensor_parallel_size
        assert native is not None
        self.threads = threads = divide_threads(native.threads, size)
        crowded, equal_threads = sum(threads) > isa.usable_cores(), len(set(threads)) == 1
        nodes, allowed = read_nodes(), allowed_cores()
        cores = [rank_cores(rank, size, nodes, allowed) for rank in range(size)]
        quantize = None if config.quantize == "none" else config.quantize
        starts = [
            RankStart(
                asdict(config), str(path), rank, size, native.isa, threads[rank], crowded, equal_threads,
                None if (own := cores[rank]) is None else sorted(own), kv_dtype, quantize,
            )
            for rank in range(1, size)
        ]  # fmt: skip
        pages = SharedPages.create()
        self.ranks = CpuRanks(native.module, pages, 0, size, crowded=crowded, equal_threads=equal_threads)
        self.ranks.explain_loss = lambda: self._loss
        started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(starts, started), name="quire-ranks", daemon=True)
        self._thread.start()
        if (error := started.get()) is not None:
            raise EngineError(f"The process of a rank could not be started: {error}") from error
        if cores[0] is not None:
            self._pinned_thread, self._unpinned = threading.get_ident(), allowed
            pin_thread(cores[0])
        return select_native(replace(native, threads=threads[0]), self.ranks)

    # ── rank 0's main thread ──────────────────────────────────────────────────────────────────────────────────────────

    def wait_loaded(self, layout: CacheLayout) -> list[RankLoaded]:
        """Of each rank but 0. Block tables are those of rank 0, so all must have the groups of its layout."""
        others = [message for message in self._receive_all() if isinstance(message, RankLoaded)]
        if any(other.groups != [layer.group for layer in layout.layers] for other in others):
            raise UnsupportedModel(
                f"{len(others) + 1} ranks have so different shares of this model's key heads that its layers would "
                "form other groups in their caches. Use another tensor_parallel_size."
            )
        return others

    def build(self, num_blocks: int, num_host_blocks: int, step_tokens: int) -> None:
        """Have the others allocate their caches and record their steps, while rank 0 does the same."""
        self._send(RankBuild(num_blocks, num_host_blocks, step_tokens))

    def go(self) -> None:
        """Rank 0 has allocated all of its shared memory. Commands can follow."""
        assert self.ranks is not None
        self._receive_all()
        self._send(RankGo(self.ranks.pages.num_bytes))

    def cache(self, *arguments: object) -> RankedCache:
        assert self.ranks is not None
        return RankedCache(self.ranks, *arguments)

    def arrays(self) -> SharedArrays:
        assert self.ranks is not None
        return SharedArrays(self.ranks.pages)

    def _send(self, message: RankMessage) -> None:
        for each in self._processes:
            each.channel.send(message)

    def _receive_all(self) -> list[RankMessage]:
        """A message of each process."""
        return [self._receive() for _ in self._processes]

    def _receive(self) -> RankMessage:
        _, message = self._messages.get()
        if isinstance(message, RankFailed):
            raise make_error(message.error, message.message)
        if message is None:
            raise EngineError(f"{self._loss} while it was started.")
        return message

    @property
    def process_ids(self) -> list[int]:
        return [each.process.pid for each in self._processes]

    def close(self) -> None:
        """End the processes. Called more than once, and in a process that was forked from this one not at all."""
        if os.getpid() != self._owner:
            return
        self._closing = True
        for each in self._processes:
            each.channel.end()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * EXIT_S)
        if self._pinned_thread == threading.get_ident():
            pin_thread(self._unpinned)  # the caller's later engines use all nodes again
            self._pinned_thread = None

    # ── the thread ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self, starts: Sequence[RankStart], started: queue.SimpleQueue[BaseException | None]) -> None:
        """The kernel kills the processes when this thread ends, whatever ends it."""
        assert self.ranks is not None
        try:
            for start in starts:
                self._processes.append(spawn(start, self.ranks.pages.file))
        except BaseException as error:
            started.put(error)
            self._end_processes()
            return
        started.put(None)
        readers = [threading.Thread(target=self._read, args=(each,), daemon=True) for each in self._processes]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        self._end_processes()

    def _read(self, each: RankProcess) -> None:
        try:
            for message in each.channel.messages():
                self._messages.put((each.rank, message))
        finally:
            self._lose(each)

    def _lose(self, each: RankProcess) -> None:
        assert self.ranks is not None
        how = describe_end(each.process) if not self._closing else "it was closed"
        is_first, self._loss = not self._loss, self._loss or f"Rank {each.rank} of {self.ranks.size} ended ({how})"
        if is_first and not self._closing:
            self.on_loss(self._loss, each.process.returncode)  # first: the main thread may end the process too
        self.ranks.native.set_broken()
        self._messages.put((each.rank, None))
        for other in self._processes:
            other.channel.end()

    def _end_processes(self) -> None:
        assert self.ranks is not None
        for each in self._processes:
            end(each.process)
            each.channel.close()
        self.ranks.pages.close()


def divide_threads(threads: int, size: int) -> list[int]:
    """Each rank has at least one."""
    return [max(1, threads * (rank + 1) // size - threads * rank // size) for rank in range(size)]


def spawn(start: RankStart, file: int) -> RankProcess:
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = [str(theirs.fileno()), str(file), str(os.getpid())]
        process = subprocess.Popen(
            [sys.executable, *PROCESS, *arguments], pass_fds=[theirs.fileno(), file], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    channel = RankChannel(ours)
    channel.send(start)
    return RankProcess(start.rank, process, channel)


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait until it has ended by itself, or kill it."""
    try:
        process.wait(EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def describe_end(process: subprocess.Popen[bytes]) -> str:
    end(process)
    return describe_exit(process.returncode)


class RankedCache(CacheTensors):
    """Rank 0's heads of the cache. What happens to its blocks happens to those of all ranks."""

    is_whole = False

    def __init__(self, ranks: CpuRanks, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._ranks = ranks

    def swap_blocks(self, swap_out: Sequence[Pair], swap_in: Sequence[Pair]) -> None:
        self._ranks.give_pairs(Command.SWAP_OUT, swap_out)
        super().swap_blocks(swap_out, [])
        self._ranks.give_pairs(Command.SWAP_IN, swap_in)
        super().swap_blocks([], swap_in)

    def copy_blocks(self, copies: Sequence[Pair]) -> None:
        self._ranks.give_pairs(Command.COPY_BLOCKS, copies)
        super().copy_blocks(copies)

    def move_tokens(self, moves: Sequence[Sequence[Pair]]) -> None:
        for group, pairs in enumerate(moves):
            self._ranks.give_pairs(Command.MOVE_TOKENS, pairs, group)
        super().move_tokens(moves)
