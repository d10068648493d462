"""`quire bench batching` and `prefix`, and what a machine can do, on a tiny engine with random weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.bench import batching, prefix
from quire.bench.in_process import TimedRequest, answer, make_request
from quire.bench.report.build import build
from quire.bench.report.page import render
from quire.bench.report.result import Result
from quire.cli.bench.output import command_line, stamp
from quire.config import EngineConfig
from quire.engine import limits
from quire.engine.client import InProcess
from quire.errors import InvalidParams, PromptTooLong
from tests.engine.test_random_weights import MODEL

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def config(**options: object) -> EngineConfig:
    given = {"model": "m", "device": "cpu", "weights": "random", "kv_memory": 0.01, "speculate": "off"}
    return EngineConfig(**{**given, **options})


@pytest.fixture(scope="module")
def client(path: Path) -> InProcess:
    return InProcess(config(max_requests=4), path)


class TestAnswer:
    def requests(self, count: int, at_s: float | None = None) -> list[TimedRequest]:
        return [TimedRequest(at_s, make_request(f"{n}", [5, 6 + n], 3 + n)) for n in range(count)]

    def test_every_request_has_a_record_in_the_given_order(self, client):
        records = answer(client, self.requests(6, 0.0))
        assert [record.number for record in records] == list(range(6))
        assert [record.output_tokens for record in records] == [3, 4, 5, 6, 7, 8]
        for record in records:
            assert record.ok
            assert record.sent == record.due == 0.0
            assert 0 < record.times[0] <= record.times[-1] == record.ended
            assert len(record.times) == record.output_tokens

    def test_a_closed_loop_holds_at_most_so_many(self, client):
        most = 0

        class Counting(InProcess):
            def __init__(self) -> None:
                self._engine, self.info = client.engine, client.info

            def step(self):
                nonlocal most
                scheduler = self.engine.scheduler
                most = max(most, len(scheduler.running) + scheduler.num_waiting)
                return super().step()

        records = answer(Counting(), self.requests(7), concurrency=2)
        assert most == 2
        assert len(records) == 7
        assert records[2].sent >= min(records[0].ended, records[1].ended)

    def test_a_request_is_not_sent_before_its_time(self, client):
        timed = [TimedRequest(at_s, make_request(f"{at_s}", [5, 6], 2)) for at_s in (0.0, 0.05)]
        first, second = answer(client, timed)
        assert (first.sent, second.sent) == (0.0, 0.05)
        assert second.times[0] > 0.05

    def test_a_prompt_that_is_too_long_is_refused(self, client):
        with pytest.raises(PromptTooLong):
            answer(client, [TimedRequest(None, make_request("long", [5] * 500, 2))])


class TestBatching:
    LOAD = batching.Load(rate=500.0, num_requests=9, prompt_tokens=24, output_tokens=16)

    @pytest.fixture(scope="class")
    @classmethod
    def document(cls, path: Path) -> dict[str, object]:
        given = config(batching="dynamic", batch_size=3, max_requests=3, prefix_cache=False, itl_target_ms=0.0)
        return batching.run(given, path, cls.LOAD, repeats=2)

    def test_the_same_requests_with_the_same_answers(self, document):
        assert [run["batching"] for run in document["runs"]] == ["continuous", "dynamic", "static"]
        assert document["different"] == 0
        lengths = [[(r["prompt_tokens"], r["output_tokens"]) for r in run["requests"]] for run in document["runs"]]
        assert lengths[0] == lengths[1] == lengths[2]
        assert all(3 <= prompt <= 24 and 2 <= output <= 16 for prompt, output in lengths[0])
        assert all(run["summary"]["num_ok"] == 9 for run in document["runs"])

    def test_static_batches_wait_for_their_longest_request(self, document):
        """The prompts of a batch fit into one step, so its first tokens come together: when all before have ended."""
        static = next(run for run in document["runs"] if run["batching"] == "static")
        rows = sorted(static["requests"], key=lambda row: row["sent_s"])
        first = [row["sent_s"] + row["ttft_ms"] / 1e3 for row in rows]
        ends = [row["sent_s"] + row["e2e_ms"] / 1e3 for row in rows]
        starts = sorted(set(first))
        for start in starts[1:]:
            running = [n for n in range(len(rows)) if first[n] < start < ends[n]]
            assert not running

    def test_its_page(self, document):
        assert "Continuous batching" in render(build([Result("m", stamp("batching", document))]))

    @pytest.mark.parametrize(
        "wrong", [{"rate": 0.0}, {"rate": float("inf")}, {"num_requests": 0}, {"prompt_tokens": 0}]
    )
    def test_wrong_loads(self, wrong):
        given = {"rate": 1.0, "num_requests": 1, "prompt_tokens": 1, "output_tokens": 1}
        with pytest.raises(InvalidParams, match=f"--{next(iter(wrong)).replace('_', '-')} is"):
            batching.Load(**(given | wrong))


class TestPrefix:
    LOAD = prefix.Load((0.0, 0.5), 4, prompt_tokens=64, output_tokens=4, concurrency=1, turns=3, repeats=2)

    @pytest.fixture(scope="class")
    @classmethod
    def document(cls, path: Path) -> dict[str, object]:
        return prefix.run(config(max_requests=4), path, cls.LOAD)

    def test_hits_are_those_of_the_load(self, document):
        """Of four prompts of 64 tokens three find 32. A few tokens more are found where prompts agree by chance."""
        nothing, half = document["shared"]
        assert nothing["share"] == 0.0
        assert nothing["cached_tokens"] < 12
        assert (half["share"], half["prompt_tokens"]) == (0.5, 256)
        assert 3 * 32 <= half["cached_tokens"] < 3 * 32 + 12
        assert half["hit_rate"] == pytest.approx(half["cached_tokens"] / 256)

    def test_a_turn_finds_what_was_said_before(self, document):
        """A message has 21 tokens and an answer 4. Its last token is not in the cache."""
        assert [row["turn"] for row in document["turns"]] == [1, 2, 3]
        assert [row["prompt_tokens"] for row in document["turns"]] == [21, 46, 71]
        first, second, third = (row["cached_tokens"] for row in document["turns"])
        assert first < 4
        assert 16 <= second <= 25
        assert 48 <= third <= 50

    def test_answers_are_the_same_with_the_cache(self, document):
        assert document["different"] == 0

    def test_its_page(self, document):
        page = render(build([Result("m", stamp("prefix", document))]))
        assert "Conversations" in page

    @pytest.mark.parametrize("wrong", [{"shares": (1.5,)}, {"shares": (-0.1,)}, {"turns": 0}, {"repeats": 0}])
    def test_wrong_loads(self, wrong):
        given = dict.fromkeys(prefix.COUNTS, 1) | {"shares": (0.5,)}
        with pytest.raises(InvalidParams, match="give"):
            prefix.Load(**(given | wrong))


def test_medians_of_documents():
    rows = [{"a": {"b": 1}, "c": None}, {"a": {"b": 5}, "c": None}, {"a": {"b": 2}, "c": None}]
    assert prefix.median(rows) == {"a": {"b": 2}, "c": None}


class TestLimits:
    def test_what_the_engine_s_kernels_and_its_memory_do(self, client, path, monkeypatch):
        monkeypatch.setattr(limits, "BUDGET_S", 0.01)
        monkeypatch.setattr(limits, "BYTES_PER_THREAD", 1 << 20)
        monkeypatch.setattr(limits, "SIDE", 256)
        found = limits.measure_limits(config(), client.info, path)
        assert found.read_gb_per_s > 0
        assert found.gflop_per_s > 0
        assert "256 x 256" in found.products_by
        assert "1 MiB" in found.read_by

    def test_the_best_of_two_measurements(self):
        one, two = limits.Limits(1.0, 20.0, "r", "p"), limits.Limits(2.0, 10.0, "r", "p")
        assert one.best(two) == limits.Limits(2.0, 20.0, "r", "p")


class TestCommand:
    def test_a_key_is_not_in_a_result(self):
        for arguments in (["--api-key", "secret"], ["--api-key=secret"]):
            assert "secret" not in command_line(["bench", "serve", *arguments])
        assert command_line(["bench", "x", "--api-key", "k", "--rate", "2"]) == "quire bench x --api-key ... --rate 2"
        assert command_line(["a b"]) == "quire 'a b'"

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "quire.cli.main", "bench", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def test_offline_with_a_page(self, path, tmp_path):
        target = tmp_path / "page.html"
        engine = [str(path), "--weights", "random", "--device", "cpu", "--kv-memory", "0.01"]
        sizes = ["--batch", "1,2", "--prompt-tokens", "8", "--output-tokens", "4", "--repeats", "1"]
        done = self.run("offline", *engine, *sizes, "--json", "--html", str(target))
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["bench"] == "offline"
        assert document["command"].startswith("quire bench offline ")
        assert [row["batch"] for row in document["rows"]] == [1, 2]
        assert "Prefill" in target.read_text()

    @pytest.mark.parametrize(
        ("arguments", "part"),
        [
            (("offline", "--html", "/no/such/folder/x.html"), "a directory that exists"),
            (("offline", "--html", "/"), "a directory that exists"),
            (("batching", "--rate", "0"), "--rate is 0.0"),
            (("batching", "--batch-size", "0"), "--batch-size is 0"),
            (("prefix", "--shares", "a"), "--shares is 'a'"),
            (("prefix", "--shares", "2"), "A share is 2"),
            (("prefix", "--turns", "0"), "--turns is 0"),
        ],
    )
    def test_wrong_arguments(self, arguments, part):
        done = self.run(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert part in done.stderr
        assert "Traceback" not in done.stderr
