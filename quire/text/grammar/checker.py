"""GrammarChecker: compiles grammars in a separate process, so that a costly one delays no other request.

The server calls `GrammarChecker.check` before it accepts a request. The checker starts the worker (`python -m
quire.text.grammar.checker`), keeps it running, and kills it when a grammar exceeds a limit. A message is a length and
msgpack: first the TokenizerInfo, then one StructuredOutputs each. The reply is the reason why the grammar is refused,
or an empty string. The engine compiles accepted grammars again.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import struct
import sys
import threading
from collections import OrderedDict
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from quire.core.structured import StructuredOutputs
from quire.errors import BadGrammar, EngineClosed, EngineError
from quire.text.grammar.compiler import GrammarCompiler, TokenizerInfo
from quire.text.grammar.constraint import GrammarConstraint

if TYPE_CHECKING:
    from quire.text.tokenizers.tokenizer import Tokenizer

TIMEOUT_S = 2.0
CPU_LIMIT_S = 0.5  # the engine is blocked as long when it compiles the grammar again
MAX_MEMORY_BYTES = 256 << 20  # beyond what the worker uses when it is ready
MAX_STACK_BYTES = 2 << 20  # a quarter of the engine's stack
START_TIMEOUT_S = 60.0
MAX_CACHED = 4096  # results
NUM_DRY_RUN_TOKENS = 100

LIMIT_SIGNALS: dict[int, str] = {
    signal.SIGPROF: f"took more than {CPU_LIMIT_S:g} s of processor time to compile",
    signal.SIGABRT: f"took more than {MAX_MEMORY_BYTES >> 20} MiB of memory to compile",
    signal.SIGSEGV: f"took more than {MAX_STACK_BYTES >> 20} MiB of stack to compile",
}

LENGTH = struct.Struct("<I")
READY = ""


class GrammarChecker:
    """Checks grammars, one at a time. Results are cached."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: frozenset[int], timeout_s: float = TIMEOUT_S
    ) -> None:
        self._make_tokenizer_info = partial(TokenizerInfo.of, tokenizer, vocab_size, end_token_ids)
        self._tokenizer_info = b""  # a TokenizerInfo, encoded
        self._timeout_s = timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._results: OrderedDict[bytes, str] = OrderedDict()
        self._pending: dict[bytes, asyncio.Task[None]] = {}
        self.num_worker_deaths = 0  # workers that a grammar has killed

    async def check(self, spec: StructuredOutputs) -> None:
        """Raise BadGrammar with the reason if the grammar cannot be compiled within the limits."""
        message = msgspec.msgpack.encode(spec)
        key = blake2b(message, digest_size=16).digest()
        if key not in self._results:
            if key not in self._pending:
                self._pending[key] = asyncio.create_task(self._check_once(key, message))
            await self._wait(self._pending[key])
        self._results.move_to_end(key)
        if reason := self._results[key]:
            raise BadGrammar(reason)

    @property
    def process_id(self) -> int | None:
        return self._process.pid if self._process else None

    async def close(self) -> None:
        tasks = list(self._pending.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._end()

    async def _wait(self, task: asyncio.Task[None]) -> None:
        """Wait for a check. A caller that is cancelled does not cancel the check: others may wait for it."""
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise EngineClosed("The server was shut down before the grammar was checked.") from None
            raise

    async def _check_once(self, key: bytes, message: bytes) -> None:
        try:
            async with self._lock:
                self._results[key] = await self._ask_worker(message)
            if len(self._results) > MAX_CACHED:
                self._results.popitem(last=False)
        finally:
            del self._pending[key]

    async def _ask_worker(self, message: bytes) -> str:
        """The reason why a grammar is refused, or "". A failure that may not repeat is raised, so it is not cached."""
        process = await self._start()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await send_and_receive(process, message)
        except TimeoutError:
            reason, may_pass = f"took longer than {self._timeout_s:g} s to compile", True
        except (EOFError, ConnectionError):
            status = await process.wait()
            reason = LIMIT_SIGNALS.get(-status, f"ended the check with status {status}")
            may_pass = -status not in LIMIT_SIGNALS
        self.num_worker_deaths += 1
        await self._end()
        text = f"The schema or grammar {reason}; simplify it."
        if may_pass:
            raise BadGrammar(text)
        return text

    async def _start(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        if not self._tokenizer_info:
            self._tokenizer_info = msgspec.msgpack.encode(await asyncio.to_thread(self._make_tokenizer_info))
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "quire.text.grammar.checker",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await send_and_receive(process, self._tokenizer_info)
        except (TimeoutError, EOFError, ConnectionError):
            await self._end()
            raise EngineError("The process that checks grammars could not be started; the log says why.") from None
        return process

    async def _end(self) -> None:
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.communicate()
            self._process = None


async def send_and_receive(process: asyncio.subprocess.Process, message: bytes) -> str:
    """Send a message to the worker and return its reply."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(LENGTH.pack(len(message)) + message)
    await process.stdin.drain()
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=str)


# ── the worker ────────────────────────────────────────────────────────────────────────────────────────────────────


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Reply to messages until the input is closed."""
    tokenizer_info = msgspec.msgpack.decode(receive(source), type=TokenizerInfo)
    dry_run = DryRun(GrammarCompiler(tokenizer_info), tokenizer_info)
    send(sink, READY)
    limit_memory()
    silence_stderr()
    while message := receive(source):
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)  # SIGPROF kills the process
        reason = dry_run.run(msgspec.msgpack.decode(message, type=StructuredOutputs))
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(sink, reason)


class DryRun:
    """Compiles a grammar and generates tokens from it, because some costs appear only when a string begins.

    Tokens are drawn at random with a fixed seed. Most are punctuation, which leads to the next element of a JSON value.
    """

    def __init__(self, compiler: GrammarCompiler, tokenizer_info: TokenizerInfo) -> None:
        self._compiler = compiler
        self._tokenizer_info = tokenizer_info
        self._punctuation = [
            token for token, piece in enumerate(tokenizer_info.tokens) if piece and not piece.strip(b'",:]}')
        ]

    def run(self, spec: StructuredOutputs) -> str:
        """The reason why a grammar is refused, or an empty string."""
        try:
            self._generate(GrammarConstraint(self._compiler.compile(spec), len(self._tokenizer_info.tokens)))
        except BadGrammar as error:
            return str(error)
        return ""

    def _generate(self, constraint: GrammarConstraint) -> None:
        rng = random.Random(0)
        for _ in range(NUM_DRY_RUN_TOKENS):
            mask = constraint.allowed()
            if not mask:
                raise BadGrammar(constraint.error)
            token = self._draw(mask, rng)
            if token in self._tokenizer_info.end_ids:
                return
            constraint.advance(token)

    def _draw(self, mask: bytes, rng: random.Random) -> int:
        punctuation = [token for token in self._punctuation if mask[token >> 3] >> (token & 7) & 1]
        if punctuation and rng.random() < 0.8:
            return rng.choice(punctuation)
        index = rng.choice([index for index, bits in enumerate(mask) if bits])
        return 8 * index + mask[index].bit_length() - 1


def limit_memory() -> None:
    """Limit further allocations. Rust aborts the process when an allocation fails."""
    if sys.platform == "linux":
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = num_pages * resource.getpagesize() + MAX_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def silence_stderr() -> None:
    """Discard stderr. Otherwise clients could fill the server's log with Rust's abort messages."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def receive(source: BinaryIO) -> bytes:
    head = source.read(LENGTH.size)
    return source.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""


def send(sink: BinaryIO, answer: str) -> None:
    payload = msgspec.msgpack.encode(answer)
    sink.write(LENGTH.pack(len(payload)) + payload)
    sink.flush()


def main() -> None:
    """Serve in a thread, because only a thread's stack size can be set."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.stack_size(MAX_STACK_BYTES)
    work = threading.Thread(target=serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    work.start()
    work.join()


if __name__ == "__main__":
    main()
