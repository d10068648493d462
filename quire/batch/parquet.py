"""Parquet tables as input and output of a batch job. They need pyarrow: the extra `quire[parquet]`.

A row of an input table is the JSON object of its columns, without those that are null. A column with JSON in it, such
as `messages` or `body`, may be a text.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from quire.batch.rows import Rows, Survey, find_repeated, row_digest
from quire.errors import InvalidParams

BATCH_ROWS = 4096
JSON_COLUMNS = ("body", "messages")


class ParquetRows(Rows):
    """The rows of a Parquet table, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = import_parquet().ParquetFile(path)
        except (OSError, ValueError) as error:
            raise InvalidParams(f"{path} cannot be read as a Parquet table: {error}.") from None

    def unfinished(self, finished: Sequence[int]) -> Iterator[tuple[int, Any]]:
        first = 0
        for batch in self._batches():
            left = [number for number in range(batch.num_rows) if not finished[first + number]]
            for number, row in zip(left, batch.take(left).to_pylist() if left else (), strict=True):
                yield first + number, decode_columns(row)
            first += batch.num_rows

    def survey(self) -> Survey:
        names = [name for name in ("custom_id", "id") if name in self._file.schema_arrow.names]
        digests = array("Q")
        if names:
            for batch in self._batches(names):
                for row in batch.to_pylist():
                    given = next((row[name] for name in names if row[name] is not None), len(digests))
                    digests.append(int.from_bytes(row_digest(str(as_json(given))), "little"))
        return Survey(self._file.metadata.num_rows, find_repeated(digests))

    def _batches(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        try:
            yield from self._file.iter_batches(BATCH_ROWS, columns=columns)
        except (OSError, ValueError) as error:
            raise InvalidParams(f"{self.path} cannot be read as a Parquet table: {error}.") from None


def decode_columns(columns: dict[str, Any]) -> Any:
    row = as_json(columns)
    for name in JSON_COLUMNS:
        if isinstance(row.get(name), str):
            try:
                row[name] = msgspec.json.decode(row[name])
            except msgspec.DecodeError as error:
                return ValueError(f"The column {name} is not JSON: {error}.")
    return row


def as_json(value: Any) -> Any:
    """A value of a table as JSON would have it: every row has the fields of all others, null, and a column of numbers
    with a null in it may have become one of floats.
    """
    if isinstance(value, dict):
        return {name: as_json(each) for name, each in value.items() if each is not None}
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return [as_json(each) for each in value] if isinstance(value, list) else value


def write_table(path: Path, answers: Iterable[bytes]) -> None:
    """A row an answer: `custom_id`, `status_code`, `text` of the first choice or null, `response` as JSON."""
    import_parquet()
    import pyarrow

    schema = pyarrow.schema(
        [
            ("custom_id", pyarrow.string()),
            ("status_code", pyarrow.int32()),
            ("text", pyarrow.string()),
            ("response", pyarrow.string()),
        ]
    )
    waiting = iter(answers)
    with import_parquet().ParquetWriter(path, schema) as writer:
        while lines := list(itertools.islice(waiting, BATCH_ROWS)):
            writer.write_table(pyarrow.Table.from_pylist([table_row(line) for line in lines], schema))


def table_row(line: bytes) -> dict[str, Any]:
    answer = msgspec.json.decode(line)
    response = answer["response"]
    return {
        "custom_id": answer["custom_id"],
        "status_code": response["status_code"],
        "text": first_text(response["body"]),
        "response": msgspec.json.encode(response["body"]).decode(),
    }


def first_text(body: dict[str, Any]) -> str | None:
    choices = body.get("choices")
    if not choices:
        return None
    text: str | None = choices[0]["message"]["content"] if "message" in choices[0] else choices[0]["text"]
    return text


def import_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise InvalidParams("Parquet needs pyarrow, which is not installed: pip install 'quire[parquet]'.") from None
    return pyarrow.parquet
