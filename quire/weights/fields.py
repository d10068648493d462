"""Fields: checked access to the values of a model's configuration.

A value that is missing, of the wrong type or out of range raises `BadModelFile` with its key. The configuration readers
use it for JSON objects and for GGUF metadata. A value of None counts as missing.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import BadModelFile, ModelNotFound, UnsupportedModel

MAX_COUNT = 2**31 - 1


class Fields:
    """A mapping with checked access. `where` names the file in messages. `prefix` is prepended to every key."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values = values
        self.where = where
        self.prefix = prefix

    def bad(self, problem: str) -> BadModelFile:
        return BadModelFile(f"{self.where}: {problem}. Download the model again, or correct the file.")

    def unsupported(self, problem: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.where}: {problem}")

    def get(self, key: str) -> Any:
        return self.values.get(self.prefix + key)

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise self.bad(f"{self.prefix}{key} is missing")
        return value

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_COUNT) -> int:
        """A whole number. An array with a value for each layer must have equal values."""
        value = self._required(key, default)
        if isinstance(value, array):
            if len(set(value)) != 1:
                raise self.unsupported(f"{self.prefix}{key} differs from layer to layer, which quire does not support.")
            value = value[0]
        if type(value) is not int or not least <= value <= most:
            raise self.bad(f"{self.prefix}{key} is {value!r}, and must be a whole number from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above zero."""
        value = self._required(key, default)
        valid = type(value) in (int, float) and value > 0 and value <= 1e30 and math.isfinite(value)
        if not valid:
            raise self.bad(f"{self.prefix}{key} is {value!r}, and must be a number above 0")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.has(key) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self._required(key, default)
        if type(value) is not bool:
            raise self.bad(f"{self.prefix}{key} is {value!r}, and must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._required(key, default)
        if type(value) is not str:
            raise self.bad(f"{self.prefix}{key} is {value!r}, and must be a string")
        return value

    def section(self, key: str) -> Fields | None:
        """A nested object, or None if it is missing."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.bad(f"{self.prefix}{key} is {value!r}, and must be an object")
        return Fields(value, f"{self.where}, {key}")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them. Empty if the key is missing."""
        value = self.get(key)
        tokens = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(token) is not int or not 0 <= token <= MAX_COUNT for token in tokens):
            raise self.bad(f"{self.prefix}{key} is {value!r}, and must be a token id or a list of token ids")
        return tuple(tokens)


def check_heads(fields: Fields, num_heads: int, num_kv_heads: int) -> int:
    """Return `num_kv_heads` after a check that it divides `num_heads`."""
    if num_heads % num_kv_heads:
        raise fields.bad(f"{num_heads} attention heads are not a multiple of {num_kv_heads} key-value heads")
    return num_kv_heads


def default_head_dim(hidden_size: int, num_heads: int) -> int | None:
    """hidden_size / num_heads, or None if that is not a whole number: the file must then give a head size."""
    return None if hidden_size % num_heads else hidden_size // num_heads


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file whose top level is an object."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelNotFound(
            f"{path.parent} has no {path.name}. Check that the download of the model is complete."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadModelFile(f"{path} is not readable JSON: {error}. Download it again.") from None
    if not isinstance(content, dict):
        raise BadModelFile(f"{path} holds a {type(content).__name__} instead of an object. Download it again.")
    return content
