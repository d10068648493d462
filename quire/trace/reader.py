"""Reads a recording. The file may come from anywhere: sizes are bounded, types are checked, nothing is executed.

A file whose end is missing, because its server was killed or still runs, is read up to its last whole line.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from quire.errors import InvalidParams
from quire.trace.format import FORMAT, VERSION, Header, decoder
from quire.trace.recording import Recording
from quire.trace.writer import GZIP

MAGIC = b"\x1f\x8b"
READ_BYTES = 1 << 20
MAX_LINE_BYTES = 32 << 20
MAX_BYTES = 4 << 30  # of all lines
MAX_LINES = 10_000_000


class Probe(msgspec.Struct):
    """What every version of the format has in its first line."""

    format: str
    version: int
    quire: str = "unknown"


def is_recording(path: Path) -> bool:
    """Whether it is compressed, as no other format of traffic is."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_recording(path: Path) -> Recording:
    recording: Recording | None = None
    number = 0
    try:
        for line in read_lines(path):
            number += 1
            if recording is None:
                recording = Recording(path.name, read_header(line, path))
            else:
                recording.add(decoder.decode(line))
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, InvalidParams):
            raise
        raise InvalidParams(f"{path}, line {number:,}, is not a line of a recording: {error}.") from None
    if recording is None:
        raise InvalidParams(f"{path} holds no whole line; the recording ended before it began.")
    return recording


def read_header(line: bytes, path: Path) -> Header:
    try:
        probe = msgspec.json.decode(line, type=Probe)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        probe = Probe("", 0)
    if probe.format != FORMAT:
        raise InvalidParams(f"{path} is no recording of quire; quire serve --trace FILE makes one.")
    if probe.version != VERSION:
        raise InvalidParams(
            f"{path} has version {probe.version} of the format, and this quire reads version {VERSION}; use the quire "
            f"that recorded it ({probe.quire[:40]})."
        )
    header = decoder.decode(line)
    if not isinstance(header, Header):
        raise ValueError("the first line is not a header")
    return header


def read_lines(path: Path) -> Iterator[bytes]:
    """Whole lines, as they are decompressed: what a small file can become is never in memory at once."""
    rest, num_bytes, num_lines = b"", 0, 0
    for piece in decompress(path):
        *lines, rest = (rest + piece).split(b"\n")
        num_bytes, num_lines = num_bytes + len(piece), num_lines + len(lines)
        if len(rest) > MAX_LINE_BYTES:
            raise InvalidParams(f"{path} has a line of more than {MAX_LINE_BYTES:,} bytes, the most there may be.")
        if num_bytes > MAX_BYTES or num_lines > MAX_LINES:
            raise InvalidParams(
                f"{path} has more than {MAX_BYTES:,} bytes or {MAX_LINES:,} lines, the most that are read; record for "
                "a shorter time."
            )
        yield from lines


def decompress(path: Path) -> Iterator[bytes]:
    decompressor = zlib.decompressobj(GZIP)
    try:
        with path.open("rb") as file:
            while data := file.read(READ_BYTES):
                while data and not decompressor.eof:
                    yield decompressor.decompress(data, READ_BYTES)
                    data = decompressor.unconsumed_tail
                if decompressor.eof:
                    return
    except OSError as error:
        raise InvalidParams(f"{path} cannot be read: {error.strerror}.") from None
    except zlib.error:
        raise InvalidParams(f"{path} is no recording, or is damaged: gzip cannot decompress it.") from None
