"""The ledger of a batch job: what it keeps over crashes, and whom it refuses."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from quire.batch import ledger as ledgers
from quire.batch.ledger import ENTRY, Ledger
from quire.errors import InvalidParams

pytestmark = pytest.mark.cpu


def job(num_rows=20, **more):
    return {"num_rows": num_rows, "seed": 0, **more}


def line(row):
    return json.dumps({"row": row, "text": "x" * (row * 7 % 40)}).encode()


def fill(ledger, rows):
    for row in rows:
        ledger.append(row, line(row))


def test_answers_come_in_the_order_of_the_rows(tmp_path: Path):
    order = random.Random(1).sample(range(20), 20)
    with Ledger.begin(tmp_path / "l", job()) as ledger:
        fill(ledger, order)
        assert list(ledger.answers()) == [line(row) + b"\n" for row in range(20)]
        ledger.remove()
    assert not (tmp_path / "l").exists()


def test_no_rows_at_all(tmp_path: Path):
    with Ledger.begin(tmp_path / "l", job(0)) as ledger:
        assert list(ledger.answers()) == []


@pytest.mark.parametrize("cut", range(0, 200, 9))
def test_whatever_a_crash_cuts_off_is_done_again(tmp_path: Path, cut: int):
    """The lines or the index end anywhere, as after a crash. What the ledger keeps is whole."""
    folder = tmp_path / "l"
    with Ledger.begin(folder, job()) as ledger:
        fill(ledger, range(10))
    for name in ("answers.jsonl", "index"):
        path = folder / name
        whole = path.read_bytes()
        path.write_bytes(whole[: max(0, len(whole) - cut // (1 if name == "index" else 3))])
    with Ledger.resume(folder, job()) as ledger:
        kept = [row for row in range(20) if ledger.finished[row]]
        assert kept == list(range(len(kept)))
        assert len(kept) <= 10 - bool(cut)
        fill(ledger, [row for row in range(20) if not ledger.finished[row]])
        assert list(ledger.answers()) == [line(row) + b"\n" for row in range(20)]


def test_lines_without_an_entry_are_cut_off(tmp_path: Path):
    folder = tmp_path / "l"
    with Ledger.begin(folder, job(3)) as ledger:
        fill(ledger, [2])
    with (folder / "answers.jsonl").open("ab") as file:
        file.write(b'{"half": ')
    with (folder / "index").open("ab") as file:
        file.write(bytes(ENTRY.itemsize))  # blocks that a crash left empty
    with Ledger.resume(folder, job(3)) as ledger:
        assert list(ledger.finished) == [0, 0, 1]
        fill(ledger, [0, 1])
        assert list(ledger.answers()) == [line(row) + b"\n" for row in range(3)]


def test_what_is_flushed_survives_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "l"
    code = (
        "import os, signal, sys; from pathlib import Path; from quire.batch.ledger import Ledger\n"
        f"ledger = Ledger.begin(Path({str(folder)!r}), {job()!r})\n"
        "for row in range(5): ledger.append(row, b'%d' % row)\n"
        "ledger.flush(); ledger.append(5, b'5'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    with Ledger.resume(folder, job()) as ledger:
        assert ledger.num_finished == 5


def test_answers_are_flushed_every_second_and_every_mebibyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(ledgers.time, "monotonic", lambda: now[0])
    with Ledger.begin(tmp_path / "l", job()) as ledger:
        index = tmp_path / "l" / "index"
        ledger.append(0, b"x")
        assert index.stat().st_size == 0
        now[0] = 1.5
        ledger.append(1, b"x")
        assert index.stat().st_size == 2 * ENTRY.itemsize
        ledger.append(2, b"x" * (1 << 20))
        assert index.stat().st_size == 3 * ENTRY.itemsize


def test_two_processes_cannot_run_one_job(tmp_path: Path):
    with Ledger.begin(tmp_path / "l", job()), pytest.raises(InvalidParams, match="in use"):
        Ledger.resume(tmp_path / "l", job())


def test_another_job_is_refused(tmp_path: Path):
    with Ledger.begin(tmp_path / "l", job()):
        pass
    with pytest.raises(InvalidParams, match="seed 0, which is 1 now"):
        Ledger.resume(tmp_path / "l", job() | {"seed": 1})
    with pytest.raises(InvalidParams, match="num_rows 20, which is 21"):
        Ledger.resume(tmp_path / "l", job(21))


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_ruined_description_is_refused(tmp_path: Path, text: str):
    with Ledger.begin(tmp_path / "l", job()):
        pass
    (tmp_path / "l" / "job.json").write_text(text)
    with pytest.raises(InvalidParams, match="remove the folder"):
        Ledger.resume(tmp_path / "l", job())


def test_an_index_that_names_a_row_twice_is_refused(tmp_path: Path):
    with Ledger.begin(tmp_path / "l", job()) as ledger:
        fill(ledger, [1, 2])
    data = (tmp_path / "l" / "index").read_bytes()
    entries = bytearray(data)
    entries[ENTRY.itemsize : ENTRY.itemsize + 8] = (1).to_bytes(8, "little")
    (tmp_path / "l" / "index").write_bytes(bytes(entries))
    with pytest.raises(InvalidParams, match="twice"):
        Ledger.resume(tmp_path / "l", job())
