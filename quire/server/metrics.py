"""Metrics for Prometheus. The service reports requests and steps of the engine, the supervisor reports restarts."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily

from quire.core.plan import Update
from quire.engine.messages import StepOutputs
from quire.text.output_processor import OutputProcessor

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)


# What `totals` has, by its name in /metrics.
TOTALS = (
    "requests_running", "requests_waiting", "kv_cache_use_ratio", "preemptions_total", "swaps_total",
    "prompt_tokens_total", "cached_prompt_tokens_total", "output_tokens_total", "draft_tokens_total",
    "accepted_draft_tokens_total", "early_exit_tokens_total", "speculation_gain_seconds", "engine_restarts_total",
)  # fmt: skip


class Histogram:
    """A histogram that is cheaper than prometheus_client's: it observes every token."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Called by the registry."""
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class Metrics:
    """All metrics of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"quire_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"quire_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"quire_{name}", text, buckets, registry)

        self.requests = counter("requests", "Requests that ended, by how.", "finish")
        self.responses = counter("http_responses", "HTTP responses, by route and status.", "route", "status")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that ended.")
        self.cached_tokens = counter("cached_prompt_tokens", "Of those, tokens found in the prefix cache.")
        self.output_tokens = counter("output_tokens", "Tokens that were produced.")
        self.preemptions = counter("preemptions", "Requests that were preempted.")
        self.swaps = counter("swaps", "Of those, requests whose blocks were swapped out to host memory.")
        self.drafted = counter("draft_tokens", "Guessed tokens that were verified, by what proposed them.", "source")
        self.accepted = counter("accepted_draft_tokens", "Of those, tokens that were right.", "source")
        self.speculation_s = gauge("speculation_gain_seconds", "Time that speculation has gained, minus lost.")
        self.exited = counter("early_exit_tokens", "Tokens that an exit in the middle of the model has chosen.")
        self.restarts = counter("engine_restarts", "Times that the engine was started again.")
        self.running = gauge("requests_running", "Requests that are being computed.")
        self.waiting = gauge("requests_waiting", "Requests that wait in the queue.")
        self.kv_use = gauge("kv_cache_use_ratio", "Share of the cache's blocks that running requests hold.")
        self.ready = gauge("engine_ready", "1 while an engine can compute.")
        self.ttft = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", SECONDS)
        self.inter_token = histogram("inter_token_latency_seconds", "Between two tokens of an answer.", SHORT)
        self.end_to_end = histogram("request_seconds", "From a request's arrival to its end.", SECONDS)
        self.step = histogram("step_seconds", "One step of the engine.", SHORT)
        self.predicted_s = counter("predicted_step_seconds", "Steps that were predicted: the sum of the predictions.")
        self.measured_s = counter("measured_step_seconds", "The same steps: the sum of what they took.")
        self.prediction_error = gauge(
            "step_prediction_error_ratio", "Of the last 1,000 predicted steps of an engine, the median error."
        )
        self.num_blocks = self.num_replicas = 1
        self._totalled = registry.restricted_registry([f"quire_{name}" for name in TOTALS])
        self._last: dict[int, StepOutputs] = {}  # of each replica since its last start

    def on_step(self, outputs: StepOutputs, replica: int = 0) -> None:
        before = self._last.get(replica, StepOutputs())
        self._last[replica] = outputs
        last = self._last.values()
        self.running.set(sum(each.num_running for each in last))
        self.waiting.set(sum(each.num_waiting for each in last))
        self.preemptions.inc(max(0, outputs.preemptions - before.preemptions))
        self.swaps.inc(max(0, outputs.swaps - before.swaps))
        self.exited.inc(max(0, outputs.exited_tokens - before.exited_tokens))
        count_increase(self.drafted, outputs.drafted, before.drafted)
        count_increase(self.accepted, outputs.accepted, before.accepted)
        self.speculation_s.set(sum(each.speculation_s for each in last))
        blocks_each = self.num_blocks / self.num_replicas
        self.kv_use.set(sum(blocks_each - each.num_free_blocks for each in last) / self.num_blocks)
        self.predicted_s.inc(max(0.0, outputs.predicted_s - before.predicted_s))
        self.measured_s.inc(max(0.0, outputs.measured_s - before.measured_s))
        found = [each.prediction_error for each in last if each.prediction_error is not None]
        self.prediction_error.set(max(found, default=0.0))
        if outputs.step_s is not None:
            self.step.observe(outputs.step_s)

    def on_restart(self, replica: int = 0) -> None:
        self.restarts.inc()
        self._last.pop(replica, None)

    def totals(self) -> dict[str, float]:
        """The figures of TOTALS, each summed over its labels."""
        found = dict.fromkeys(TOTALS, 0.0)
        for family in self._totalled.collect():
            for sample in family.samples:
                if (name := sample.name.removeprefix("quire_")) in found:
                    found[name] += sample.value
        return found

    def render(self) -> bytes:
        return generate_latest(self.registry)


def count_increase(counter: Counter, totals: Mapping[str, int], before: Mapping[str, int]) -> None:
    for source, total in totals.items():
        counter.labels(source).inc(max(0, total - before.get(source, 0)))


class RequestTimer:
    """Measures the answers of one HTTP request."""

    def __init__(self, metrics: Metrics, output_processors: Sequence[OutputProcessor]) -> None:
        self._metrics = metrics
        self._output_processors = output_processors
        self._begin_s = time.perf_counter()
        self._last_s: dict[str, float] = {}

    def observe(self, updates: Sequence[Update]) -> None:
        now_s, metrics, num_tokens = time.perf_counter(), self._metrics, 0
        for update in updates:
            if update.detail is not None and update.detail.beams:
                num_tokens += sum(len(beam.tokens) for beam in update.detail.beams)
            if not update.tokens:
                continue
            num_tokens += len(update.tokens)
            last_s = self._last_s.get(update.id)
            if last_s is None:
                metrics.ttft.observe(now_s - self._begin_s)
            else:
                metrics.inter_token.observe((now_s - last_s) / len(update.tokens))
            self._last_s[update.id] = now_s
        metrics.output_tokens.inc(num_tokens)

    def stop(self) -> None:
        """All answers have ended, or the client has disconnected."""
        metrics = self._metrics
        for processor in self._output_processors:
            output = processor.output
            metrics.prompt_tokens.inc(len(output.prompt_token_ids))
            metrics.cached_tokens.inc(output.num_cached_tokens)
            for answer in output.outputs:
                metrics.requests.labels(answer.finish_reason or "abort").inc()
        metrics.end_to_end.observe(time.perf_counter() - self._begin_s)
