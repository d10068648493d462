"""Result: the JSON document of one `quire bench`, with a name. Reads files of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import InvalidParams

MAX_FILE_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    document: dict[str, Any]

    @property
    def bench(self) -> str:
        """What was measured: offline, serve, ..."""
        return str(self.document["bench"])


def read_result(path: Path) -> Result:
    """Read what `--json` printed. Raises InvalidParams if the file is none."""
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise InvalidParams(f"{path} has {size:,} bytes, more than a result may have ({MAX_FILE_BYTES:,}).")
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_constant)
    except OSError as error:
        raise InvalidParams(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise not_a_result(path, f"it is no JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("bench"), str):
        raise not_a_result(path, 'it has no field "bench"')
    return Result(path.stem, document)


def refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def not_a_result(path: Path | str, why: str) -> InvalidParams:
    return InvalidParams(f"{path} is not what quire bench --json prints ({why}). Measure again with --json.")


def unique_names(results: Sequence[Result]) -> list[Result]:
    """The same results. A name that an earlier one has gets a number."""
    named: list[Result] = []
    for result in results:
        count = sum(other.name.split(" (")[0] == result.name for other in named)
        named.append(Result(f"{result.name} ({count + 1})", result.document) if count else result)
    return named


def labelled(results: Sequence[Result], text: str, name: str) -> str:
    """A text with the name of its result, if there are several."""
    return f"{name}: {text}" if len(results) > 1 else text
