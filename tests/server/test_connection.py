"""What a client can do to a socket before anybody has asked for its key. A real listener on loopback, a tiny app."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import socket as sockets
import struct
import subprocess
import sys

import pytest

from quire.server.app import build_app
from quire.server.auth import ApiKeys
from quire.server.config import ServerConfig
from quire.server.connection import ConnectionLimits, RefusalLog, UvicornConfig, max_connections
from quire.server.main import UNSENT_BYTES, UvicornServer, bind
from quire.server.metrics import Metrics

pytestmark = pytest.mark.cpu

LIMITS = {"max_header_bytes": 4096, "read_timeout_s": 0.3, "max_connections": 100}
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@contextlib.asynccontextmanager
async def listening(keys=None, **limits):
    """Yields a function that opens a connection."""
    values = LIMITS | limits
    config = ServerConfig(max_body_bytes=1000, read_timeout=values["read_timeout_s"], log_requests=False)
    middleware = build_app(config, ApiKeys(keys or {}), Metrics())
    made = ConnectionLimits(**values, refusals=RefusalLog(values["max_connections"]))
    with bind("127.0.0.1", 0) as socket:
        listener = UvicornServer(
            UvicornConfig(middleware, made, loop="none", ws="none", lifespan="off", log_config=None)
        )
        serving = asyncio.create_task(listener.serve([socket]))
        while not listener.started:
            await asyncio.sleep(0.01)
        writers = []

        async def connect():
            reader, writer = await asyncio.open_connection(*socket.getsockname())
            writers.append(writer)
            return reader, writer

        try:
            yield connect
        finally:
            for writer in writers:
                writer.close()
            for writer in writers:
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
            listener.should_exit = True
            await serving


async def read_all(reader):
    """Until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := await asyncio.wait_for(reader.read(65536), 20):
            data += part
    return data


def run(work):
    asyncio.run(asyncio.wait_for(work(), 60))


def status(data):
    return int(data.split()[1])


def message(data):
    return json.loads(data.partition(b"\r\n\r\n")[2])["error"]["message"]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\nX: " + b"a" * 10_000,  # one header without an end
        b"GET /health HTTP/1.1\r\n" + b"X: a\r\n" * 2_000,  # many
        b"GET /" + b"a" * 10_000,  # a path without an end
        b"GET /health HTTP/1.1\r\nX: " + b"a" * 5_000 + b"\r\n\r\n",  # complete, and too long
    ],
)
def test_headers_are_bounded_in_bytes(sent):
    async def work():
        async with listening() as connect:
            reader, writer = await connect()
            writer.write(sent)
            data = await read_all(reader)
            assert status(data) == 431
            assert "4,096 bytes" in message(data)

    run(work)


@pytest.mark.parametrize("tail", [b"1;" + b"x" * 1_000_000, b"1\r\na\r\n0\r\n" + b"X: a\r\n" * 200_000])
def test_what_surrounds_chunks_is_bounded_too(tail):
    async def work():
        async with listening() as connect:
            reader, writer = await connect()
            writer.write(b"POST /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + tail)
            assert status(await read_all(reader)) == 431

    run(work)


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        (b"", None),
        (b"\r\n", 408),
        (b"GET /hea", 408),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX: ", 408),
        (b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{", 408),
        (b"POST /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", 408),
    ],
)
def test_nothing_half_sent_stays_open(sent, wanted):
    async def work():
        async with listening() as connect:
            reader, writer = await connect()
            writer.write(sent)
            data = await read_all(reader)
            assert (status(data) if data else None) == wanted

    run(work)


def test_a_client_that_drips_is_closed_too():
    async def work():
        async with listening() as connect:
            reader, writer = await connect()

            async def drip():
                with contextlib.suppress(ConnectionError):
                    for byte in b"GET /health HTTP/1.1\r\n" + b"X: a\r\n" * 500:
                        writer.write(bytes([byte]))
                        await writer.drain()
                        await asyncio.sleep(0.02)

            dripping = asyncio.create_task(drip())
            assert status(await read_all(reader)) == 408
            dripping.cancel()

    run(work)


def test_a_body_that_nobody_wants_does_not_hold_the_connection():
    async def work():
        async with listening({"ann": "ann-secret"}) as connect:
            reader, writer = await connect()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert status(await read_all(reader)) == 401

    run(work)


def test_requests_on_one_connection_are_timed_each_for_itself():
    async def work():
        async with listening(read_timeout_s=0.5) as connect:
            reader, writer = await connect()
            for _ in range(4):
                writer.write(GET)
                head = await reader.readuntil(b"\r\n\r\n")
                assert status(head) == 200
                await reader.readexactly(len(b'{"status":"ok"}'))
                await asyncio.sleep(0.2)

    run(work)


def test_a_body_over_the_limit_is_too_large_however_it_is_sent():
    async def work():
        async with listening() as connect:
            for framing, body in (
                (b"Content-Length: 2000", b""),
                (b"Transfer-Encoding: chunked", b"%x\r\n%s\r\n" % (2000, b"a" * 2000)),
            ):
                reader, writer = await connect()
                writer.write(b"POST /health HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n%s" % (framing, body))
                data = await read_all(reader)
                assert status(data) == 413
                assert "1,000 bytes" in message(data)

    run(work)


def test_what_is_not_http_is_refused_in_json():
    async def work():
        async with listening() as connect:
            reader, writer = await connect()
            writer.write(b"\x16\x03\x01 hello\r\n\r\n")
            data = await read_all(reader)
            assert status(data) == 400
            assert "HTTP/1.1" in message(data)

    run(work)


def test_connections_beyond_the_limit_are_refused_and_the_log_says_so(caplog):
    async def work():
        async with listening(max_connections=2, read_timeout_s=10) as connect:
            kept = [await connect() for _ in range(2)]
            for _ in range(3):
                reader, _ = await connect()
                assert status(await read_all(reader)) == 503
            reader, writer = kept[0]
            writer.write(GET)
            assert status(await reader.readuntil(b"\r\n\r\n")) == 200

    with caplog.at_level(logging.WARNING, "quire.server"):
        run(work)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["1 connections refused"]


def test_refusals_are_counted_between_two_lines_of_the_log(caplog):
    times = iter([0.0, 0.0, 5.0, 9.0, 11.0, 11.0])
    refusals = RefusalLog(7, now=lambda: next(times))
    with caplog.at_level(logging.WARNING, "quire.server"):
        for _ in range(4):
            refusals.add()
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "1 connections refused: 7 are open",
        "3 connections refused: 7 are open",
    ]


def test_the_limit_on_open_files_is_raised():
    code = (
        "import resource\n"
        "from quire.file_limit import raise_file_limit\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))\n"
        "assert raise_file_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(printed) == min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 1_048_576)


def test_some_descriptors_are_left_for_everything_else():
    assert [max_connections(files) for files in (100, 1024, 20_000)] == [50, 896, 19_872]


def test_a_connection_that_was_reset_leaves_no_timer():
    """A timer would keep the connection's objects until it expires."""

    async def work():
        async with listening() as connect:
            before = len(asyncio.get_running_loop()._scheduled)
            for _ in range(20):
                reader, writer = await connect()
                writer.write(GET)
                await reader.readuntil(b"\r\n\r\n")
                option = struct.pack("ii", 1, 0)  # closing sends a reset
                writer.get_extra_info("socket").setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, option)
                writer.close()
            await asyncio.sleep(0.2)
            left = [each for each in asyncio.get_running_loop()._scheduled if not each.cancelled()]
            assert len(left) <= before + 2

    run(work)


@pytest.mark.skipif(not hasattr(sockets, "TCP_NOTSENT_LOWAT"), reason="the system has no such limit")
def test_the_system_keeps_little_for_a_client_that_does_not_read():
    """A live stream that is read slowly stays recent: what was not sent is not made."""
    with bind("127.0.0.1", 0) as bound, sockets.socket() as client:
        client.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
        client.connect(bound.getsockname())
        connection, _ = bound.accept()
        with connection:
            connection.setblocking(False)
            num_bytes = 0
            with contextlib.suppress(BlockingIOError):
                while num_bytes < 10_000_000:
                    num_bytes += connection.send(bytes(4096))
    assert num_bytes < 4 * UNSENT_BYTES
