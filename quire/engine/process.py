"""The engine's process: an engine and a socket. `python -m quire.engine.process FD`, started by `supervisor.py`.

One thread takes what has arrived, runs a step, and sends what it brought; so a process that answers is one whose steps
end. It ends when the other side closes the socket, whatever became of it.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from quire.core.constraint import Constraint, StopMatcher
from quire.core.plan import Plan, Update
from quire.core.request import Finish
from quire.engine.client import no_garbage_collection, start_engine
from quire.engine.messages import (
    Abort,
    Adding,
    Began,
    Frames,
    Order,
    Ping,
    Ready,
    Refused,
    Start,
    Stepped,
    Submit,
    ToEngine,
    ToServer,
    Unusable,
    decode_for_engine,
    encode,
)
from quire.errors import DeviceLost, EngineError, QuireError

if TYPE_CHECKING:
    from quire.engine.engine import Engine
    from quire.text.grammar.constraint import GrammarBackend
    from quire.text.tokenizers.tokenizer import Tokenizer

RECEIVE_BYTES = 1 << 20
LOST = 3  # the exit status when the GPU has failed
QUIET_S = 0.02  # while a step goes on, something is reported if nothing has been for so long

log = logging.getLogger("quire.engine")


class Link:
    """The engine's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames = Frames()
        self.closed = False

    def receive(self, *, wait: bool) -> Iterator[ToEngine]:
        """What has arrived; with `wait`, after something has."""
        while not self.closed and select.select([self._socket], [], [], None if wait else 0)[0]:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except ConnectionError:
                data = b""
            self.closed = not data
            for payload in self._frames.feed(data):
                wait = False
                yield decode_for_engine(payload)

    def send(self, message: ToServer) -> None:
        try:
            self._socket.sendall(encode(message))
        except (BrokenPipeError, ConnectionError):
            self.closed = True


class EngineLoop:
    """Steps an engine for as long as the link is open."""

    def __init__(self, engine: Engine, link: Link, path: Path) -> None:
        self._engine = engine
        self._link = link
        self._path = path
        self._tokenizer: Tokenizer | None = None
        self._grammars: GrammarBackend | None = None
        self._begun: set[str] = set()
        self._reported = 0.0
        engine.before_run = self._announce

    def run(self) -> None:
        engine, link = self._engine, self._link
        can_prepare = True
        while not link.closed:
            for message in link.receive(wait=not engine.has_work and not can_prepare):
                self._handle(message)
            if engine.has_work and not link.closed:
                self._step()
            can_prepare = engine.has_work or engine.idle()

    def _step(self) -> None:
        updates = self._engine.step()
        now = time.perf_counter()
        if updates or self._engine.step_s is not None or now - self._reported > QUIET_S:
            self._report(updates, self._engine.step_s)
            self._reported = now

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit(orders):
                self._submit(orders)
            case Abort(request_id):
                if update := self._engine.abort(request_id):
                    self._report([update])
            case Ping():
                self._report([])
            case Start():
                raise AssertionError("a second Start")

    def _submit(self, orders: list[Order]) -> None:
        """Said before, so that whoever watches knows whose orders they were if the process ends here."""
        ids, added = [order.id for order in orders], list[str]()
        self._link.send(Adding(ids))
        try:
            for order in orders:
                constraint, stop_matcher = self._constraint(order), self._stop_matcher(order)
                self._engine.add(order.request(self._engine.scheduler.requests, constraint, stop_matcher))
                added.append(order.id)
        except Exception as error:
            for request_id in added:
                self._engine.abort(request_id, Finish.ABORT)
            if not isinstance(error, QuireError):
                log.error("requests could not be added", exc_info=error)
                error = EngineError(f"The engine failed on this request: {error}")
            self._link.send(Refused(ids, type(error).__name__, str(error)))

    def _constraint(self, order: Order) -> Constraint | None:
        """What the answer must look like, from the tokens on that it already has."""
        spec = order.params.structured_outputs
        if spec is None:
            return None
        if self._grammars is None:
            from quire.text.grammar.constraint import GrammarBackend

            tokenizer, config = self._load_tokenizer(), self._engine.info.config
            ends = tokenizer.end_token_ids | frozenset(config.eos_token_ids)
            self._grammars = GrammarBackend(tokenizer, config.vocab_size, ends)
        return self._grammars.make_constraint(spec, order.output)

    def _stop_matcher(self, order: Order) -> StopMatcher | None:
        """What finds stop strings in beams. In other answers they are found where the text is made."""
        if not order.params.use_beam_search or not order.params.stop_strings:
            return None
        from quire.text.detokenizer import TextStops

        return TextStops.of(order.params, self._load_tokenizer())

    def _load_tokenizer(self) -> Tokenizer:
        """Only requests that need it wait for a vocabulary to be read."""
        if self._tokenizer is None:
            from quire.text.tokenizers.tokenizer import load_tokenizer

            self._tokenizer = load_tokenizer(self._path)
        return self._tokenizer

    def _announce(self, plan: Plan) -> None:
        """Said before the step, so that whoever watches knows who was in it if it never ends."""
        fresh = [request.id for request in plan.requests if request.id not in self._begun]
        if fresh:
            self._begun.update(fresh)
            self._link.send(Began(fresh))

    def _report(self, updates: list[Update], step_s: float | None = None) -> None:
        self._begun.difference_update(update.id for update in updates if update.finish)
        scheduler = self._engine.scheduler
        self._link.send(
            Stepped(
                updates,
                step_s,
                len(scheduler.running),
                scheduler.num_waiting,
                scheduler.kv.pool.num_free,
                scheduler.counters.computed_tokens,
                scheduler.counters.preemptions,
                scheduler.counters.swaps,
            )
        )


def load(link: Link) -> EngineLoop | None:
    """Around the engine that the first message asks for; None if it cannot be had, or nobody asks any more."""
    start = next(link.receive(wait=True), None)
    if start is None:
        return None
    assert isinstance(start, Start)
    try:
        with no_garbage_collection():
            engine = start_engine(start.config, Path(start.path))
    except QuireError as error:
        link.send(Unusable(type(error).__name__, str(error)))
        return None
    info = engine.info
    link.send(
        Ready(
            info.config.vocab_size,
            info.max_len,
            info.max_requests,
            sorted(info.config.eos_token_ids),
            info.cache.num_blocks,
            info.device,
            info.summary,
            info.config.sampling.as_params(),
        )
    )
    return EngineLoop(engine, link, Path(start.path))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches both processes; the other one decides
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    loop = load(link)
    try:
        if loop is not None:
            loop.run()
    except DeviceLost as error:
        log.critical("%s", error)
        os._exit(LOST)  # letting go of a GPU that is gone can take for ever


if __name__ == "__main__":
    main()
