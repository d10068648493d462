"""Fields: values from a model's configuration, taken out one by one and never trusted.

A value that is missing, of the wrong type or out of range is a `BadModelFile` that names its key. The configuration
readers use it for JSON objects and for GGUF metadata alike; a value of None counts as absent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import BadModelFile, ModelNotFound, UnsupportedModel

MAX_COUNT = 2**31 - 1


class Fields:
    """A mapping with checked access. `where` names the file in messages, `prefix` is put before every key."""

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
        """A whole number. One that a file gives for each layer must be the same for all."""
        value = self._required(key, default)
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise self.unsupported(f"{self.prefix}{key} differs from layer to layer, which quire does not support.")
            value = value[0].item()
        if type(value) is not int or not least <= value <= most:
            raise self.bad(f"{self.prefix}{key} is {value!r}, and must be a whole number from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above zero."""
        value = self._required(key, default)
        fine = type(value) in (int, float) and value > 0 and value <= 1e30 and math.isfinite(value)
        if not fine:
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
        """An object inside this one."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.bad(f"{self.prefix}{key} is {value!r}, and must be an object")
        return Fields(value, f"{self.where}, {key}")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token, a list of them, or none."""
        value = self.get(key)
        tokens = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(token) is not int or not 0 <= token <= MAX_COUNT for token in tokens):
            raise self.bad(f"{self.prefix}{key} is {value!r}, and must be a token or a list of tokens")
        return tuple(tokens)


def check_heads(fields: Fields, num_heads: int, num_kv_heads: int) -> int:
    """The number of key-value heads, which queries must share evenly."""
    if num_heads % num_kv_heads:
        raise fields.bad(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly")
    return num_kv_heads


def share_of(hidden_size: int, num_heads: int) -> int | None:
    """A head's size where none is given; None where it does not follow, which is wrong only if it is needed."""
    return None if hidden_size % num_heads else hidden_size // num_heads


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file whose top level is an object."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelNotFound(f"{path.parent} has no {path.name}. Check that the model was downloaded whole.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadModelFile(f"{path} is not readable JSON: {error}. Download it again.") from None
    if not isinstance(content, dict):
        raise BadModelFile(f"{path} holds a {type(content).__name__} where an object should be. Download it again.")
    return content
