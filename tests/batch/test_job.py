"""A batch job with answers that are made up: order, errors, resuming, and what must not be written."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pyarrow
import pytest
from pyarrow import parquet

from quire.batch.job import (
    JobFiles,
    JobReport,
    JobRun,
    check_output,
    check_unchanged,
    describe_job,
    model_digest,
    run_job,
    sort_windows,
    unfinished_rows,
)
from quire.batch.ledger import ENTRY, Ledger, identity, to_json, write_whole
from quire.batch.output import write_output
from quire.batch.parquet import ParquetRows, decode_columns
from quire.batch.rows import RowDefaults, Rows, file_digest
from quire.config import EngineConfig
from quire.errors import EngineError, InvalidParams

pytestmark = pytest.mark.cpu

DEFAULTS = RowDefaults("m")


class Echo:
    """Answers with the prompt, after a random number of turns of the event loop. Fails at the answer `fails_at`."""

    def __init__(self, seed: int, fails_at: int | None = None) -> None:
        self._random = random.Random(seed)
        self._fails_at = fails_at
        self.num_answers = 0
        self.num_open = self.most_open = 0

    async def post(self, path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        for _ in range(self._random.randrange(5)):
            await asyncio.sleep(0)
        self.num_open -= 1
        self.num_answers += 1
        if self.num_answers == self._fails_at:
            raise EngineError("gone")
        document = msgspec.json.decode(body)
        if document["prompt"] == "bad":
            return 400, b'{"error": {"message": "bad"}}'
        usage = {
            "prompt_tokens": 1,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": self.num_answers},
        }
        answer = {
            "id": request_id,
            "created": self.num_answers,
            "choices": [{"text": document["prompt"]}],
            "usage": usage,
        }
        return 200, msgspec.json.encode(answer | {"seed": document["seed"]})


def run(files: JobFiles, echo: Echo, *, resume: bool = False, workers: int = 4) -> JobReport:
    check_output(files)
    rows = Rows(files.input)
    survey = rows.survey()
    digest = file_digest(files.input)
    with Ledger.open(files.ledger, {"num_rows": survey.num_rows, "input": digest}, resume=resume) as ledger:
        report = JobReport(survey.num_rows, ledger.num_finished)
        waiting = unfinished_rows(rows, survey.repeated, ledger.finished, DEFAULTS)
        try:
            asyncio.run(JobRun(echo, ledger, report, None).answer_rows(sort_windows(waiting), workers))
        except EngineError:
            return report
        check_unchanged(files, ledger, digest)
        ledger.complete(write_output(files.output, ledger.answers()), files.output)
    return report


@pytest.fixture
def files(tmp_path: Path) -> JobFiles:
    prompts = [*(f"prompt {index % 7} {index}" for index in range(60)), "bad"]
    lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
    lines[5:5] = ["{", '{"custom_id": "0", "prompt": "again"}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    return JobFiles(tmp_path / "in.jsonl", tmp_path / "out.jsonl")


def test_every_row_has_its_answer_in_its_place(files):
    report = run(files, Echo(1))
    answers = [json.loads(line) for line in files.output.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [*map(str, range(6)), "0", *map(str, range(7, 63))]
    codes = [answer["response"]["status_code"] for answer in answers]
    assert [index for index, code in enumerate(codes) if code != 200] == [5, 6, 62]
    assert answers[7]["response"]["body"]["choices"] == [{"text": "prompt 5 5"}]
    assert "not JSON" in answers[5]["response"]["body"]["error"]["message"]
    assert "earlier row" in answers[6]["response"]["body"]["error"]["message"]
    assert (report.num_rows, report.num_errors, report.prompt_tokens, report.completion_tokens) == (63, 3, 60, 120)
    assert not files.ledger.exists()


def test_the_output_depends_on_the_rows_alone(files, tmp_path):
    run(files, Echo(1))
    for seed, workers in ((2, 1), (3, 16)):
        other = replace(files, output=tmp_path / f"{seed}.jsonl")
        echo = Echo(seed)
        run(other, echo, workers=workers)
        assert other.output.read_bytes() == files.output.read_bytes()
        assert echo.most_open == workers


def test_a_job_that_fails_again_and_again_ends_with_the_same_output(files, tmp_path):
    run(files, Echo(1))
    other = replace(files, output=tmp_path / "other.jsonl")
    answered = 0
    for attempt in range(100):
        echo = Echo(attempt, fails_at=5)
        report = run(other, echo, resume=attempt > 0)
        answered += echo.num_answers
        if other.output.exists():
            break
    assert report.num_resumed > 30
    assert other.output.read_bytes() == files.output.read_bytes()
    assert answered < 61 + attempt * 5  # what was finished is not answered again


def test_outputs_and_ledgers_that_are_there(files):
    files.output.write_text("mine")
    with pytest.raises(InvalidParams, match="exists already"):
        run(files, Echo(1))
    assert files.output.read_text() == "mine"
    files.output.unlink()
    run(files, Echo(1, fails_at=3))
    with pytest.raises(InvalidParams, match="--resume"):
        run(files, Echo(1))
    with pytest.raises(InvalidParams, match="not a directory"):
        run(replace(files, output=files.output / "x" / "out.jsonl"), Echo(1))


def test_a_job_is_described_by_what_decides_its_answers(files, tmp_path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"1234")
    engine = EngineConfig(model=str(model))

    def describe(engine=engine, defaults=DEFAULTS):
        return describe_job(files.input, 63, engine, model, defaults)

    assert describe() == describe(replace(engine, max_requests=3, threads=1, speculate="off"))
    assert describe() != describe(replace(engine, kv_dtype="int8"))
    assert describe() != describe(defaults=RowDefaults("m", seed=1))
    assert describe() != describe(defaults=RowDefaults("m", params={"max_tokens": 3}))
    assert json.loads(json.dumps(describe())) == describe()
    before = describe()
    files.input.write_text(files.input.read_text() + "\n")
    assert describe()["input"] != before["input"]


def test_a_full_disk_leaves_a_job_that_can_go_on(files, monkeypatch):
    def full(file, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("quire.batch.output.write_lines", full)
        with pytest.raises(OSError, match="No space"):
            run(files, Echo(1))
    assert not files.output.exists()
    echo = Echo(2)
    run(files, echo, resume=True)
    assert echo.num_answers == 0
    assert not files.ledger.exists()
    assert len(files.output.read_text().splitlines()) == 63


@pytest.mark.parametrize("text", ["", '"a"\n', '"other"\n' * 63])
def test_an_input_that_changes_while_the_job_runs(files, text):
    class Changing(Echo):
        async def post(self, path, body, request_id):
            files.input.write_text(text)
            return await super().post(path, body, request_id)

    before = files.input.read_text()
    with pytest.raises(InvalidParams, match="has changed"):
        run(files, Changing(1))
    assert not files.output.exists()
    files.input.write_text(before)
    run(files, Echo(1), resume=True)
    assert len(files.output.read_text().splitlines()) == 63


def test_an_answer_is_on_the_disk_before_the_next_one_comes(files, monkeypatch):
    """The last answer takes long. Those before it do not wait for it in memory."""
    monkeypatch.setattr("quire.batch.job.FLUSH_S", 0.01)
    index = files.ledger / "index"

    class Slow(Echo):
        async def post(self, path, body, request_id):
            if self.num_answers == 60:
                async with asyncio.timeout(10):
                    while index.stat().st_size < 62 * ENTRY.itemsize:  # two of the rows are bad ones
                        await asyncio.sleep(0.005)
            return await super().post(path, body, request_id)

    run(files, Slow(1), workers=1)
    assert files.output.exists()


def test_random_ids_of_tool_calls_are_replaced(files):
    calls = iter(range(1000))

    class Caller(Echo):
        async def post(self, path, body, request_id):
            message = {"tool_calls": [{"id": f"call_{next(calls)}"} for _ in range(2)]}
            return 200, msgspec.json.encode({"choices": [{"index": 0, "message": message}]})

    outputs = []
    for name in ("a", "b"):
        run(replace(files, output=files.output.with_name(name)), Caller(1))
        outputs.append(files.output.with_name(name).read_text())
    assert outputs[0] == outputs[1]
    choices = [json.loads(text)["response"]["body"].get("choices", []) for text in outputs[0].splitlines()]
    ids = [call["id"] for row in choices for choice in row for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == len(ids) == 122


def test_a_job_that_was_killed_after_its_output_was_written(files):
    """All that is left to do is to delete the ledger; the model is not needed."""
    run(files, Echo(1, fails_at=50))
    partial = files.output.with_name("partial")
    partial.write_text("the answers")
    write_whole(files.ledger / "written", to_json(identity(partial)))
    partial.replace(files.output)
    report = run_job(files, EngineConfig(), files.input.parent / "no model", DEFAULTS, resume=True)
    assert (report.num_rows, report.num_resumed) == (63, 63)
    assert not files.ledger.exists()
    assert files.output.read_text() == "the answers"


def test_values_of_a_table_become_those_of_json():
    body = {
        "messages": [{"role": "user", "content": "a", "name": None}],
        "stop": None,
        "logit_bias": {"5": 1, "6": None},
    }
    row = decode_columns({"custom_id": "a", "url": None, "body": body})
    limits = decode_columns({"max_tokens": 4.0, "temperature": 0.5, "top_p": float("nan")})
    assert repr(limits["max_tokens"]) == "4"  # and not 4.0, which is no number of tokens
    assert limits["temperature"] == 0.5
    assert row == {"custom_id": "a", "body": {"messages": [{"role": "user", "content": "a"}], "logit_bias": {"5": 1}}}


def test_models_are_told_apart(tmp_path):
    (tmp_path / "m").mkdir()
    first = tmp_path / "m" / "model.gguf"
    first.write_bytes(bytes(3_000_000))
    assert model_digest(tmp_path / "m") == model_digest(first)
    data = bytearray(first.read_bytes())
    data[1_500_000:1_520_000] = b"x" * 20_000
    same = model_digest(first)
    first.write_bytes(bytes(data))
    assert model_digest(first) != same


def test_ids_of_a_table_that_repeat(tmp_path):
    """A column of numbers with a null in it is one of floats; its ids are those of whole numbers."""
    table = pyarrow.table({"id": [4.0, None, 1.0, 4.0], "prompt": ["a", "b", "c", "d"]})
    parquet.write_table(table, tmp_path / "in.parquet")
    rows = ParquetRows(tmp_path / "in.parquet")
    survey = rows.survey()
    assert (survey.num_rows, survey.repeated) == (4, {2, 3})  # the second row's id is its number
    found = list(unfinished_rows(rows, survey.repeated, [1, 0, 0, 0], DEFAULTS))
    assert [(row.index, row.id) for row in found] == [(1, "1"), (2, "1"), (3, "4")]
