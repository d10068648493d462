"""Prints the Grafana dashboard of a quire server: python deploy/grafana/dashboard.py > deploy/grafana/quire.json

Import quire.json in Grafana (Dashboards, New, Import) and choose the Prometheus that scrapes the servers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
CHOSEN = 'job=~"$job", instance=~"$instance"'
WIDTH = 24  # of a dashboard, in columns
RATE = "$__rate_interval"


@dataclass(frozen=True)
class Query:
    """An expression and the name of its lines."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    title: str
    queries: Sequence[Query]
    unit: str = "short"
    about: str = ""
    kind: str = "timeseries"
    limit: float | None = None  # from which on a value is shown in red
    red_below: float | None = None
    least: float | None = 0
    most: float | None = None


def rate(metric: str, more: str = "") -> str:
    return f"rate({metric}{{{CHOSEN}{more}}}[{RATE}])"


def total(metric: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} ({rate(metric)})"


def quantile(share: float, histogram: str) -> str:
    return f"histogram_quantile({share}, sum by (le) ({rate(f'{histogram}_bucket')}))"


def quantiles(histogram: str, shares: Sequence[float] = (0.5, 0.9, 0.99)) -> list[Query]:
    return [Query(quantile(share, histogram), f"p{100 * share:g}") for share in shares]


def gauge(metric: str) -> str:
    return f"sum by (instance) ({metric}{{{CHOSEN}}})"


def ratio(part: str, whole: str, by: str = "") -> str:
    return f"{total(part, by)} / ({total(whole, by)} > 0)"


ROWS: dict[str, list[Panel]] = {
    "Now": [
        Panel("Engines ready", [Query(f"sum(quire_engine_ready{{{CHOSEN}}})", "")], kind="stat", red_below=1),
        Panel("Requests running", [Query(f"sum(quire_requests_running{{{CHOSEN}}})", "")], kind="stat"),
        Panel("Requests waiting", [Query(f"sum(quire_requests_waiting{{{CHOSEN}}})", "")], kind="stat", limit=16),
        Panel("Output tokens a second", [Query(total("quire_output_tokens_total"), "")], "short", kind="stat"),
        Panel("TTFT p99", [Query(quantile(0.99, "quire_time_to_first_token_seconds"), "")], "s", kind="stat", limit=1),
        Panel(
            "Cache in use",
            [Query(f"max(quire_kv_cache_use_ratio{{{CHOSEN}}})", "")],
            "percentunit",
            kind="stat",
            limit=0.95,
        ),
        Panel(
            "Restarts",
            [Query(f"sum(increase(quire_engine_restarts_total{{{CHOSEN}}}[$__range]))", "")],
            kind="stat",
            limit=1,
        ),
        Panel(
            "Failed",
            [Query(f'sum(increase(quire_requests_total{{{CHOSEN}, finish="error"}}[$__range])) or vector(0)', "")],
            kind="stat",
            limit=1,
        ),
    ],
    "Latency": [
        Panel(
            "Time to first token",
            quantiles("quire_time_to_first_token_seconds"),
            "s",
            "From a request's arrival to its first token.",
        ),
        Panel(
            "Time between tokens",
            quantiles("quire_inter_token_latency_seconds"),
            "s",
            "Between two tokens of an answer.",
        ),
        Panel("Whole request", quantiles("quire_request_seconds"), "s"),
    ],
    "Load": [
        Panel(
            "Requests",
            [
                Query(gauge("quire_requests_running"), "running {{instance}}"),
                Query(gauge("quire_requests_waiting"), "waiting {{instance}}"),
            ],
        ),
        Panel("Requests that ended, a second", [Query(total("quire_requests_total", "finish"), "{{finish}}")], "reqps"),
        Panel(
            "HTTP responses, a second", [Query(total("quire_http_responses_total", "status"), "{{status}}")], "reqps"
        ),
    ],
    "Tokens": [
        Panel(
            "Tokens a second",
            [
                Query(total("quire_output_tokens_total"), "output"),
                Query(total("quire_prompt_tokens_total"), "prompt"),
                Query(total("quire_cached_prompt_tokens_total"), "prompt, from the cache"),
            ],
        ),
        Panel(
            "Prompt tokens from the prefix cache",
            [Query(ratio("quire_cached_prompt_tokens_total", "quire_prompt_tokens_total"), "hit rate")],
            "percentunit",
            most=1,
        ),
        Panel(
            "Drafts that were right",
            [Query(ratio("quire_accepted_draft_tokens_total", "quire_draft_tokens_total", "source"), "{{source}}")],
            "percentunit",
            "Speculation: verified tokens that were accepted, by what proposed them.",
            most=1,
        ),
    ],
    "Engine": [
        Panel(
            "KV cache in use",
            [Query(f"quire_kv_cache_use_ratio{{{CHOSEN}}}", "{{instance}}")],
            "percentunit",
            most=1,
            limit=0.95,
        ),
        Panel(
            "Preemptions, a second",
            [
                Query(total("quire_preemptions_total"), "preempted"),
                Query(total("quire_swaps_total"), "of them swapped out"),
            ],
        ),
        Panel("A step", quantiles("quire_step_seconds", (0.5, 0.99)), "s", "Seconds of one step of the engine."),
        Panel(
            "Measured over predicted time of steps",
            [
                Query(
                    ratio("quire_measured_step_seconds_total", "quire_predicted_step_seconds_total"),
                    "measured / predicted",
                )
            ],
            "short",
            "Above 1 the engine is slower than its own cost of a step: other programs, or a cost that is out of date.",
        ),
        Panel(
            "Time that speculation gained",
            [Query(f"quire_speculation_gain_seconds{{{CHOSEN}}}", "{{instance}}")],
            "s",
            "Since the engine's start, minus what it lost.",
            least=None,
        ),
        Panel("Tokens that exited early, a second", [Query(total("quire_early_exit_tokens_total"), "tokens")]),
        Panel("Restarts of the engine", [Query(f"quire_engine_restarts_total{{{CHOSEN}}}", "{{instance}}")]),
    ],
}


def dashboard() -> dict[str, Any]:
    return {
        "uid": "quire",
        "title": "quire",
        "tags": ["quire", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "templating": {"list": variables()},
        "annotations": {"list": [restarts()]},
        "panels": panels(),
    }


def variables() -> list[dict[str, Any]]:
    labels = {
        "job": "label_values(quire_engine_ready, job)",
        "instance": 'label_values(quire_engine_ready{job=~"$job"}, instance)',
    }
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1}
    return [source, *(label_variable(name, query) for name, query in labels.items())]


def label_variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def restarts() -> dict[str, Any]:
    """Marks on all panels."""
    return {
        "name": "Restarts of the engine",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": f"changes(quire_engine_restarts_total{{{CHOSEN}}}[1m]) > 0",
        "titleFormat": "The engine was started again",
        "textFormat": "{{instance}}",
    }


def panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        height = 4 if row[0].kind == "stat" else 8
        columns = len(row) if row[0].kind == "stat" else 3
        made.append(
            {
                "id": len(made) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": place(0, y, WIDTH, 1),
            }
        )
        for number, panel in enumerate(row):
            width = WIDTH // columns
            position = place(number % columns * width, y + 1 + number // columns * height, width, height)
            made.append(show(panel, len(made) + 1, position))
        y += 1 + -(-len(row) // columns) * height
    return made


def place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def show(panel: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    is_stat = panel.kind == "stat"
    defaults: dict[str, Any] = {"unit": panel.unit, "thresholds": thresholds(panel)}
    if panel.least is not None:
        defaults["min"] = panel.least
    if panel.most is not None:
        defaults["max"] = panel.most
    if is_stat:
        options: dict[str, Any] = {
            "colorMode": "value",
            "graphMode": "area",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        }
    else:
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never", "spanNulls": False}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [target(query, chr(ord("A") + index)) for index, query in enumerate(panel.queries)],
    }


def thresholds(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.limit is not None:
        steps.append({"color": "red", "value": panel.limit})
    if panel.red_below is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.red_below}]
    return {"mode": "absolute", "steps": steps}


def target(query: Query, name: str) -> dict[str, Any]:
    return {
        "refId": name,
        "datasource": SOURCE,
        "expr": query.expression,
        "legendFormat": query.legend or "__auto",
        "range": True,
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
