"""A process that tries grammars out, so that one that takes too long or too much memory harms nobody.

`GrammarChecker` is the server's end: it starts `python -m quire.text.grammar.checker`, keeps it warm, and ends it when
a grammar runs past its bounds. Messages are a length and msgpack: the vocabulary first, then a StructuredOutputs each,
and back comes why it cannot be had, or nothing. What has passed is compiled again where it is used.
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
from quire.text.grammar.compiler import Compiler, Vocabulary
from quire.text.grammar.constraint import GrammarConstraint

if TYPE_CHECKING:
    from quire.text.tokenizers.tokenizer import Tokenizer

LIMIT_S = 2.0
PROCESSOR_LIMIT_S = 0.5  # an engine stands still for as long when it compiles what has passed
MEMORY_BYTES = 256 << 20  # beyond what the process has when it is ready
STACK_BYTES = 2 << 20  # a quarter of what the engine has, where the same is compiled again
START_LIMIT_S = 60.0
NUM_KEPT = 4096  # verdicts
NUM_FOLLOWED = 100  # tokens

OVERRUNS: dict[int, str] = {
    signal.SIGPROF: f"took more than {PROCESSOR_LIMIT_S:g} s of processor time to compile",
    signal.SIGABRT: f"took more than {MEMORY_BYTES >> 20} MiB of memory to compile",
    signal.SIGSEGV: f"took more than {STACK_BYTES >> 20} MiB of stack to compile",
}

LENGTH = struct.Struct("<I")
READY = ""


class GrammarChecker:
    """Says whether grammars can be used. Several at once wait for each other."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: frozenset[int], limit_s: float = LIMIT_S
    ) -> None:
        self._make_vocabulary = partial(Vocabulary.of, tokenizer, vocab_size, end_token_ids)
        self._vocabulary = b""  # as it is sent
        self._limit_s = limit_s
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._trials: dict[bytes, asyncio.Task[None]] = {}
        self.num_ended = 0  # processes that a grammar has been the end of

    async def check(self, spec: StructuredOutputs) -> None:
        """Return if it can be compiled; raise BadGrammar with the reason if not."""
        message = msgspec.msgpack.encode(spec)
        key = blake2b(message, digest_size=16).digest()
        if key not in self._verdicts:
            if key not in self._trials:
                self._trials[key] = asyncio.create_task(self._judge(key, message))
            await self._wait(self._trials[key])
        self._verdicts.move_to_end(key)
        if reason := self._verdicts[key]:
            raise BadGrammar(reason)

    @property
    def process_id(self) -> int | None:
        return self._process.pid if self._process else None

    async def close(self) -> None:
        trials = list(self._trials.values())
        for trial in trials:
            trial.cancel()
        await asyncio.gather(*trials, return_exceptions=True)
        await self._end()

    async def _wait(self, trial: asyncio.Task[None]) -> None:
        """A caller that goes away does not take the trial along: others may wait for it."""
        try:
            await asyncio.shield(trial)
        except asyncio.CancelledError:
            if trial.cancelled():
                raise EngineClosed("The server was shut down before the grammar was checked.") from None
            raise

    async def _judge(self, key: bytes, message: bytes) -> None:
        try:
            async with self._turn:
                self._verdicts[key] = await self._try_out(message)
            if len(self._verdicts) > NUM_KEPT:
                self._verdicts.popitem(last=False)
        finally:
            del self._trials[key]

    async def _try_out(self, message: bytes) -> str:
        """Why a grammar cannot be had, if so. What may be another time is raised, and so not remembered."""
        process = await self._start()
        try:
            async with asyncio.timeout(self._limit_s):
                return await exchange(process, message)
        except TimeoutError:
            reason, may_pass = f"took longer than {self._limit_s:g} s to compile", True
        except (EOFError, ConnectionError):
            status = await process.wait()
            reason, may_pass = OVERRUNS.get(-status, f"ended the trial with status {status}"), -status not in OVERRUNS
        self.num_ended += 1
        await self._end()
        text = f"The schema or grammar {reason}; simplify it."
        if may_pass:
            raise BadGrammar(text)
        return text

    async def _start(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        if not self._vocabulary:
            self._vocabulary = msgspec.msgpack.encode(await asyncio.to_thread(self._make_vocabulary))
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "quire.text.grammar.checker",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await exchange(process, self._vocabulary)
        except (TimeoutError, EOFError, ConnectionError):
            await self._end()
            raise EngineError("The process that tries grammars out could not be started; look into the log.") from None
        return process

    async def _end(self) -> None:
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.communicate()
            self._process = None


async def exchange(process: asyncio.subprocess.Process, message: bytes) -> str:
    """Send a message and wait for the answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(LENGTH.pack(len(message)) + message)
    await process.stdin.drain()
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=str)


# ── the process ───────────────────────────────────────────────────────────────────────────────────────────────────


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer until the other side has gone."""
    vocabulary = msgspec.msgpack.decode(receive(source), type=Vocabulary)
    trial = Trial(Compiler(vocabulary), vocabulary)
    send(sink, READY)
    bound_memory()
    hush()
    while message := receive(source):
        signal.setitimer(signal.ITIMER_PROF, PROCESSOR_LIMIT_S)  # ends the process
        reason = trial.run(msgspec.msgpack.decode(message, type=StructuredOutputs))
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(sink, reason)


class Trial:
    """Compiles a grammar and follows it for a while: a string that is too much for a step shows when it begins.

    The tokens are drawn, the same for a grammar each time, most of them from those that bring an answer to its next
    part.
    """

    def __init__(self, compiler: Compiler, vocabulary: Vocabulary) -> None:
        self._compiler = compiler
        self._vocabulary = vocabulary
        self._marks = [token for token, piece in enumerate(vocabulary.tokens) if piece and not piece.strip(b'",:]}')]

    def run(self, spec: StructuredOutputs) -> str:
        """Why a grammar cannot be had; nothing if it can."""
        try:
            self._follow(GrammarConstraint(self._compiler.compile(spec), len(self._vocabulary.tokens)))
        except BadGrammar as error:
            return str(error)
        return ""

    def _follow(self, constraint: GrammarConstraint) -> None:
        rng = random.Random(0)
        for _ in range(NUM_FOLLOWED):
            mask = constraint.allowed()
            if not mask:
                raise BadGrammar(constraint.error)
            token = self._draw(mask, rng)
            if token in self._vocabulary.end_ids:
                return
            constraint.advance(token)

    def _draw(self, mask: bytes, rng: random.Random) -> int:
        marks = [token for token in self._marks if mask[token >> 3] >> (token & 7) & 1]
        if marks and rng.random() < 0.8:
            return rng.choice(marks)
        place = rng.choice([place for place, bits in enumerate(mask) if bits])
        return 8 * place + mask[place].bit_length() - 1


def bound_memory() -> None:
    """From here on. Rust ends a process that it can get no more memory in."""
    if sys.platform == "linux":
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = num_pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def hush() -> None:
    """What Rust says when it gives up would fill the server's log at any stranger's wish."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def receive(source: BinaryIO) -> bytes:
    head = source.read(LENGTH.size)
    return source.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""


def send(sink: BinaryIO, answer: str) -> None:
    payload = msgspec.msgpack.encode(answer)
    sink.write(LENGTH.pack(len(payload)) + payload)
    sink.flush()


def main() -> None:
    """The work is done in a thread, because only a thread's stack can be made small."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.stack_size(STACK_BYTES)
    work = threading.Thread(target=serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    work.start()
    work.join()


if __name__ == "__main__":
    main()
