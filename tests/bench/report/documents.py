"""Results of `quire bench` as they would be printed, made up."""

from __future__ import annotations

import random
from typing import Any

from quire.bench.in_process import request_rows
from quire.bench.serve.metrics import RequestRecord, errors_by_kind, summarize

MACHINE = {"cpu": "A CPU", "cores": 2, "threads": 2, "gpu": None, "python": "3.11.7", "torch": None}


def stamped(bench: str, **more: Any) -> dict[str, Any]:
    head = {"bench": bench, "quire": "0.1.0", "time": "2026-01-02T03:04:05+00:00", "command": f"quire bench {bench}"}
    return {**head, "machine": MACHINE, "model": "m", "engine": "m (llama), own kernels", **more}


def offline(*batches: int) -> dict[str, Any]:
    rows = [
        {
            "batch": batch, "prompt_tokens": 128, "output_tokens": 64, "prefill_tokens_per_s": 1234.5 * batch,
            "decode_tokens_per_s": 100.0 * batch, "ttft_ms": 12.3, "tpot_ms": 4.5, "total_s": 6.7,
        }
        for batch in batches
    ]  # fmt: skip
    return stamped("offline", rows=rows, start_s=0.5)


def records(count: int, tokens: int = 8, failed: int = 0) -> list[RequestRecord]:
    rng = random.Random(count)
    made = []
    for number in range(count):
        sent = number * 0.01
        times = [sent + rng.uniform(0.01, 0.2)]
        while len(times) < tokens:
            times.append(times[-1] + rng.uniform(0.001, 0.01))
        failure = "http_500" if number < failed else None
        made.append(
            RequestRecord(
                number=number, wanted_tokens=tokens, due=None, sent=sent, ended=times[-1], output_tokens=tokens,
                times=() if failure else times, counted_by="usage", prompt_tokens=32, cached_tokens=4,
                num_chunks=tokens, failure=failure, detail="<script>alert(1)</script>" if failure else None,
            )
        )  # fmt: skip
    return made


def load(made: list[RequestRecord]) -> dict[str, Any]:
    return {"summary": summarize(made, {"ttft": 150.0}), "errors": errors_by_kind(made), "requests": request_rows(made)}


def serve(count: int = 20, tokens: int = 8, failed: int = 0) -> dict[str, Any]:
    client = {"machine": {"cpu": "A CPU", "cores": 2, "python": "3.11.7"}, "cpu_us_per_chunk": None}
    more = {"url": "http://h/v1/completions", "load": "8 at a time", "interrupted": False, "client": client}
    document = stamped("serve", **load(records(count, tokens, failed)), **more)
    del document["machine"], document["engine"]
    return document


def batching() -> dict[str, Any]:
    names = ("continuous", "dynamic", "static")
    loads = {"rate": 4.0, "num_requests": 20, "prompt_tokens": 64, "output_tokens": 64, "seed": 5}
    runs = [{"batching": name, **load(records(20 + number))} for number, name in enumerate(names)]
    return stamped("batching", load=loads, batch_size=8, repeats=1, different=0, runs=runs)


def side(scale: float) -> dict[str, Any]:
    tails = {"mean": scale, "p50": scale, "p90": 2 * scale, "p99": 3 * scale, "max": 4 * scale}
    return {
        "ttft_ms": tails,
        "tpot_ms": tails,
        "e2e_ms": tails,
        "requests_per_s": 1 / scale,
        "output_tokens_per_s": 9 / scale,
    }


def prefix() -> dict[str, Any]:
    row = {
        "num_requests": 4,
        "prompt_tokens": 400,
        "cached_tokens": 100,
        "hit_rate": 0.25,
        "with": side(1),
        "without": side(2),
    }
    loads = {
        "shares": [0, 0.5], "num_requests": 4, "prompt_tokens": 100, "output_tokens": 8, "concurrency": 2, "turns": 2,
        "repeats": 1, "seed": 5, "message_tokens": 50,
    }  # fmt: skip
    shared = [{"share": share, **row} for share in (0, 0.5)]
    return stamped("prefix", load=loads, shared=shared, turns=[{"turn": 1, **row}, {"turn": 2, **row}], different=0)


def speculation() -> dict[str, Any]:
    row = {
        "num_prompts": 2, "plain_tokens_per_s": 50.0, "tokens_per_s": 80.0, "speedup": 1.6, "worst": 0.9,
        "tokens_per_step": 1.7, "drafted": 0, "accepted": 0, "different": 1,
    }  # fmt: skip
    rows = [{"kind": kind, **row} for kind in ("chat", "all")]
    return stamped("speculation", speculate="auto", batch=1, temperature=0.0, rows=rows)


def phases() -> dict[str, Any]:
    rows = [
        {
            "batch": batch, "prompt_tokens": prompt, "prefill_tokens_per_s": 500.0, "prefill_ms": 2.0 * batch * prompt,
            "predicted_prefill_ms": 1.9 * batch * prompt, "decode_step_ms": 20.0 + batch if prompt < 40 else None,
            "predicted_ms": 21.0 + batch if prompt < 40 else None,
            "prefill_work": {"flop": 2e8 * batch * prompt, "bytes": 1e8, "seconds": 2e-3 * batch * prompt},
            "decode_work": {"flop": 2e8 * batch, "bytes": 1e8, "seconds": 0.02} if prompt < 40 else None,
        }
        for batch in (1, 4, 16)
        for prompt in (8, 40)
    ]  # fmt: skip
    limits = {"read_gb_per_s": 10.0, "gflop_per_s": 300.0, "read_by": "reading", "products_by": "multiplying"}
    return stamped("phases", rows=rows, error={"median": 0.03, "p95": 0.1}, limits=limits)


def simulate() -> dict[str, Any]:
    measured = load(records(25))
    rows = measured.pop("requests")
    found = [{"figure": "ttft_ms p50", "simulated": 11.0, "measured": 10.0, "error": 0.1}]
    engine = {"steps": 9, "busy_share": 0.5, "preemptions": 0, "cached_tokens": 0}
    more = {"step_error": {"median": 0.03, "p95": 0.1}, "engine": engine, "comparison": found}
    return stamped("simulate", **load(records(20)), **more, measured=measured, measured_requests=rows)


ALL = {
    "offline": offline(1, 8), "serve": serve(), "batching": batching(), "prefix": prefix(),
    "speculation": speculation(), "phases": phases(), "simulate": simulate(),
}  # fmt: skip
