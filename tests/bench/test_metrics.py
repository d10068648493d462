"""Figures, from requests whose times are known."""

from __future__ import annotations

import json
import math
import statistics

import pytest

from quire.bench.serve.metrics import (
    UNFINISHED,
    RequestRecord,
    distribution,
    errors_by_kind,
    meets,
    parse_slo,
    peak_concurrency,
    percentile,
    summarize,
)
from quire.bench.serve.settings import Settings
from quire.errors import InvalidParams

pytestmark = pytest.mark.core


def record(number: int = 0, **more) -> RequestRecord:
    """Sent at 10 s, text at 10.5, 10.6 and 10.9, ended at 11; five tokens by the server's count."""
    fields = {"wanted_tokens": 5, "due": 9.99, "sent": 10.0, "ended": 11.0, "times": [10.5, 10.6, 10.9]}
    fields |= {"output_tokens": 5, "counted_by": "usage", "prompt_tokens": 7, "cached_tokens": 2, "num_chunks": 5}
    return RequestRecord(number=number, **{**fields, **more})


FAILED = {"times": [], "output_tokens": 0, "failure": "timeout", "detail": "too slow"}


def test_latencies_of_one_request():
    one = record()
    assert one.ttft_ms == pytest.approx(500)
    assert one.tpot_ms == pytest.approx(400 / 4)
    assert one.gaps_ms == pytest.approx([100, 300])
    assert one.e2e_ms == pytest.approx(1000)
    assert one.delay_ms == pytest.approx(10)


def test_one_token_has_no_time_per_token():
    one = record(times=[10.5], output_tokens=1)
    assert one.tpot_ms is None
    assert one.gaps_ms == []
    assert meets(one, {"tpot": 1.0, "ttft": 501.0})


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_percentiles_are_those_of_the_textbook(count):
    values = sorted((number * 7919 % 101) / 3 for number in range(count))
    assert percentile(values, 50) == pytest.approx(statistics.median(values))
    assert percentile(values, 0) == values[0]
    assert percentile(values, 100) == values[-1]
    if count > 2:
        nine_tenths = statistics.quantiles(values, n=10, method="inclusive")[-1]
        assert percentile(values, 90) == pytest.approx(nine_tenths)


def test_nothing_has_no_spread():
    assert distribution([None, None]) is None
    assert distribution([3.0, None, 1.0]) == {"mean": 2.0, "p50": 2.0, "p90": 2.8, "p99": 2.98, "max": 3.0}


def test_a_summary():
    records = [
        record(0),
        record(1, sent=12.0, ended=14.0, times=[12.2, 12.3], output_tokens=2, counted_by="chunks", prompt_tokens=None),
        record(2, sent=11.5, ended=15.0, **FAILED),
        record(3, sent=14.5, ended=15.0, **FAILED | {"failure": UNFINISHED}),
    ]
    summary = summarize(records, {"ttft": 300.0})
    assert summary["duration_s"] == 5.0
    assert (summary["num_ok"], summary["num_failed"], summary["num_unfinished"]) == (2, 1, 1)
    assert summary["num_short"] == 1
    assert (summary["prompt_tokens"], summary["cached_tokens"], summary["output_tokens"]) == (7, 4, 7)
    assert summary["requests_per_s"] == pytest.approx(2 / 5)
    assert summary["output_tokens_per_s"] == pytest.approx(7 / 5)
    assert summary["total_tokens_per_s"] == pytest.approx(14 / 5)
    assert summary["peak_concurrency"] == 2
    assert summary["ttft_ms"]["p50"] == pytest.approx(350)
    assert summary["itl_ms"]["mean"] == pytest.approx((100 + 300 + 100) / 3)
    assert summary["output_tokens_counted_by"] == {"usage": 1, "chunks": 1}
    assert summary["goodput"] == {"limits_ms": {"ttft": 300.0}, "num_met": 1, "requests_per_s": pytest.approx(1 / 5)}


def test_a_summary_of_nothing_is_still_json():
    summary = summarize([], {})
    assert json.loads(json.dumps(summary, allow_nan=False))["ttft_ms"] is None


def test_goodput_asks_for_every_limit():
    assert meets(record(), {"ttft": 500.1, "tpot": 100.1, "e2e": 1000.1})
    for name, limit in {"ttft": 499.0, "tpot": 99.0, "e2e": 999.0}.items():
        assert not meets(record(), {name: limit})
    assert not meets(record(**FAILED), {"tpot": 1e9})


def test_peak_concurrency_counts_overlap_only():
    one_after_another = [record(sent=float(start), ended=start + 1.0) for start in range(3)]
    assert peak_concurrency(one_after_another) == 1
    assert peak_concurrency([*one_after_another, record(sent=0.5, ended=2.5)]) == 2
    assert peak_concurrency([]) == 0


def test_errors_are_counted_by_kind():
    kinds = ["http_429", "timeout", "timeout", UNFINISHED]
    records = [record(**FAILED | {"failure": kind, "detail": f"{kind} {n}"}) for n, kind in enumerate(kinds)]
    assert errors_by_kind([record(), *records]) == {
        "timeout": {"count": 2, "first": "timeout 1"},
        "http_429": {"count": 1, "first": "http_429 0"},
    }


def test_limits():
    assert parse_slo("ttft:500,tpot:50.5,e2e:1e4") == {"ttft": 500.0, "tpot": 50.5, "e2e": 10000.0}
    for text in ("", "ttft", "ttft:", "ttft:-1", "ttft:nan", "ttft:inf", "itl:5", "ttft:1,ttft:2", "ttft:1;tpot:2"):
        with pytest.raises(InvalidParams, match="ttft:500"):
            parse_slo(text)


URL = {"base_url": "http://h", "seed": 1}


class TestSettings:
    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"base_url": None}, "--base-url URL, or --spawn"),
            ({"spawn": True}, "do not go together"),
            ({"base_url": None, "spawn": True, "api_key": "k"}, "--api-key changes nothing without --base-url"),
            ({"spawn_options": "--threads 1"}, "without --spawn"),
            ({"rate": 1.0, "concurrency": 2}, "--rate and --concurrency"),
            ({"rate": 0.0}, "--rate is 0"),
            ({"rate": math.nan}, "--rate is nan"),
            ({"burstiness": 2.0}, "without --rate"),
            ({"burstiness": 2.0, "rate": math.inf}, "changes nothing with --rate inf"),
            ({"trace_speed": 2.0}, "without --trace"),
            ({"trace": "t", "trace_speed": 2.0, "rate": 1.0}, "--trace-speed and --rate"),
            ({"trace": "t", "prompt_words": 3}, "--trace and --prompt-words"),
            ({"max_prompt_tokens": 5}, "without --trace"),
            ({"chat": True, "prompt_tokens": 5}, "--chat and --prompt-tokens"),
            ({"num_requests": 0}, "--num-requests is 0"),
            ({"timeout": 0.0}, "--timeout is 0"),
            ({"warmup": -1}, "--warmup is -1"),
            ({"temperature": -0.5}, "--temperature is -0.5"),
            ({"slo": "quick"}, "--slo is 'quick'"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
    )
    def test_what_cannot_be_is_refused(self, given, words):
        with pytest.raises(InvalidParams) as refusal:
            Settings(**{**URL, **given})
        assert words in str(refusal.value)

    def test_the_key_is_not_written_down(self):
        settings = Settings(**URL, api_key="secret", rate=math.inf)
        document = json.dumps(settings.to_dict(), allow_nan=False)
        assert "secret" not in document + repr(settings)
        assert json.loads(document)["rate"] == "inf"
