"""An engine's process without an engine, for the supervisor's tests: each token of a prompt says what becomes of it.

It answers a request with as many tokens as it asks for, one a step. A prompt that begins with a token below ends it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

from quire.core.plan import Update
from quire.core.request import Finish
from quire.engine.messages import AddingRequests, FirstScheduled, Ping, Ready, StepOutputs, Submit
from quire.engine.process import Connection

RAISE_WHEN_ADDED = 1  # a Python error
ABORT_WHEN_ADDED = 2  # a signal of its own
RAISE_IN_STEP = 3
RAISE_WHILE_WAITING = 4  # when it was added and nothing was begun
HANG_IN_TEARDOWN = 5  # closes the socket and does not exit


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    link = Connection(connection)
    next(link.receive(wait=True))
    link.send(Ready(100, 1000, 8, [], 100, "cpu", "scripted", {}))
    orders: dict[str, list[int]] = {}
    wanted: dict[str, int] = {}
    begun: set[str] = set()
    while not link.closed:
        for message in link.receive(wait=not orders):
            if isinstance(message, Submit):
                ids = [order.id for order in message.requests]
                link.send(AddingRequests(ids))
                for order in message.requests:
                    if order.prompt[0] == RAISE_WHEN_ADDED:
                        raise RuntimeError("a bug")
                    if order.prompt[0] == ABORT_WHEN_ADDED:
                        os.kill(os.getpid(), signal.SIGABRT)
                    orders[order.id], wanted[order.id] = order.prompt, order.max_tokens - len(order.output)
            elif isinstance(message, Ping):
                link.send(StepOutputs())
        if any(prompt[0] == RAISE_WHILE_WAITING for prompt in orders.values()):
            link.send(StepOutputs())
            raise RuntimeError("a bug while requests wait")
        if fresh := sorted(set(orders) - begun):
            begun.update(fresh)
            link.send(FirstScheduled(fresh))
        kinds = {prompt[0] for prompt in orders.values()}
        if RAISE_IN_STEP in kinds:
            raise RuntimeError("a bug in a step")
        if HANG_IN_TEARDOWN in kinds:
            connection.shutdown(socket.SHUT_RDWR)
            time.sleep(60)
        updates = []
        for name in list(orders):
            wanted[name] -= 1
            updates.append(Update(name, [50], None if wanted[name] else Finish.LENGTH))
            if not wanted[name]:
                del orders[name]
                begun.discard(name)
        link.send(StepOutputs(updates))


if __name__ == "__main__":
    main()
