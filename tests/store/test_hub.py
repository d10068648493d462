"""Names on the hub: what is asked for, what counts as a model, and what its errors become."""

from __future__ import annotations

import errno
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from quire.errors import DiskFull, ModelNotFound, PullError
from quire.store import ModelFiles, pull, resolve
from quire.store import hub as hub_module
from quire.store.hub import cache_folder, find_in_hub_cache, reporting_bars, split_name

pytestmark = pytest.mark.cpu


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that answers with `tmp_path` and records how it was asked."""
    calls = []

    def snapshot_download(repository, **options):
        calls.append((repository, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(hub_module, "cache_folder", lambda repository: tmp_path)
    return calls


def fail_with(monkeypatch, error: Exception):
    def snapshot_download(repository, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def http_error(kind: type[errors.HfHubHTTPError], message: str) -> errors.HfHubHTTPError:
    """The hub's HTTP errors want a response of its HTTP library; only their type and text matter here."""
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    return error


def fill(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).write_bytes(b"12")
    return directory


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("org/name", ("org/name", None)),
        ("Org-1/name.v2_x", ("Org-1/name.v2_x", None)),
        ("org/name:q4/file.gguf", ("org/name", "q4/file.gguf")),
        ("org/name:latest", None),
        ("models/file.gguf", None),
        ("../name", None),
        ("a/b/c", None),
        ("name", None),
    ],
)
def test_names(name, parts):
    assert split_name(name) == parts


def test_repository_is_a_directory_without_what_is_not_needed(hub, tmp_path):
    fill(tmp_path, "config.json", "model.safetensors")
    assert resolve("org/name") == ModelFiles("org/name", tmp_path, "directory", 4)
    ((repository, options),) = hub
    assert repository == "org/name"
    assert "*.safetensors" in options["allow_patterns"]
    assert "*.bin" not in options["allow_patterns"]
    assert options["local_files_only"] is False


def test_no_pull_looks_into_the_cache_only(hub, tmp_path):
    fill(tmp_path, "config.json", "model.safetensors")
    resolve("org/name", pull=False)
    assert hub[0][1]["local_files_only"] is True


def test_one_file_of_a_repository(hub, tmp_path):
    fill(tmp_path, "a.gguf")
    assert resolve("org/name:a.gguf") == ModelFiles("org/name:a.gguf", tmp_path / "a.gguf", "gguf", 2)
    assert hub[0][1]["allow_patterns"] == ["a.gguf"]


def test_file_that_the_repository_lacks(hub):
    with pytest.raises(ModelNotFound, match=r"no file b\.gguf"):
        resolve("org/name:b.gguf")


@pytest.mark.parametrize("names", [(), ("config.json",), ("model.safetensors",)])
def test_repository_without_weights_or_config(hub, tmp_path, names):
    fill(tmp_path, *names)
    with pytest.raises(ModelNotFound, match=r"org/name:FILE\.gguf"):
        resolve("org/name")


def test_local_directory_goes_before_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    fill(tmp_path / "org" / "name", "config.json")
    assert resolve("org/name").path == Path("org/name")
    assert hub == []


@pytest.mark.parametrize(
    ("error", "ours", "message"),
    [
        (http_error(errors.RepositoryNotFoundError, "404"), ModelNotFound, "no repository org/name"),
        (errors.HFValidationError("bad"), ModelNotFound, "no repository org/name"),
        (http_error(errors.GatedRepoError, "403"), PullError, "hf auth login"),
        (errors.LocalEntryNotFoundError("no connection\nmore"), PullError, r"\(no connection\).*give its path"),
        (errors.OfflineModeIsEnabled("offline"), PullError, "could not be reached"),
        (ConnectionResetError("reset"), PullError, "could not be reached"),
        (OSError(errno.ENOSPC, "No space left"), DiskFull, "HF_HOME"),
    ],
)
def test_errors_become_ours(monkeypatch, error, ours, message):
    fail_with(monkeypatch, error)
    with pytest.raises(ours, match=message) as caught:
        resolve("org/name")
    assert caught.value.__cause__ is error


def test_not_in_the_cache_and_not_pulled(monkeypatch):
    fail_with(monkeypatch, errors.LocalEntryNotFoundError("not here"))
    with pytest.raises(ModelNotFound, match="quire pull org/name"):
        resolve("org/name", pull=False)


def test_alias_is_its_repository(hub, tmp_path):
    fill(tmp_path, "config.json", "model.safetensors")
    assert resolve("qwen3:0.6b") == ModelFiles("qwen3:0.6b", tmp_path, "directory", 4)
    assert pull("llama3.2:1b").path == tmp_path
    assert [repository for repository, _ in hub] == ["Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B-Instruct"]


def test_alias_is_not_downloaded_without_pull(hub, tmp_path):
    fill(tmp_path, "config.json", "model.safetensors")
    resolve("qwen3:0.6b", pull=False)
    assert all(options["local_files_only"] for _, options in hub)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"about 1,434 MiB\) with `quire pull qwen3:0\.6b`"):
        resolve("qwen3:0.6b", pull=False)


def test_gated_alias_says_how_to_log_in(monkeypatch):
    fail_with(monkeypatch, http_error(errors.GatedRepoError, "401"))
    page = r"https://huggingface\.co/meta-llama/Llama-3\.2-1B-Instruct"
    with pytest.raises(PullError, match=f"{page} and accept its terms.*hf auth login.*HF_TOKEN"):
        resolve("llama3.2:1b")


class TestHubCache:
    def test_repository_with_weights(self, hub, tmp_path):
        fill(tmp_path, "config.json", "model.safetensors")
        assert find_in_hub_cache("org/name") == tmp_path
        assert hub[0][1]["local_files_only"] is True

    def test_repository_that_is_not_there(self, hub, monkeypatch, tmp_path):
        fail_with(monkeypatch, errors.LocalEntryNotFoundError("not here"))
        assert find_in_hub_cache("org/name") is None
        monkeypatch.setattr(hub_module, "cache_folder", lambda repository: tmp_path / "absent")
        fail_with(monkeypatch, AssertionError("the hub's library is not needed"))
        assert find_in_hub_cache("org/name") is None

    def test_the_folder_is_where_the_hub_s_library_puts_it(self, monkeypatch, tmp_path):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        name = huggingface_hub.file_download.repo_folder_name(repo_id="org/some-name", repo_type="model")
        assert cache_folder("org/some-name") == tmp_path / name

    def test_interrupted_download_lacks_a_shard(self, hub, tmp_path):
        fill(tmp_path, "config.json", "1.safetensors")
        index = tmp_path / "model.safetensors.index.json"
        index.write_text('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}')
        assert find_in_hub_cache("org/name") is None
        fill(tmp_path, "2.safetensors")
        assert find_in_hub_cache("org/name") == tmp_path
        index.write_text("[]")
        assert find_in_hub_cache("org/name") is None


def test_bars_report_bytes_and_draw_nothing(capsys):
    calls = []
    bars = reporting_bars("org/name", lambda *call: calls.append(call))
    with bars(total=10, unit="B", desc="download") as bar:
        bar.update(4)
        bar.refresh()
    with bars(total=3, unit="it") as bar:
        bar.update(3)
        bar.refresh()
    assert ("fetching org/name", 4, 10) in calls
    assert all(total == 10 for _, _, total in calls)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
