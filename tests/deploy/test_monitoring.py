"""The Grafana dashboard and Prometheus' rules, against the metrics that a server really has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire.core.request import Finish
from quire.server.metrics import SECONDS, Metrics

pytestmark = pytest.mark.cpu

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES, TEST_RULES = (DEPLOY / "prometheus" / name for name in ("quire_rules.yml", "quire_rules_test.yml"))
DASHBOARD = DEPLOY / "grafana" / "quire.json"
NAME = re.compile(r"(?<![\w:])quire_\w+(?=[\s\[{()]|$)")
RECORDED = re.compile(r"instance:quire_\w+:\w+")
LABEL = re.compile(r"(quire_\w+)\{([^}]*)\}")


def samples() -> dict[str, set[str]]:
    """The names of all series with their labels, after each counter has been used."""
    metrics = Metrics()
    for counter in (metrics.requests, metrics.drafted, metrics.accepted):
        counter.labels("x")
    metrics.responses.labels("x", "200")
    found: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


SAMPLES = samples()


def expressions(file: Path) -> list[str]:
    """All of PromQL in a file."""
    if file.suffix == ".json":
        panels = json.loads(file.read_text())["panels"]
        return [target["expr"] for panel in panels for target in panel.get("targets", ())]
    text = re.sub(r"#.*", "", file.read_text())
    found = re.findall(r"expr: (?:\|\n((?: {10,}.*\n)+)|(.*))", text)
    return [block or line for block, line in found]


@pytest.mark.parametrize("file", [RULES, DASHBOARD], ids=lambda file: file.name)
def test_every_metric_exists(file):
    found = {name for expression in expressions(file) for name in NAME.findall(expression)}
    assert len(found) > 10
    assert found - SAMPLES.keys() == set()


@pytest.mark.parametrize("file", [RULES, DASHBOARD], ids=lambda file: file.name)
def test_every_label_exists(file):
    seen = 0
    for expression in expressions(file):
        for name, selectors in LABEL.findall(expression):
            for label in re.findall(r"(\w+)\s*=", selectors):
                seen += 1
                assert label in SAMPLES[name] | {"job", "instance"}, f"{name}{{{selectors}}}"
    assert seen > 5


def test_recorded_series_that_are_used_are_recorded():
    text = RULES.read_text()
    recorded = set(re.findall(r"record: (\S+)", text))
    used = {name for expression in expressions(RULES) for name in RECORDED.findall(expression)}
    assert used
    assert used <= recorded


def test_values_of_labels_are_real():
    """The objective is a bucket of the histogram, and requests can finish that way."""
    text = RULES.read_text() + DASHBOARD.read_text().replace('\\"', '"')
    assert {float(bound) for bound in re.findall(r'le="([\d.]+)"', text)} <= {float(bound) for bound in SECONDS}
    assert set(re.findall(r'finish="(\w+)"', text)) <= {finish.value for finish in Finish}


def test_the_dashboard_is_what_its_script_prints():
    script = DASHBOARD.with_name("dashboard.py")
    printed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert DASHBOARD.read_text() == printed.stdout, "run deploy/grafana/dashboard.py > deploy/grafana/quire.json"


def test_panels_do_not_overlap_and_have_numbers_of_their_own():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("command", [("check", "rules", RULES), ("test", "rules", TEST_RULES)], ids=lambda c: c[0])
def test_rules_in_promtool(command):
    done = subprocess.run(["promtool", *map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
