"""Responses and events, cut into pieces in every way."""

from __future__ import annotations

import random

import pytest

from quire.bench.serve.client import EventReader
from quire.bench.serve.http_client import BadResponse, ResponseReader, Target
from quire.errors import InvalidParams

pytestmark = pytest.mark.core

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\nX: a:b\r\n\r\n"


def cuts(data: bytes, seed: int) -> list[bytes]:
    rng = random.Random(seed)
    places = sorted(rng.sample(range(len(data) + 1), rng.randrange(0, 12)))
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


def read(pieces: list[bytes]) -> tuple[ResponseReader, bytes]:
    reader = ResponseReader()
    return reader, b"".join(reader.feed(piece) for piece in pieces)


class TestResponses:
    BODY = b"hello\r\nworld 0\r\n\r\n" * 3
    ENCODED = b"5\r\nhello\r\nD;name=value\r\n\r\nworld 0\r\n\r\n\r\n24\r\n" + BODY[18:] + b"\r\n0\r\n"

    @pytest.mark.parametrize("trailers", [b"\r\n", b"A: b\r\nC: d\r\n\r\n"], ids=["plain", "trailers"])
    @pytest.mark.parametrize("seed", range(40))
    def test_chunks_come_out_whole_however_they_are_cut(self, seed, trailers):
        reader, body = read(cuts(CHUNKED + self.ENCODED + trailers, seed))
        assert (reader.status, body) == (200, self.BODY)
        assert reader.complete
        assert reader.keep_alive
        assert reader.headers["x"] == "a:b"

    def test_a_chunk_is_handed_on_before_it_is_complete(self):
        reader = ResponseReader()
        assert reader.feed(CHUNKED + b"a\r\n01234") == b"01234"
        assert reader.feed(b"56789") == b"56789"
        assert reader.feed(b"\r\n0\r\n") == b""
        assert not reader.complete
        reader.feed(b"\r\n")
        assert reader.complete

    @pytest.mark.parametrize("seed", range(10))
    def test_a_body_of_stated_length(self, seed):
        head = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 7\r\n\r\n"
        reader, body = read(cuts(head + b"no room", seed))
        assert (reader.status, body, reader.complete, reader.keep_alive) == (429, b"no room", True, True)

    def test_bytes_after_the_end_make_the_connection_useless(self):
        reader, body = read([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhim"])
        assert (body, reader.complete, reader.keep_alive) == (b"hi", True, False)

    @pytest.mark.parametrize("seed", range(10))
    def test_a_second_response_makes_the_connection_useless(self, seed):
        response = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
        reader, body = read(cuts(response + response.replace(b"200", b"500"), seed))
        assert (reader.status, body, reader.complete, reader.keep_alive) == (200, b"hi", True, False)

    def test_a_body_of_no_stated_length_ends_with_the_connection(self):
        reader, body = read([b"HTTP/1.1 200 OK\r\n\r\nab", b"cd"])
        assert (body, reader.complete, reader.keep_alive) == (b"abcd", False, False)
        reader.end()
        assert reader.complete

    def test_the_end_of_the_connection_does_not_complete_a_chunked_body(self):
        reader, _ = read([CHUNKED + b"5\r\nhello\r\n"])
        reader.end()
        assert not reader.complete

    def test_an_interim_response_is_passed_over(self):
        reader, body = read([b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"])
        assert (reader.status, body, reader.complete) == (200, b"ok", True)

    def test_no_content(self):
        reader, _ = read([b"HTTP/1.1 204 No Content\r\n\r\n"])
        assert reader.complete

    @pytest.mark.parametrize(
        ("head", "kept"),
        [
            (b"HTTP/1.1 200 OK\r\nConnection: Close", False),
            (b"HTTP/1.0 200 OK", False),
            (b"HTTP/1.0 200 OK\r\nConnection: keep-alive", True),
        ],
    )
    def test_whether_the_connection_may_be_used_again(self, head, kept):
        reader, _ = read([head + b"\r\nContent-Length: 0\r\n\r\n"])
        assert reader.complete
        assert reader.keep_alive is kept

    @pytest.mark.parametrize(
        "data",
        [
            b"SSH-2.0-OpenSSH_9.9\r\n\r\n",
            b"HTTP/1.1 OK\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
            CHUNKED + b"xyz\r\n",
            CHUNKED + b"-5\r\n",
            CHUNKED + b"f" * 5000,
            b"x" * 70_000,
        ],
        ids=lambda data: data[-12:].decode(),
    )
    def test_what_is_no_response(self, data):
        with pytest.raises(BadResponse):
            read([data])


class TestEvents:
    STREAM = ": hi\n\ndata: one\n\nevent: x\ndata:two\nid: 3\ndata:  three\n\n\n\ndata\n\nretry: 5\n\ndata: {é}\n\n"
    DATA = (b"one", b"two\n three", "{é}".encode())

    @pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"], ids=["lf", "crlf", "cr"])
    @pytest.mark.parametrize("seed", range(40))
    def test_events_come_out_whole_however_they_are_cut(self, seed, line_end):
        reader = EventReader()
        stream = self.STREAM.replace("\n", line_end).encode()
        assert [data for piece in cuts(stream, seed) for data in reader.feed(piece)] == list(self.DATA)

    def test_an_event_does_not_wait_for_the_next(self):
        assert EventReader().feed(b"data: a\n\ndata: b\n\ndata: c") == [b"a", b"b"]
        assert EventReader().feed(b"data: a\r\r") == [b"a"]

    def test_a_line_feed_that_belongs_to_a_return_ends_no_event(self):
        reader = EventReader()
        assert [reader.feed(piece) for piece in (b"data: a\r", b"\n", b"data: b\r", b"\n\r", b"\n")] == [
            [], [], [], [b"a\nb"], []
        ]  # fmt: skip


class TestTargets:
    @pytest.mark.parametrize(
        ("url", "expected"),
        [
            ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1/models"),
            ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1/models"),
            ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000/v1/models"),
            ("https://example.org/proxy/v1", "https://example.org:443/proxy/v1/models"),
            ("http://[::1]:80", "http://[::1]:80/v1/models"),
        ],
    )
    def test_an_address_with_or_without_its_version(self, url, expected):
        assert Target.of(url).url("/v1/models") == expected

    @pytest.mark.parametrize(
        "url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:99999", "http://h/?a=b", "http://h/a b"]
    )
    def test_what_is_no_address(self, url):
        with pytest.raises(InvalidParams):
            Target.of(url)

    @pytest.mark.parametrize("key", ["a\r\nX: y", "a b", "schlüssel"])
    def test_a_key_cannot_add_headers(self, key):
        with pytest.raises(InvalidParams):
            Target.of("http://h", key)

    def test_a_request(self):
        target = Target.of("http://host:1/v1", "secret")
        head, body = target.post("/v1/completions", b"{}").split(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        assert first == "POST /v1/completions HTTP/1.1"
        assert {"Host: host:1", "Content-Length: 2", "Authorization: Bearer secret"} <= set(lines)
        assert body == b"{}"
        assert "secret" not in repr(target)
