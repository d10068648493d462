"""The default model itself, fetched once into the user's cache."""

from __future__ import annotations

import pytest

from quire.config import DEFAULT_MODEL, cache_dir
from quire.store import list_models, resolve, verify

pytestmark = pytest.mark.model


def test_it_is_what_its_alias_says():
    files = resolve(DEFAULT_MODEL)
    assert files.path.is_relative_to(cache_dir())
    assert verify(DEFAULT_MODEL).path.read_bytes()[:4] == b"GGUF"
    assert [model.cached for model in list_models() if model.name == DEFAULT_MODEL] == [True]
