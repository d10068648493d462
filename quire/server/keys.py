"""Who may ask: API keys, and the tenant that each stands for.

Keys are kept as digests and compared in constant time, all of them for every request. A tenant's name goes into logs
and the queue; its salt, secret and new with every start, keeps its prompts apart from others' in the prefix cache.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.errors import InvalidParams

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
MIN_KEY_CHARS = 8


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a request is made."""

    tenant: str = ""
    salt: bytes = b""


class Keys:
    """The keys of a server; without any, everyone is the same caller."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        secret = secrets.token_bytes(32)
        self._callers = [
            (digest(key), Caller(name, hmac.digest(secret, name.encode(), "sha256"))) for name, key in keys.items()
        ]

    @property
    def required(self) -> bool:
        return bool(self._callers)

    def find(self, key: str | None) -> Caller | None:
        """The caller with that key; None if there is none."""
        if not self._callers:
            return Caller()
        found = None
        given = digest(key or "")
        for known, caller in self._callers:
            if hmac.compare_digest(known, given):
                found = caller
        return found


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def read_keys(api_key: str | None, api_key_file: str | None) -> Keys:
    """From the options: one key, or a file with a line `NAME KEY` each; `#` begins a comment."""
    if api_key is not None:
        return Keys({"default": check_key("api_key", api_key)})
    if api_key_file is None:
        return Keys({})
    try:
        lines = Path(api_key_file).read_text().splitlines()
    except OSError as error:
        raise InvalidParams(f"api_key_file {api_key_file} cannot be read: {error.strerror}.") from None
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"{api_key_file}, line {number}"
        parts = line.split()
        if len(parts) != 2 or not NAME.fullmatch(parts[0]):
            raise InvalidParams(f"{where}: write a name (letters, digits, '.', '_', '-'), a space and the key.")
        if parts[0] in keys:
            raise InvalidParams(f"{where}: the name {parts[0]!r} is there twice.")
        keys[parts[0]] = check_key(where, parts[1])
    if not keys:
        raise InvalidParams(f"api_key_file {api_key_file} holds no key; nobody could ask anything.")
    return Keys(keys)


def check_key(where: str, key: str) -> str:
    if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidParams(f"{where}: a key has at least {MIN_KEY_CHARS} printable ASCII characters and no spaces.")
    return key
