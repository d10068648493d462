"""The record of each request, and the metrics of a run. Plain numbers in, plain documents out.

    TTFT   from sending to the first text              ITL   between two chunks with text, all requests together
    TPOT   (last text - first text) / (tokens - 1)     E2E   from sending to the end of the stream

Sending includes opening a connection. Latencies are those of requests that succeeded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from quire.errors import InvalidParams

UNITS_MS = {"ms": 1.0, "s": 1e3}
UNFINISHED = "unfinished"  # kind of failure: still running when the measurement was stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request. Times are seconds on one clock. `due`: the planned time of sending, in an open loop."""

    number: int
    wanted_tokens: int
    due: float | None
    sent: float
    ended: float
    times: Sequence[float] = ()
    output_tokens: int = 0
    counted_by: Literal["usage", "chunks"] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    num_chunks: int = 0
    failure: str | None = None
    detail: str | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def ttft_ms(self) -> float | None:
        return 1e3 * (self.times[0] - self.sent) if self.times else None

    @property
    def tpot_ms(self) -> float | None:
        if not self.times or self.output_tokens < 2:
            return None
        return 1e3 * (self.times[-1] - self.times[0]) / (self.output_tokens - 1)

    @property
    def e2e_ms(self) -> float:
        return 1e3 * (self.ended - self.sent)

    @property
    def gaps_ms(self) -> list[float]:
        return [1e3 * (later - earlier) for earlier, later in pairwise(self.times)]

    @property
    def delay_ms(self) -> float | None:
        """The delay of sending against the plan."""
        return None if self.due is None else 1e3 * (self.sent - self.due)

    def to_dict(self, begin: float) -> dict[str, Any]:
        return {
            "number": self.number,
            "sent_s": self.sent - begin,
            "send_delay_ms": self.delay_ms,
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "e2e_ms": self.e2e_ms,
            "itl_ms": self.gaps_ms,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "wanted_tokens": self.wanted_tokens,
            "counted_by": self.counted_by,
            "error": self.failure,
            "detail": self.detail,
        }


LATENCIES: dict[str, Callable[[RequestRecord], float | None]] = {
    "ttft": lambda record: record.ttft_ms,
    "tpot": lambda record: record.tpot_ms,
    "e2e": lambda record: record.e2e_ms,
}


def parse_slo(text: str) -> dict[str, float]:
    """From "ttft:500,tpot:50" or "ttft=0.5s,tpot=50ms" to milliseconds by name. A number without a unit is of them."""
    limits: dict[str, float] = {}
    for entry in text.split(","):
        name, _, value = entry.replace("=", ":").partition(":")
        unit = next((unit for unit in UNITS_MS if value.endswith(unit)), "")
        try:
            limit = float(value.removesuffix(unit)) * UNITS_MS.get(unit, 1.0)
        except ValueError:
            limit = math.nan
        if name not in LATENCIES or name in limits or not 0 < limit < math.inf:
            raise InvalidParams(
                f"--slo is {text!r}; give milliseconds for each of {', '.join(LATENCIES)} that matters, once, such as "
                "ttft:500,tpot:50 or ttft=1s,tpot=50ms."
            )
        limits[name] = limit
    return limits


def meets(record: RequestRecord, limits: Mapping[str, float]) -> bool:
    """True if a request succeeded within all limits. An answer of one token has no TPOT."""
    return record.ok and all((LATENCIES[name](record) or 0.0) <= limit for name, limit in limits.items())


def summarize(records: Sequence[RequestRecord], limits: Mapping[str, float]) -> dict[str, Any]:
    """All metrics of a run. Rates are over the time from the first sending to the last end."""
    good = [record for record in records if record.ok]
    begin = min((record.sent for record in records), default=0.0)
    duration_s = max((record.ended for record in records), default=begin) - begin
    output_tokens = sum(record.output_tokens for record in good)
    prompt_tokens = sum(record.prompt_tokens or 0 for record in good)
    num_met = sum(meets(record, limits) for record in records)
    return {
        "duration_s": duration_s,
        "num_requests": len(records),
        "num_ok": len(good),
        "num_failed": sum(not record.ok and record.failure != UNFINISHED for record in records),
        "num_unfinished": sum(record.failure == UNFINISHED for record in records),
        "num_short": sum(record.output_tokens < record.wanted_tokens for record in good),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(record.cached_tokens or 0 for record in good),
        "output_tokens": output_tokens,
        "output_tokens_counted_by": dict(Counter(str(record.counted_by) for record in good)),
        "requests_per_s": rate(len(good), duration_s),
        "output_tokens_per_s": rate(output_tokens, duration_s),
        "total_tokens_per_s": rate(output_tokens + prompt_tokens, duration_s),
        "peak_concurrency": peak_concurrency(records),
        "ttft_ms": distribution(record.ttft_ms for record in good),
        "tpot_ms": distribution(record.tpot_ms for record in good),
        "itl_ms": distribution(gap for record in good for gap in record.gaps_ms),
        "e2e_ms": distribution(record.e2e_ms for record in good),
        "send_delay_ms": distribution(record.delay_ms for record in records),
        "goodput": {
            "limits_ms": dict(limits),
            "num_met": num_met,
            "requests_per_s": rate(num_met, duration_s),
        }
        if limits
        else None,
    }


def rate(count: int, duration_s: float) -> float | None:
    return count / duration_s if duration_s > 0 else None


def distribution(values: Iterable[float | None]) -> dict[str, float] | None:
    """Mean, percentiles and maximum of the values that are not None."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    tails = {f"p{percent}": percentile(ordered, percent) for percent in (50, 90, 99)}
    return {"mean": math.fsum(ordered) / len(ordered), **tails, "max": ordered[-1]}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile of sorted values, with linear interpolation."""
    index = (len(ordered) - 1) * percent / 100
    low = math.floor(index)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (index - low)


def peak_concurrency(records: Iterable[RequestRecord]) -> int:
    """The largest number of requests in flight. A request that begins when another ends does not overlap it."""
    moments = sorted(moment for record in records for moment in ((record.sent, 1), (record.ended, -1)))
    peak = num_open = 0
    for _, change in moments:
        num_open += change
        peak = max(peak, num_open)
    return peak


def errors_by_kind(records: Iterable[RequestRecord]) -> dict[str, dict[str, Any]]:
    """The count of each kind of failure and the description of its first one, the most frequent first."""
    failed = [record for record in records if record.failure not in (None, UNFINISHED)]
    counts = Counter(str(record.failure) for record in failed)
    return {
        kind: {"count": count, "first": next(record.detail for record in failed if record.failure == kind)}
        for kind, count in counts.most_common()
    }
