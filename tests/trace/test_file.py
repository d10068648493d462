"""The file: its writer disturbs nobody, its reader trusts nobody."""

from __future__ import annotations

import errno
import gzip
import logging
import os
import zlib

import pytest

from quire.errors import InvalidParams
from quire.trace import reader, recording, writer
from quire.trace.format import Close, Resume, encode
from quire.trace.reader import read_recording
from quire.trace.writer import TraceWriter
from tests.tools import recordings
from tests.tools.recordings import answer, arrival, engine, header, write

pytestmark = pytest.mark.core

LINES = [header(), engine(), arrival(), *answer(), Close(at=10.0)]


class TestWriting:
    def test_what_is_written_is_read(self, tmp_path):
        out = TraceWriter(tmp_path / "a")
        for line in LINES:
            out.add(line)
        out.close()
        found = read_recording(tmp_path / "a")
        assert found.is_closed
        assert found.requests["0"].tokens == recordings.ANSWER
        assert found.requests["0"].token_steps == [0, 1, 2, 3]
        assert found.requests["0"].prompt == recordings.PROMPT
        assert os.stat(tmp_path / "a").st_mode & 0o777 == 0o600

    def test_a_file_that_exists_is_kept(self, tmp_path):
        (tmp_path / "a").write_text("mine")
        with pytest.raises(InvalidParams, match="exists"):
            TraceWriter(tmp_path / "a")
        assert (tmp_path / "a").read_text() == "mine"

    def test_a_folder_that_does_not_exist(self, tmp_path):
        with pytest.raises(InvalidParams, match="cannot be written: No such file"):
            TraceWriter(tmp_path / "none" / "a")

    def test_lines_are_in_the_file_before_it_is_closed(self, tmp_path):
        out = TraceWriter(tmp_path / "a", flush_s=0.01)
        for line in LINES[:3]:
            out.add(line)
        while out._pending or not (tmp_path / "a").stat().st_size:
            pass
        (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes())  # as a killed server leaves it
        out.close()
        found = read_recording(tmp_path / "b")
        assert not found.is_closed
        assert list(found.requests) == ["0"]

    def test_a_full_disk_ends_the_recording_and_nothing_else(self, tmp_path, monkeypatch, caplog):
        def full(file, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(writer.os, "write", full)
        out = TraceWriter(tmp_path / "a", flush_s=0.001)
        out.add(header())
        while not out.failed:
            pass
        out.add(engine())
        assert not out._pending
        out.close()
        (message,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
        assert "has stopped: it cannot be written: No space left on device" in message

    def test_a_slow_disk_ends_the_recording(self, tmp_path, monkeypatch, caplog):
        monkeypatch.setattr(writer, "MAX_PENDING_BYTES", 1000)
        out = TraceWriter(tmp_path / "a", flush_s=60.0)
        out.write(b"x" * 900)
        assert not out.failed
        out.write(b"x" * 200)
        out.write(b"x" * 200)
        assert out.failed
        assert out._num_pending_bytes == 0
        out.close()
        assert len(caplog.records) == 1


def lines_of(*lines: object) -> bytes:
    return b"".join(line if isinstance(line, bytes) else encode(line) for line in lines)


STEP = b'{"kind":"step","step":1,"at":1,"done":2,"requests":["0"],"starts":[0],"counts":[40],"yields":[1]%s}\n'
BAD = {
    "nothing": (b"", "no whole line"),
    "another file": (b'{"hello": 1}\n', "no recording of quire"),
    "a list": (b"[1, 2]\n", "no recording of quire"),
    "a later version": (encode(header(version=2, quire="7.1")), "version 2 of the format.*version 1.*7.1"),
    "two headers": (lines_of(header(), header()), "line 2, .*second header"),
    "no json": (lines_of(header(), b"{\n"), "line 2, "),
    "another kind": (lines_of(header(), b'{"kind":"secret"}\n'), "line 2, .*secret"),
    "a wrong type": (lines_of(header(), b'{"kind":"close","at":"now"}\n'), r"Expected `float`.*\$.at"),
    "not a number": (lines_of(header(), b'{"kind":"close","at":NaN}\n'), "line 2, "),
    "a huge number": (lines_of(header(), b'{"kind":"close","at":1e300}\n'), "line 2, "),
    "a negative token": (lines_of(header(), encode(arrival()).replace(b"139", b"-139")), "line 2, "),
    "a huge token": (lines_of(header(), encode(arrival()).replace(b"139", b"9999999999")), "line 2, "),
    "no prompt": (lines_of(header(), arrival(prompt=None)), "neither a prompt nor digests"),
    "an empty prompt": (lines_of(header(), arrival(prompt=[])), "empty prompt"),
    "prompt and digests": (lines_of(header(), arrival(blocks=["a"])), "neither a prompt nor digests"),
    "too few digests": (lines_of(header(), arrival(prompt=None, num_prompt=33, blocks=["a"])), "1 digests"),
    "an unknown leader": (lines_of(header(), arrival(leader="9")), "no request '9'"),
    "an unknown answer": (lines_of(header(), *answer("5")), "no request '5'"),
    "unequal columns": (lines_of(header(), STEP.replace(b'"starts":[0]', b'"starts":[0,1]') % b""), "differ in length"),
    "too many tokens": (lines_of(header(), arrival(), STEP % b',"num_tokens":{"0":2147483647}'), "the most"),
    "resumed with too many": (lines_of(header(), arrival(), Resume(id="0", at=1, num_output=2**31 - 1)), "the most"),
    "deep nesting": (lines_of(header(), b'{"kind":"request","params":' + b"[" * 100_000 + b"\n"), "line 2, "),
}  # fmt: skip


class TestHostileFiles:
    @pytest.mark.parametrize("name", BAD)
    def test_each_gives_one_sentence(self, tmp_path, name):
        content, expected = BAD[name]
        (tmp_path / "a").write_bytes(gzip.compress(content))
        with pytest.raises(InvalidParams, match=expected) as caught:
            read_recording(tmp_path / "a")
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400

    def test_a_file_that_is_not_compressed(self, tmp_path):
        (tmp_path / "a").write_bytes(lines_of(*LINES))
        with pytest.raises(InvalidParams, match="gzip cannot decompress"):
            read_recording(tmp_path / "a")

    def test_a_damaged_file(self, tmp_path):
        content = bytearray(gzip.compress(lines_of(*LINES)))
        content[60] ^= 255
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(InvalidParams):
            read_recording(tmp_path / "a")

    @pytest.mark.parametrize("end", [b"", b"\n"])
    def test_a_line_that_never_ends(self, tmp_path, monkeypatch, end):
        """A few bytes that become many are not decompressed as a whole."""
        monkeypatch.setattr(reader, "MAX_LINE_BYTES", 1 << 16)
        monkeypatch.setattr(reader, "READ_BYTES", 1 << 12)
        (tmp_path / "a").write_bytes(gzip.compress(encode(header()) + b"x" * (1 << 20) + end))
        with pytest.raises(InvalidParams, match="a line of more than 65,536 bytes"):
            read_recording(tmp_path / "a")

    def test_too_many_lines(self, tmp_path, monkeypatch):
        monkeypatch.setattr(reader, "MAX_LINES", 100)
        write(tmp_path / "a", [header(), *(Close(at=1.0) for _ in range(100))])
        with pytest.raises(InvalidParams, match="record for a shorter time"):
            read_recording(tmp_path / "a")

    @pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
    def test_a_file_that_was_cut_is_read_up_to_its_last_whole_line(self, tmp_path, share):
        compressor = zlib.compressobj(1, zlib.DEFLATED, writer.GZIP)
        content = b"".join(compressor.compress(encode(line)) + compressor.flush(zlib.Z_SYNC_FLUSH) for line in LINES)
        (tmp_path / "a").write_bytes(content[: int(share * len(content))])
        found = read_recording(tmp_path / "a")
        assert not found.is_closed
        assert len(found.steps) < 4

    def test_an_answer_may_have_as_many_tokens_as_are_read(self, monkeypatch):
        monkeypatch.setattr(recording, "MAX_OUTPUT", 4)
        assert recordings.recording(arrival(), *answer()).num_output == 4
