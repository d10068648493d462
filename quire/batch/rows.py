"""The rows of a batch job: OpenAI batch lines, plain prompts as JSON, or a text file with a prompt a line.

`Rows` and `TextRows` read a file from front to back. `make_row` turns one line into the request that answers it. A line
that cannot be used becomes a `BadRow`, whose answer is an error. `parquet.py` reads and writes Parquet files.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quire.errors import InvalidParams, show

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
URLS = (CHAT, COMPLETIONS)
ROW_FIELDS = ("custom_id", "id")  # of a plain prompt; its other fields are fields of the API
LINE_FIELDS = frozenset({*ROW_FIELDS, "method", "url", "body"})  # of a line of OpenAI's batch API
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_ID_CHARS = 512
READ_BYTES = 1 << 20

decode_json = msgspec.json.Decoder().decode
encode_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Row:
    """A request of the API. `sort_key` is the beginning of its prompt: rows that share it meet in the prefix cache."""

    index: int  # in the input, from 0 on
    id: str
    url: str
    body: dict[str, Any]
    sort_key: bytes


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is no request. Its answer is the error."""

    index: int
    id: str
    message: str


@dataclass(frozen=True, slots=True)
class RowDefaults:
    """What rows get that do not say it themselves."""

    model: str
    seed: int = 0  # of the job: each row draws its own from it
    chat: bool = False  # a plain text prompt is a question to the model
    params: Mapping[str, Any] = field(default_factory=dict)  # fields of the API


@dataclass(frozen=True, slots=True)
class Survey:
    """What a job knows of its rows before it reads them."""

    num_rows: int
    repeated: frozenset[int]  # rows with the id of an earlier row


class RowId(msgspec.Struct):
    """The fields of a line that may hold its id."""

    custom_id: str | int | None = None
    id: str | int | None = None


class Rows:
    """The JSON lines of a file that are not blank, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def unfinished(self, finished: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """The number of each row that is not finished, and the row: a ValueError says why a line does not decode.

        Rows that were appended to the file after `finished` was made are left out.
        """
        for (index, line), is_finished in zip(enumerate(self.lines()), finished, strict=False):
            if not is_finished:
                yield index, self.decode(line)

    def survey(self) -> Survey:
        """Count the rows, and find those whose id an earlier row has."""
        digests = array("Q")
        for index, line in enumerate(self.lines()):
            digests.append(int.from_bytes(row_digest(find_id(line, index)), "little"))
        return Survey(len(digests), find_repeated(digests))

    def lines(self) -> Iterator[bytes]:
        with open_input(self.path) as file:
            if file.read(len(BYTE_ORDER_MARK)) != BYTE_ORDER_MARK:
                file.seek(0)
            for line in file:
                if not line.isspace():
                    yield line.rstrip(b"\r\n")

    def decode(self, line: bytes) -> Any:
        try:
            return decode_json(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return ValueError(f"The line is not JSON: {error}.")


class TextRows(Rows):
    """The lines of a text file that are not blank: a prompt a line. Spaces at its ends are part of it."""

    def survey(self) -> Survey:
        return Survey(sum(1 for _ in self.lines()), frozenset())

    def decode(self, line: bytes) -> Any:
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            return ValueError(f"The line is not UTF-8 text: {error.reason} at byte {error.start}.")


def find_id(line: bytes, index: int) -> str:
    """The id of a line, without decoding the rest of it. The row's number if the line has none, or is no row."""
    try:
        found = decode_row_id(line)
    except (msgspec.DecodeError, RecursionError):
        return str(index)
    given = found.id if found.custom_id is None else found.custom_id
    return str(index if given is None else given)


def find_repeated(digests: array[int]) -> frozenset[int]:
    """The positions of values that an earlier position has."""
    values = np.frombuffer(digests, np.uint64)
    order = np.argsort(values, kind="stable")
    is_repeated = values[order][1:] == values[order][:-1]
    return frozenset(order[1:][is_repeated].tolist())


def open_input(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise InvalidParams(f"{path} cannot be read: {error.strerror}.") from None


decode_row_id = msgspec.json.Decoder(RowId).decode


def file_digest(path: Path) -> str:
    """The digest of a file's bytes. It tells a resumed job whether its input is the same."""
    state = hashlib.blake2b(digest_size=16)
    with open_input(path) as file:
        while data := file.read(READ_BYTES):
            state.update(data)
    return state.hexdigest()


def make_row(index: int, raw: Any, defaults: RowDefaults) -> Row | BadRow:
    """The request of a decoded line."""
    row_id = str(index)
    try:
        if isinstance(raw, ValueError):
            raise raw
        if isinstance(raw, str):
            raw = {"prompt": raw}
        if not isinstance(raw, dict):
            raise ValueError(f"The row is {show(raw)}; give a JSON object, or a text.")
        row_id = read_id(raw, index)
        url, body = read_batch_line(raw) if "body" in raw else read_plain(raw, defaults.chat)
        if body.get("stream"):
            raise ValueError("stream is set, but a row of a batch is answered at once; leave it out.")
        complete(body, row_id, defaults)
        return Row(index, row_id, url, body, encode_json(body.get("messages", body.get("prompt"))))
    except ValueError as error:
        return BadRow(index, row_id, str(error))


def read_id(raw: Mapping[str, Any], index: int) -> str:
    """The row's `custom_id` or `id`; its number if it has neither."""
    given = next((raw[name] for name in ROW_FIELDS if raw.get(name) is not None), index)
    if not isinstance(given, str | int) or isinstance(given, bool) or len(str(given)) > MAX_ID_CHARS:
        raise ValueError(f"The id is {show(given)}; give a text of at most {MAX_ID_CHARS} characters, or a number.")
    return str(given)


def read_batch_line(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The url and body of a line of OpenAI's batch API."""
    url, method, body = raw.get("url", CHAT), raw.get("method", "POST"), raw["body"]
    if url not in URLS or method != "POST":
        raise ValueError(f"The row asks for {show(method)} {show(url)}; a batch answers POST {' and '.join(URLS)}.")
    if not isinstance(body, dict):
        raise ValueError(f"body is {show(body)}; give a JSON object.")
    if unknown := sorted(raw.keys() - LINE_FIELDS):
        raise ValueError(f"{show(unknown[0])} beside body would have no effect; put it into body, or leave it out.")
    return url, dict(body)


def read_plain(raw: Mapping[str, Any], chat: bool) -> tuple[str, dict[str, Any]]:
    """The url and body of a row with `prompt` or `messages`, and fields of the API beside it."""
    body = {name: value for name, value in raw.items() if name not in ROW_FIELDS}
    if "messages" in body:
        return CHAT, body
    if "prompt" not in body:
        raise ValueError('The row has no "prompt", no "messages" and no "body"; give one of them.')
    if not chat:
        return COMPLETIONS, body
    question = {"role": "user", "content": body.pop("prompt")}
    return CHAT, {**body, "messages": [question]}


def complete(body: dict[str, Any], row_id: str, defaults: RowDefaults) -> None:
    """Add what the row does not say. A row's seed depends on the job's seed and on its id alone."""
    body["model"] = defaults.model
    if body.get("seed") is None:
        body["seed"] = row_seed(defaults.seed, row_id)
    has_limit = body.get("max_completion_tokens") is not None
    for name, value in defaults.params.items():
        if body.get(name) is None and not (name == "max_tokens" and has_limit):
            body[name] = value


def row_seed(seed: int, row_id: str) -> int:
    """63 bits that differ from row to row and from job to job."""
    return int.from_bytes(row_digest(f"{seed}/{row_id}"), "little") >> 1


def row_digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
