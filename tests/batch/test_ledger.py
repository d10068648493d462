"""The ledger of a batch job: what it keeps over crashes, and whom it refuses."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from quire.batch import ledger as ledgers
from quire.batch.ledger import ENTRY, Ledger, is_complete
from quire.errors import EngineError, InvalidParams

pytestmark = pytest.mark.cpu


def job(num_rows=20, **more):
    return {"num_rows": num_rows, "seed": 0, **more}


def begin(parent, described=None):
    return Ledger.open(parent / "l", described or job(), resume=False)


def resume(parent, described=None):
    return Ledger.open(parent / "l", described or job(), resume=True)


def line(row):
    return json.dumps({"row": row, "text": "x" * (row * 7 % 40)}).encode()


def fill(ledger, rows):
    for row in rows:
        ledger.append(row, line(row))


def test_answers_come_in_the_order_of_the_rows(tmp_path: Path):
    order = random.Random(1).sample(range(20), 20)
    with begin(tmp_path) as ledger:
        fill(ledger, order)
        assert list(ledger.answers()) == [line(row) + b"\n" for row in range(20)]
        (tmp_path / "out.partial").write_bytes(b"".join(ledger.answers()))
        ledger.complete(tmp_path / "out.partial", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_no_rows_at_all(tmp_path: Path):
    with begin(tmp_path, job(0)) as ledger:
        assert list(ledger.answers()) == []


@pytest.mark.parametrize("cut", range(0, 200, 9))
def test_whatever_a_crash_cuts_off_is_done_again(tmp_path: Path, cut: int):
    """The lines or the index end anywhere, as after a crash. What the ledger keeps is whole."""
    folder = tmp_path / "l"
    with begin(tmp_path) as ledger:
        fill(ledger, range(10))
    for name in ("answers.jsonl", "index"):
        path = folder / name
        whole = path.read_bytes()
        path.write_bytes(whole[: max(0, len(whole) - cut // (1 if name == "index" else 3))])
    with resume(tmp_path) as ledger:
        kept = [row for row in range(20) if ledger.finished[row]]
        assert kept == list(range(len(kept)))
        assert len(kept) <= 10 - bool(cut)
        fill(ledger, [row for row in range(20) if not ledger.finished[row]])
        assert list(ledger.answers()) == [line(row) + b"\n" for row in range(20)]


def test_lines_without_an_entry_are_cut_off(tmp_path: Path):
    folder = tmp_path / "l"
    with begin(tmp_path, job(3)) as ledger:
        fill(ledger, [2])
    with (folder / "answers.jsonl").open("ab") as file:
        file.write(b'{"half": ')
    with (folder / "index").open("ab") as file:
        file.write(bytes(ENTRY.itemsize))  # blocks that a crash left empty
    with resume(tmp_path, job(3)) as ledger:
        assert list(ledger.finished) == [0, 0, 1]
        fill(ledger, [0, 1])
        assert list(ledger.answers()) == [line(row) + b"\n" for row in range(3)]


def test_what_is_flushed_survives_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "l"
    code = (
        "import os, signal, sys; from pathlib import Path; from quire.batch.ledger import Ledger\n"
        f"ledger = Ledger.open(Path({str(folder)!r}), {job()!r}, resume=False)\n"
        "for row in range(5): ledger.append(row, b'%d' % row)\n"
        "ledger.flush(); ledger.append(5, b'5'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    with resume(tmp_path) as ledger:
        assert ledger.num_finished == 5


def test_answers_are_flushed_every_second_and_every_mebibyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(ledgers.time, "monotonic", lambda: now[0])
    with begin(tmp_path) as ledger:
        index = tmp_path / "l" / "index"
        ledger.append(0, b"x")
        assert index.stat().st_size == 0
        now[0] = 1.5
        ledger.append(1, b"x")
        assert index.stat().st_size == 2 * ENTRY.itemsize
        ledger.append(2, b"x" * (1 << 20))
        assert index.stat().st_size == 3 * ENTRY.itemsize


def test_two_processes_cannot_run_one_job(tmp_path: Path):
    with begin(tmp_path), pytest.raises(InvalidParams, match="in use"):
        resume(tmp_path)


def test_another_job_is_refused(tmp_path: Path):
    with begin(tmp_path):
        pass
    with pytest.raises(InvalidParams, match="seed 0, which is 1 now"):
        resume(tmp_path, job() | {"seed": 1})
    with pytest.raises(InvalidParams, match="num_rows 20, which is 21"):
        resume(tmp_path, job(21))


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_ruined_description_is_refused(tmp_path: Path, text: str):
    with begin(tmp_path):
        pass
    (tmp_path / "l" / "job.json").write_text(text)
    with pytest.raises(InvalidParams, match="remove the folder"):
        resume(tmp_path)


def test_an_index_that_names_a_row_twice_is_refused(tmp_path: Path):
    with begin(tmp_path) as ledger:
        fill(ledger, [1, 2])
    data = (tmp_path / "l" / "index").read_bytes()
    entries = bytearray(data)
    entries[ENTRY.itemsize : ENTRY.itemsize + 8] = (1).to_bytes(8, "little")
    (tmp_path / "l" / "index").write_bytes(bytes(entries))
    with pytest.raises(InvalidParams, match="twice"):
        resume(tmp_path)


@pytest.mark.parametrize("room", range(0, 500, 37))
def test_a_full_disk_costs_nothing_that_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int):
    """Writes fail after `room` bytes, partly done. Later the disk has room again, in this process and in the next."""
    left = [room]

    def write_synced(file, data):
        file.write(data[: left[0]])
        left[0] -= len(data)
        if left[0] < 0:
            left[0] = 0
            raise OSError(28, "No space left on device")

    ledger = begin(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(ledgers, "write_synced", write_synced)
        for row in range(12):
            ledger.append(row, line(row))
            with contextlib.suppress(OSError):
                ledger.flush()
    assert ledger.num_finished == 12
    with pytest.raises(EngineError), ledger:
        raise EngineError("the error that ends the job")
    with resume(tmp_path) as ledger:
        assert ledger.num_finished == 12
        fill(ledger, range(12, 20))
        assert list(ledger.answers()) == [line(row) + b"\n" for row in range(20)]


def test_a_job_that_was_killed_before_it_had_begun_begins(tmp_path: Path):
    (tmp_path / "l").mkdir()
    (tmp_path / "l" / "job.json.partial").write_text("{")
    with begin(tmp_path) as ledger:
        assert ledger.num_finished == 0
    (tmp_path / "l" / "job.json").unlink()
    with resume(tmp_path) as ledger:
        fill(ledger, [3])
    (tmp_path / "l" / "job.json").unlink()
    with pytest.raises(InvalidParams, match="remove the folder"):
        resume(tmp_path)


def test_a_ledger_without_resume_is_refused(tmp_path: Path):
    with begin(tmp_path):
        pass
    with pytest.raises(InvalidParams, match="--resume"):
        begin(tmp_path)


@pytest.mark.parametrize("deleted", range(len(ledgers.FILES)))
def test_a_kill_while_the_ledger_is_deleted(tmp_path: Path, deleted: int):
    """Whatever is left of the ledger, the output is known to be that of the job; another one is not."""
    with begin(tmp_path, job(1)) as ledger:
        fill(ledger, [0])
        (tmp_path / "out.partial").write_bytes(b"".join(ledger.answers()))
        ledgers.write_whole(tmp_path / "l" / "written", ledgers.to_json(ledgers.identity(tmp_path / "out.partial")))
    assert not is_complete(tmp_path / "l", tmp_path / "out")
    (tmp_path / "out.partial").replace(tmp_path / "out")
    for name in ledgers.FILES[:deleted]:
        (tmp_path / "l" / name).unlink(missing_ok=True)
    assert is_complete(tmp_path / "l", tmp_path / "out")
    (tmp_path / "other").write_bytes((tmp_path / "out").read_bytes())
    assert not is_complete(tmp_path / "l", tmp_path / "other")
    ledgers.remove(tmp_path / "l")
    assert not (tmp_path / "l").exists()


def test_an_engine_with_other_limits_is_refused(tmp_path: Path):
    with begin(tmp_path) as ledger:
        ledger.check_engine({"max_len": 100})
        ledger.check_engine({"max_len": 100})
    with resume(tmp_path) as ledger, pytest.raises(InvalidParams, match="max_len 100, which is 50 now"):
        ledger.check_engine({"max_len": 50})


def test_a_folder_that_another_process_has_just_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begin(tmp_path).__exit__(None, None, None)
    flock = ledgers.fcntl.flock

    def delete_first(file, flags):
        ledgers.remove(tmp_path / "l")
        flock(file, flags)

    monkeypatch.setattr(ledgers.fcntl, "flock", delete_first)
    with pytest.raises(InvalidParams, match="just completed"):
        resume(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "l").write_text("a file")
    with pytest.raises(InvalidParams, match="cannot be written"):
        begin(tmp_path)
