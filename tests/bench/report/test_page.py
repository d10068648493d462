"""Whole pages: what they contain, what a browser may do with them, and what is no result."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from quire.bench.report.build import build, build_from_files
from quire.bench.report.page import render
from quire.bench.report.result import Result, read_result
from quire.errors import InvalidParams
from tests.bench.report import documents

pytestmark = pytest.mark.core

MAX_BYTES = 300_000
SVG = re.compile(r"<svg.*?</svg>", re.DOTALL)


class Page(HTMLParser):
    """Tags, attributes and texts of a page. Tags that are not closed in order fail."""

    VOID = ("meta", "rect", "circle", "path", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


def page(*results):
    return render(build([Result(name, document) for name, document in results]))


@pytest.mark.parametrize("bench", documents.ALL)
def test_every_kind_has_a_page(bench):
    text = page(("m", documents.ALL[bench]))
    read = Page(text)
    assert f"{bench}: m" in read.words
    assert "A CPU" in read.words
    charts = SVG.findall(text)
    assert len(charts) >= 4
    for chart in charts:
        root = ElementTree.fromstring(chart)
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        assert root.attrib["aria-label"]
        for shape in root.iter():
            for name, limit in (("x", width), ("y", height), ("cx", width), ("cy", height)):
                assert -1 <= float(shape.attrib.get(name, 0)) <= limit + 1, (shape.tag, shape.attrib)
    assert len(text.encode()) < MAX_BYTES


@pytest.mark.parametrize("bench", documents.ALL)
def test_two_results_of_a_kind_are_compared(bench):
    document = documents.ALL[bench]
    text = page(("before", document), ("after", document), ("before", document))
    words = Page(text).words
    for name in ("before", "after", "before (2)"):
        assert name in words


def test_results_of_all_kinds_on_one_page():
    words = Page(page(*documents.ALL.items())).words
    for title in (
        "Speed of the engine alone",
        "A server under load",
        "Batching",
        "Conversations",
        "Prefill and decode",
    ):
        assert title in words


def test_a_page_loads_nothing_and_runs_its_own_script_only():
    text = page(("m", documents.serve()))
    policy = next(
        value for tag, name, value in Page(text).attributes if (tag, name) == ("meta", "content") and "src" in value
    )
    assert policy.startswith("default-src 'none';")
    for tag in ("style", "script"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not [
        name for _, name, _ in Page(text).attributes if name in ("src", "href", "style") or name.startswith("on")
    ]
    assert not re.search(r"url\(|@import|https?://(?!h/)", text)


HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


def test_nothing_in_a_result_becomes_markup():
    document = documents.serve(failed=3) | {"model": HOSTILE, "url": HOSTILE, "load": HOSTILE, "command": HOSTILE}
    read = Page(page((HOSTILE, document), ("b", documents.serve())))
    assert read.words.count("alert(1)") > 4
    assert not [tag for tag, _, _ in read.attributes if tag == "img"]
    assert "alert" not in re.findall(r"<script>(.*?)</script>", page((HOSTILE, document)), re.DOTALL)[-1]
    assert page((HOSTILE, document)).count("<script>") == 1


def test_a_long_run_stays_small():
    """Three thousand requests with a hundred tokens each."""
    text = page(("m", documents.serve(3000, 100)))
    assert len(text.encode()) < MAX_BYTES
    assert "The first 400 of 3,000 requests." in text


def test_several_long_runs_share_a_page():
    long = documents.serve(1500, 40)
    text = page(*((f"m{number}", long) for number in range(4)))
    assert len(text.encode()) < MAX_BYTES
    assert text.count("The first 100 of 1,500 requests.") == 4


def test_a_server_without_rows_of_requests_has_tables():
    document = documents.serve()
    del document["requests"]
    words = Page(page(("m", document))).words
    assert "--json-requests" in words
    assert "TTFT, time to first token" in words


def test_failed_requests_are_marked_and_listed():
    text = page(("m", documents.serve(failed=3)))
    assert text.count('class="bar bad"') == 3
    assert "http_500" in Page(text).words


def test_a_simulation_is_drawn_with_what_was_measured():
    words = Page(page(("m", documents.simulate()))).words
    assert "Simulated and measured" in words
    assert "+10.0%" in words
    charts = [
        chart
        for chart in SVG.findall(page(("m", documents.simulate())))
        if "simulated" in chart and "measured" in chart
    ]
    assert len(charts) == 4
    assert "quire simulate: m" in words


def test_the_limit_of_an_slo_is_drawn_where_it_belongs():
    charts = SVG.findall(page(("m", documents.serve())))
    drawn = [re.findall('aria-label="([^"]*)"', chart)[0] for chart in charts if "limit, 150 ms" in chart]
    assert drawn == ["TTFT, time to first token"]


def test_all_requests_failed():
    document = documents.serve(4, failed=4)
    assert document["summary"]["ttft_ms"] is None
    Page(page(("m", document)))


def test_the_result_is_on_the_page_as_json():
    document = documents.offline(1, 8)
    (shown,) = re.findall(r"<pre>(.*?)</pre>", page(("m", document)), re.DOTALL)
    assert json.loads(shown.replace("&quot;", '"')) == document


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("[1]", 'no field "bench"'),
        ('{"bench": 3}', 'no field "bench"'),
        ('{"bench": "offline", "rows": NaN}', "NaN is no number"),
        ('{"bench": "cooking"}', "not one of offline"),
        ('{"bench": "offline"}', "KeyError"),
        (json.dumps(documents.offline(1) | {"rows": 5}), "TypeError"),
        (json.dumps(documents.offline(1) | {"rows": []}), "IndexError"),
        (json.dumps(documents.offline(1) | {"time": 7}), "AttributeError"),
        ("\x00", "it is no JSON"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path, content, part):
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(InvalidParams, match=re.escape(part)):
        build_from_files([read_result(path)])


@pytest.mark.parametrize("number", [1e308, -1.0, 0, 1e-300])
def test_absurd_numbers_make_a_page(number):
    document = documents.offline(1, 2)
    for row in document["rows"]:
        row["ttft_ms"] = number
    Page(render(build_from_files([Result("m", document)])))


def run(*arguments):
    command = [sys.executable, "-m", "quire.cli.main", "report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(documents.offline(1)))
    target = tmp_path / "page.html"
    done = run(tmp_path / "a.json", tmp_path / "b.json", "--html", target)
    assert (done.returncode, done.stdout) == (0, "")
    assert f"Wrote {target}" in done.stderr
    assert "b: 1" in Page(target.read_text()).words
    done = run(tmp_path / "c.json", "--html", target)
    assert (done.returncode, "cannot be read" in done.stderr) == (2, True)
    done = run(tmp_path / "a.json", "--html", tmp_path / "no" / "page.html")
    assert (done.returncode, "a directory that exists" in done.stderr) == (2, True)
