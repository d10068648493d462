"""The console's files: public, cached by their tags, and under a policy that allows nothing else."""

from __future__ import annotations

import re
import threading
import time

import httpx2
import pytest
import uvicorn

from quire.server.app import build_app
from quire.server.auth import ApiKeys
from quire.server.config import ServerConfig
from quire.server.console.page import FOLDER, has_tag
from quire.server.metrics import Metrics

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def http():
    """A server whose model is still being loaded, with a key."""
    app = build_app(ServerConfig(log_requests=False), ApiKeys({"name": "a-secret-key"}), Metrics())
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    with httpx2.Client(base_url=f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}") as client:
        yield client
    server.should_exit = True
    thread.join()


def test_the_page_needs_neither_a_key_nor_a_model(http):
    answer = http.get("/console")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert http.head("/console").headers["content-length"] == str(len(answer.content))


def test_its_data_needs_the_key(http):
    for path in ("/console/engine", "/console/plan"):
        assert http.get(path).status_code == 401
    assert http.post("/console/batching", json={}).status_code == 401
    assert http.post("/console/batching/run", json={}).status_code == 401


def test_every_file_that_is_named_is_there(http):
    """Names in the page, and what modules import."""
    named = set(re.findall(r'(?:href|src)="console/static/([^"]+)"', http.get("/console").text))
    for path in FOLDER.glob("*.js"):
        named |= set(re.findall(r'(?:from|import\()\s*"\./([^"]+)"', path.read_text()))
    assert len(named) > 12
    for name in named:
        assert http.get(f"/console/static/{name}").status_code == 200, name


def test_a_file_is_sent_once(http):
    first = http.get("/console/static/main.js")
    assert first.headers["content-type"].startswith("text/javascript")
    again = http.get("/console/static/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    other = http.get("/console/static/dom.js", headers={"if-none-match": first.headers["etag"]})
    assert other.status_code == 200


def test_tags_of_a_list_and_weak_ones_count():
    assert has_tag('"a", W/"b"', '"b"')
    assert not has_tag('"abc"', '"b"')
    assert not has_tag("", '"b"')


@pytest.mark.parametrize("path", ["/console", "/console/static/style.css"])
def test_the_policy_allows_only_files_of_this_server(http, path):
    policy = http.get(path).headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fpage.py", "%2e%2e%2fpage.py", "__init__.py", "a/b.js"])
def test_nothing_else_is_read(http, name):
    assert http.get(f"/console/static/{name}").status_code == 404


def test_nothing_in_the_files_is_inline_or_parses_markup():
    page = (FOLDER / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page)
    parsers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|https?://"
    for path in FOLDER.glob("*.js"):
        found = re.search(parsers, path.read_text())
        assert found is None, (path.name, found)
