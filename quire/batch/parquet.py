"""Parquet tables as input and output of a batch job. They need pyarrow: the extra `quire[parquet]`.

A row of an input table is the JSON object of its columns, without those that are null. A column with JSON in it, such
as `messages` or `body`, may be a text.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator
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

    def __iter__(self) -> Iterator[Any]:
        for batch in self._file.iter_batches(BATCH_ROWS):
            for row in batch.to_pylist():
                yield decode_columns({name: value for name, value in row.items() if value is not None})

    def survey(self) -> Survey:
        names = [name for name in ("custom_id", "id") if name in self._file.schema_arrow.names]
        digests = array("Q")
        if names:
            for batch in self._file.iter_batches(BATCH_ROWS, columns=names):
                for row in batch.to_pylist():
                    given = next((row[name] for name in names if row[name] is not None), len(digests))
                    digests.append(int.from_bytes(row_digest(str(given)), "little"))
        return Survey(self._file.metadata.num_rows, find_repeated(digests))


def decode_columns(row: dict[str, Any]) -> Any:
    for name in JSON_COLUMNS:
        if isinstance(row.get(name), str):
            try:
                row[name] = msgspec.json.decode(row[name])
            except msgspec.DecodeError as error:
                return ValueError(f"The column {name} is not JSON: {error}.")
    return row


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
