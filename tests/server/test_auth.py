"""Who a key belongs to, and who of them may take replicas out of use."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from quire.errors import Forbidden, InvalidParams
from quire.server.auth import ApiKeys, load_api_keys
from quire.server.config import ServerConfig
from quire.server.replicas import operated_fleet

pytestmark = pytest.mark.cpu


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("ann ann-has-this-key\nbob bob-has-this-key\n")
    return str(path)


def test_who_is_an_operator(key_file):
    assert load_api_keys(None, None).authenticate(None).is_operator
    assert load_api_keys("only-one-key", None).authenticate("only-one-key").is_operator
    keys = load_api_keys(None, key_file)
    assert not any(keys.authenticate(f"{name}-has-this-key").is_operator for name in ("ann", "bob"))
    keys = load_api_keys(None, key_file, " bob")
    assert [keys.authenticate(f"{name}-has-this-key").is_operator for name in ("ann", "bob")] == [False, True]
    assert keys.authenticate("nobody-has-this-key") is None


def test_operators_have_keys(key_file):
    with pytest.raises(InvalidParams, match=r"eve.*has no key"):
        load_api_keys(None, key_file, "ann,eve")
    with pytest.raises(InvalidParams, match="operators are names"):
        ServerConfig(operators="ann")


def test_others_are_refused():
    context = SimpleNamespace(tenant=ApiKeys({"ann": "a-key-of-hers"}).authenticate("a-key-of-hers"), service=None)
    context.service = SimpleNamespace(client=None, model="tiny")
    with pytest.raises(Forbidden, match="--operators ann"):
        operated_fleet(SimpleNamespace(scope={"quire": context}))
