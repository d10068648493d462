"""The engine's process: an engine and a socket. `python -m quire.engine.process FD [PATH]`, started by `supervisor.py`.

PATH is the model's on this machine, where that is not the server's.

One thread receives messages, runs a step and sends its updates, so a reply shows that steps end. The process exits when
the other side closes the socket.
"""

from __future__ import annotations

import json
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

from msgspec import structs

from quire.config import one_blas_thread
from quire.core.constraint import Constraint, StopMatcher
from quire.core.plan import Plan, Update
from quire.engine.cache_description import describe_cache
from quire.engine.client import no_garbage_collection, start_engine
from quire.engine.kv_transfer import KVTransfer
from quire.engine.messages import (
    Abort,
    AddingRequests,
    Calibrated,
    DescribeCache,
    EngineRequest,
    FirstScheduled,
    FrameDecoder,
    LoadFailed,
    Ping,
    Ready,
    Refused,
    Start,
    StepOutputs,
    Submit,
    ToEngine,
    ToServer,
    Unwatch,
    Watch,
    decode_for_engine,
    encode,
)
from quire.engine.observer import PlanObserver
from quire.engine.step_meter import make_meter
from quire.engine.view import EngineView
from quire.errors import DeviceLost, EngineError, QuireError

if TYPE_CHECKING:
    from quire.engine.engine import Engine
    from quire.engine.recorder import Recorder
    from quire.text.grammar.constraint import GrammarBackend
    from quire.text.tokenizers.tokenizer import Tokenizer

RECEIVE_BYTES = 1 << 20
EXIT_DEVICE_LOST = 3  # exit status
REPORT_INTERVAL_S = 0.02  # between two reports while a step runs

log = logging.getLogger("quire.engine")


class Connection:
    """The engine's end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames = FrameDecoder()
        self.closed = False

    def receive(self, *, wait: bool, timeout_s: float | None = None) -> Iterator[ToEngine]:
        """The messages that have arrived. With `wait`, blocks until there is one, or for `timeout_s`."""
        while not self.closed and select.select([self._socket], [], [], timeout_s if wait else 0)[0]:
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
    """Steps an engine until the connection is closed."""

    def __init__(self, engine: Engine, connection: Connection, start: Start) -> None:
        self._engine = engine
        self._connection = connection
        self._path = Path(start.path)
        self._reports_prefixes = start.report_prefixes
        self._reported_tree = engine.scheduler.kv.tree
        self._transfer = KVTransfer(engine)
        self._tokenizer: Tokenizer | None = None
        self._grammars: GrammarBackend | None = None
        self._scheduled_ids: set[str] = set()
        self._report_s = 0.0
        self._view: EngineView | None = None  # while somebody watches
        self._meter = make_meter(engine, start.config)
        self._num_profiles = 0  # that have been sent
        engine.observers += [PlanObserver(self._announce), self._meter]
        if self._reports_prefixes:
            self._reported_tree.report_changes()
        self._recorder: Recorder | None = None
        if start.recording is not None:
            from quire.engine.recorder import Recorder

            self._recorder = Recorder(start.recording, engine, start.config)
            engine.observers.append(self._recorder)

    def run(self) -> None:
        engine, connection = self._engine, self._connection
        can_prepare = True
        while not connection.closed:
            due_in_s = self._view.due_in_s() if self._view is not None else None
            for message in connection.receive(wait=not engine.has_work and not can_prepare, timeout_s=due_in_s):
                self._handle(message)
            if engine.has_work and not connection.closed:
                self._step()
            if self._view is not None and self._view.due_in_s() == 0:
                self._report([])  # so that the metrics are those of the same moment
                self._report_changes(self._view)
            can_prepare = engine.has_work or engine.idle()

    def _step(self) -> None:
        updates = self._engine.step()
        now = time.perf_counter()
        if updates or self._engine.step_s is not None or now - self._report_s > REPORT_INTERVAL_S:
            self._report(updates, self._engine.step_s)
            self._report_s = now

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit(requests):
                self._submit(requests)
            case Abort(request_id):
                if update := self._engine.abort(request_id):
                    self._report([update])
            case Ping():
                self._report([])
            case Watch(interval_s):
                self._watch(interval_s)
            case Unwatch():
                self._unwatch()
            case DescribeCache(number, salt, max_nodes):
                self._connection.send(describe_cache(self._engine.scheduler, number, salt, max_nodes))
            case Start():
                raise AssertionError("a second Start")
            case _:
                updates, reply = self._transfer.handle(message)
                if updates:
                    self._report(updates)
                if reply is not None:
                    self._connection.send(reply)

    def _watch(self, interval_s: float) -> None:
        self._unwatch()
        try:
            self._view = EngineView(self._engine, interval_s, self._meter.predict)
        except Exception as error:
            log.error("the engine cannot be watched; serving goes on", exc_info=error)

    def _report_changes(self, view: EngineView) -> None:
        """A view that fails is dropped. The next watcher gets a new one."""
        try:
            self._connection.send(view.take_changes())
        except Exception as error:
            log.error("the live view has failed and is detached; serving goes on", exc_info=error)
            self._unwatch()

    def _unwatch(self) -> None:
        if self._view is not None:
            self._view.detach()
            self._view = None

    def _submit(self, requests: list[EngineRequest]) -> None:
        """`AddingRequests` is sent first: if the process dies here, the supervisor has the ids of the requests."""
        ids, added = [request.id for request in requests], list[str]()
        self._connection.send(AddingRequests(ids))
        try:
            for request in requests:
                constraint, stop_matcher = self._constraint(request), self._stop_matcher(request)
                made = request.to_request(self._engine.scheduler.requests, constraint, stop_matcher)
                self._engine.add(made)
                added.append(request.id)
                if request.staged:
                    self._transfer.arrive(made, request.staged)
        except Exception as error:
            for request_id in added:
                self._engine.abort(request_id)
            if not isinstance(error, QuireError):
                log.error("requests could not be added", exc_info=error)
                error = EngineError(f"The engine failed on this request: {error}")
            self._connection.send(Refused(ids, type(error).__name__, str(error)))

    def _constraint(self, request: EngineRequest) -> Constraint | None:
        """The constraint on the answer, advanced over the tokens that the request already has."""
        spec = request.params.structured_outputs
        if spec is None:
            return None
        if self._grammars is None:
            from quire.text.grammar.constraint import GrammarBackend

            tokenizer, config = self._load_tokenizer(), self._engine.info.config
            ends = tokenizer.end_token_ids | frozenset(config.eos_token_ids)
            self._grammars = GrammarBackend(tokenizer, config.vocab_size, ends)
        return self._grammars.make_constraint(spec, request.output)

    def _stop_matcher(self, request: EngineRequest) -> StopMatcher | None:
        """Finds stop strings in beams. In other answers the server finds them while it detokenizes."""
        if not request.params.use_beam_search or not request.params.stop_strings:
            return None
        from quire.text.detokenizer import TextStops

        return TextStops.of(request.params, self._load_tokenizer())

    def _load_tokenizer(self) -> Tokenizer:
        """Loaded for the first request that needs it: reading a vocabulary takes time."""
        if self._tokenizer is None:
            from quire.text.tokenizers.tokenizer import load_tokenizer

            self._tokenizer = load_tokenizer(self._path)
        return self._tokenizer

    def _announce(self, plan: Plan) -> None:
        """Called before each step. If the step never ends, the supervisor has the ids of its requests."""
        new_ids = [request.id for request in plan.requests if request.id not in self._scheduled_ids]
        if new_ids:
            self._scheduled_ids.update(new_ids)
            self._connection.send(FirstScheduled(new_ids))

    def _report(self, updates: list[Update], step_s: float | None = None) -> None:
        self._scheduled_ids.difference_update(update.id for update in updates if update.finish)
        scheduler, controller = self._engine.scheduler, self._engine.controller
        outputs = StepOutputs(
            updates,
            step_s,
            len(scheduler.running),
            scheduler.num_waiting,
            scheduler.kv.pool.num_free,
            scheduler.counters.computed_tokens,
            scheduler.counters.preemptions,
            scheduler.counters.swaps,
            scheduler.counters.exited_tokens,
        )
        if controller is not None:
            outputs.drafted, outputs.accepted = controller.drafted, controller.accepted
            outputs.speculation_s = controller.ledger.gained_s
        if self._reports_prefixes:
            self._add_prefixes(outputs)
        meter = self._meter
        outputs.predicted_s, outputs.measured_s = meter.predicted_s, meter.measured_s
        outputs.prediction_error = meter.recent_error
        if self._recorder is not None:
            outputs.recorded = self._recorder.take()
        self._connection.send(outputs)
        if meter.num_profiles > self._num_profiles and meter.profile is not None:
            self._num_profiles = meter.num_profiles
            self._connection.send(Calibrated(json.dumps(meter.profile.to_dict())))

    def _add_prefixes(self, outputs: StepOutputs) -> None:
        tree = self._engine.scheduler.kv.tree
        changes = tree.report_changes()
        outputs.published, outputs.evicted = changes.published, changes.evicted
        outputs.prefixes_lost = tree is not self._reported_tree
        self._reported_tree = tree


def load(connection: Connection, path: str | None = None) -> EngineLoop | None:
    """Load the engine that the first message describes. None if loading fails or the connection is closed."""
    start = next(connection.receive(wait=True), None)
    if start is None:
        return None
    assert isinstance(start, Start)
    if path is not None:
        start = structs.replace(start, path=path)
    try:
        with no_garbage_collection(), one_blas_thread():
            engine = start_engine(start.config, Path(start.path))
    except QuireError as error:
        connection.send(LoadFailed(type(error).__name__, str(error)))
        return None
    if engine.ranks is not None:
        engine.ranks.on_loss = end_as_rank
    info = engine.info
    connection.send(
        Ready(
            info.config.vocab_size,
            info.max_len,
            info.max_requests,
            sorted(info.config.eos_token_ids),
            info.cache.num_blocks,
            info.device,
            info.summary,
            info.config.sampling.as_params(),
            info.fingerprint,
        )
    )
    return EngineLoop(engine, connection, start)


def end_as_rank(reason: str, code: int) -> None:
    """End in the way in which a rank has: the supervisor tells a kill from outside from a crash."""
    if code < 0:
        log.critical("%s", reason)
        os.kill(os.getpid(), -code)
    end_process(reason)


def end_process(reason: str) -> None:
    """At once: a regular exit could hang on a failed GPU, or wait for a rank that has ended."""
    log.critical("%s", reason)
    os._exit(EXIT_DEVICE_LOST)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches both processes; the server handles it
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    connection = Connection(socket.socket(fileno=int(sys.argv[1])))
    loop = load(connection, *sys.argv[2:3])
    try:
        if loop is not None:
            loop.run()
    except DeviceLost as error:
        end_process(str(error))


if __name__ == "__main__":
    main()
