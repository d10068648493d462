"""The rows of a batch job: what a line becomes, ids, seeds and the order of execution."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.batch.job import WINDOW_ROWS, sort_windows
from quire.batch.rows import (
    CHAT,
    COMPLETIONS,
    BadRow,
    Row,
    RowDefaults,
    Rows,
    TextRows,
    file_digest,
    make_row,
    row_seed,
)
from quire.errors import InvalidParams

pytestmark = pytest.mark.cpu

DEFAULTS = RowDefaults("served", seed=3, params={"max_tokens": 9, "temperature": 0.5})


def row(raw, defaults=DEFAULTS):
    made = make_row(7, raw, defaults)
    assert isinstance(made, Row), made
    return made


def message(raw):
    made = make_row(7, raw, DEFAULTS)
    assert isinstance(made, BadRow)
    return made.message


def test_an_openai_batch_line():
    body = {"model": "gpt-x", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 4, "seed": 1}
    made = row({"custom_id": "a", "method": "POST", "url": CHAT, "body": body})
    assert (made.id, made.url) == ("a", CHAT)
    assert made.body == {**body, "model": "served", "temperature": 0.5}  # max_tokens would contradict its own limit


@pytest.mark.parametrize(
    ("raw", "url", "prompt"),
    [
        ("Once", COMPLETIONS, "Once"),
        ({"prompt": "Once", "id": 5}, COMPLETIONS, "Once"),
        ({"prompt": [1, 2, 3], "custom_id": "x"}, COMPLETIONS, [1, 2, 3]),
    ],
)
def test_plain_prompts(raw, url, prompt):
    made = row(raw)
    assert (made.url, made.body["prompt"]) == (url, prompt)
    assert made.body["seed"] == row_seed(3, made.id)
    assert made.body["max_tokens"] == 9
    assert "id" not in made.body
    assert "custom_id" not in made.body


def test_a_prompt_is_a_question_with_chat():
    made = row({"prompt": "Why?", "max_tokens": 3}, RowDefaults("m", chat=True))
    assert made.url == CHAT
    assert made.body["messages"] == [{"role": "user", "content": "Why?"}]
    assert "prompt" not in made.body
    assert row({"messages": [{"role": "user", "content": "Hi"}]}).url == CHAT


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (ValueError("The line is not JSON: x."), "not JSON"),
        (5, "give a JSON object"),
        (None, "give a JSON object"),
        ([1], "give a JSON object"),
        ({}, 'no "prompt"'),
        ({"body": 5}, "body is 5"),
        ({"url": "/v1/embeddings", "body": {}}, "/v1/embeddings"),
        ({"url": ["/v1/completions"], "body": {}}, "asks for"),
        ({"method": "GET", "url": CHAT, "body": {}}, "GET"),
        ({"prompt": "x", "stream": True}, "stream"),
        ({"url": CHAT, "body": {"messages": []}, "temperature": 0.5}, '"temperature" beside body'),
        ({"custom_id": True, "prompt": "x"}, "id is true"),
        ({"custom_id": "x" * 513, "prompt": "x"}, "512"),
        ({"custom_id": {}, "prompt": "x"}, "id is {}"),
    ],
)
def test_what_is_no_row(raw, part):
    assert part in message(raw)


def test_a_seed_depends_on_job_and_id_alone():
    assert row_seed(0, "a") == row_seed(0, "a")
    assert len({row_seed(seed, row_id) for seed in range(3) for row_id in "abc"}) == 9
    assert all(0 <= row_seed(seed, "\ud800") < 2**63 for seed in range(99))


def decoded(rows):
    return [raw for _, raw in rows.unfinished(bytes(rows.survey().num_rows))]


def test_lines_of_a_file(tmp_path: Path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n  \n"b"\r\n{"prompt": \n\xff\n[')
    assert decoded(Rows(path))[:2] == [{"prompt": "a"}, "b"]
    assert [type(one) for one in decoded(Rows(path))[2:]] == [ValueError] * 3


def test_lines_of_a_text_file(tmp_path: Path):
    path = tmp_path / "in.txt"
    path.write_bytes('{"a"\n\n\tzwölf \r\n{"id": "0"}\n'.encode() + b"\xff")
    assert decoded(TextRows(path))[:3] == ['{"a"', "\tzwölf ", '{"id": "0"}']
    assert isinstance(decoded(TextRows(path))[3], ValueError)
    assert not TextRows(path).survey().repeated  # a line that looks like a row with the id 0 is a prompt


@pytest.mark.parametrize("kind", [Rows, TextRows])
def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path, kind):
    path = tmp_path / "in"
    path.write_bytes(b'\xef\xbb\xbf"a"\n"b"\n')
    assert decoded(kind(path)) == (["a", "b"] if kind is Rows else ['"a"', '"b"'])
    path.write_bytes(b"\xef\xbb\xbf")
    assert decoded(kind(path)) == []


def test_finished_rows_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "in.jsonl"
    path.write_text('"a"\n\n"b"\n"c"\n')
    rows = Rows(path)
    monkeypatch.setattr(rows, "decode", lambda line: line.decode())
    assert list(rows.unfinished([1, 0, 1])) == [(1, '"b"')]
    assert list(rows.unfinished([0, 1])) == [(0, '"a"')]  # the third row was appended later


def test_ids_that_repeat(tmp_path: Path):
    ids = ["a", None, "b", "a", 1, "b", None, "6", 1.5, {"x": 1}]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"custom_id": one, "prompt": "x"}) + "\n" for one in ids))
    assert Rows(path).survey().repeated == {3, 4, 5, 7}  # rows 1 and 6 have their numbers as ids


def test_an_input_that_is_not_there(tmp_path: Path):
    with pytest.raises(InvalidParams, match="cannot be read"):
        Rows(tmp_path / "none.jsonl").survey()
    with pytest.raises(InvalidParams, match="cannot be read"):
        file_digest(tmp_path)


def test_shared_beginnings_run_together():
    prompts = [f"{index % 3} shared {index}" for index in range(WINDOW_ROWS + 10)]
    rows = [row({"prompt": prompt}) for prompt in prompts]
    order = list(sort_windows(iter([*rows[:5], BadRow(0, "0", ""), *rows[5:]])))
    beginnings = [one.body["prompt"][0] for one in order if isinstance(one, Row)][: WINDOW_ROWS - 1]
    assert beginnings == sorted(beginnings)
    assert len(order) == len(rows) + 1
