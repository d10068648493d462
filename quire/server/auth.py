"""Authentication: API keys, and the tenant of each.

Keys are stored as digests. The key of a request is compared with all of them, in constant time. The name of a tenant
appears in logs and in the queue. Its salt separates its prompts from those of other tenants in the prefix cache; salts
are secret and change with every start.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.errors import InvalidParams, show

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
MIN_KEY_CHARS = 8


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of an API key. Without keys there is one tenant, whose name is empty.

    An operator may take replicas out of use.
    """

    name: str = ""
    salt: bytes = b""
    is_operator: bool = False


class ApiKeys:
    """The API keys of a server. Without any, every request is accepted."""

    def __init__(self, keys: Mapping[str, str], operators: Collection[str] = ()) -> None:
        secret = secrets.token_bytes(32)
        self._tenants = [
            (digest(key), Tenant(name, hmac.digest(secret, name.encode(), "sha256"), name in operators))
            for name, key in keys.items()
        ]

    @property
    def required(self) -> bool:
        return bool(self._tenants)

    def authenticate(self, key: str | None) -> Tenant | None:
        """The tenant of a key. None if the key is wrong or missing."""
        if not self._tenants:
            return Tenant(is_operator=True)
        found = None
        given = digest(key or "")
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, given):
                found = tenant
        return found


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def load_api_keys(api_key: str | None, api_key_file: str | None, operators: str | None = None) -> ApiKeys:
    """The keys of the options: one key, or a file of lines `NAME KEY`. `#` begins a comment.

    The owner of the one key is an operator. Of a file's, those that `operators` names are.
    """
    if api_key is not None:
        return ApiKeys({"default": check_key("api_key", api_key)}, ["default"])
    if api_key_file is None:
        return ApiKeys({})
    try:
        lines = Path(api_key_file).read_text().splitlines()
    except OSError as error:
        raise InvalidParams(f"api_key_file {api_key_file} cannot be read: {error.strerror}.") from None
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"{api_key_file}, line {number}"
        words = line.split()
        if len(words) != 2 or not NAME.fullmatch(words[0]):
            raise InvalidParams(f"{where}: write a name (letters, digits, '.', '_', '-'), a space and the key.")
        if words[0] in keys:
            raise InvalidParams(f"{where}: the name {words[0]!r} occurs twice; rename one.")
        keys[words[0]] = check_key(where, words[1])
    if not keys:
        raise InvalidParams(
            f"api_key_file {api_key_file} has no key in it, so every request would be refused; add one."
        )
    named = [name.strip() for name in operators.split(",")] if operators is not None else []
    if unknown := [name for name in named if name not in keys]:
        raise InvalidParams(f"operators names {show(unknown[0])}, and {api_key_file} has no key of that name; add one.")
    return ApiKeys(keys, named)


def check_key(where: str, key: str) -> str:
    if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidParams(f"{where}: a key has at least {MIN_KEY_CHARS} printable ASCII characters and no spaces.")
    return key
