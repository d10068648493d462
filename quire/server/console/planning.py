"""What the console's Batching and Plan screens ask for: simulated batching, the same load run live, predicted steps.

The simulations run in a thread, one at a time, and their loads are bounded. A live run sends its requests through the
service, as the completions route does: under the server's limits, by the engine's own policy.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from pydantic import StrictInt
from starlette.requests import Request
from starlette.responses import Response

from quire.capacity.batching import BatchingResult, LoadRequest, RandomLoad, compare_batching
from quire.capacity.profile import CapacityProfile
from quire.capacity.step_parts import predict_steps
from quire.core.params import SamplingParams
from quire.errors import NoProfile, QuireError
from quire.server.openai.protocol import Number
from quire.server.request_model import RequestModel
from quire.server.router import Router
from quire.server.schemas import BatchingComparison, ServedEngine, StepPredictions, response_schemas, text_schema
from quire.server.service import RequestContext, Service, request_context
from quire.server.streaming import EventStreamResponse, JSONResponse, sse_event

NO_PROFILE = (
    "The costs of this engine's steps are not known yet. They are measured while it serves: send some requests. Or "
    "measure them before it starts: quire bench phases MODEL --save."
)

log = logging.getLogger("quire.server")

router = Router()


class LoadFields(RequestModel):
    rate: Number
    num_requests: StrictInt
    prompt_tokens: StrictInt
    output_tokens: StrictInt
    spread: Number = 0.6
    seed: StrictInt = 0

    def load(self) -> RandomLoad:
        return RandomLoad(self.rate, self.num_requests, self.prompt_tokens, self.output_tokens, self.spread, self.seed)


class BatchingRequest(LoadFields):
    """POST /console/batching"""

    batch_size: StrictInt
    batch_wait_s: Number


@router.get("/console/engine", responses=response_schemas(ServedEngine))
async def describe_engine(request: Request) -> Response:
    """The model and the options of the engine that the console's screens depend on."""
    service = request_context(request).service
    return JSONResponse(
        {
            "model": service.model,
            "summary": service.ready.summary,
            "max_len": service.ready.max_len,
            "max_requests": service.ready.max_requests,
            "batching": service.engine.batching,
            "order": service.engine.order,
            "sampling": service.ready.sampling,
            "has_exit": service.engine.exit_head is not None,
            "no_profile": None if service.client.capacity_profile else NO_PROFILE,
        }
    )


@router.post("/console/batching", responses=response_schemas(BatchingComparison))
async def compare(request: Request, body: BatchingRequest) -> Response:
    """One load under static, dynamic and continuous batching, simulated with the measured costs of this engine."""
    profile = profile_of(request_context(request).service)
    requests = body.load().requests()
    begin_s = time.perf_counter()
    async with request.app.state.simulating:
        results = await asyncio.to_thread(compare_batching, profile, requests, body.batch_size, body.batch_wait_s)
    return JSONResponse(
        {
            "requests": [[each.at_s, each.prompt_tokens, each.output_tokens] for each in requests],
            "policies": {name: describe(result) for name, result in results.items()},
            "step_error": describe_error(profile),
            "machine": profile.machine,
            "seconds": time.perf_counter() - begin_s,
        }
    )


@router.post("/console/batching/run", responses=text_schema("text/event-stream"))
async def run_live(request: Request, body: LoadFields) -> Response:
    """The same load on the engine that serves. Sends an event for each first token and each end."""
    context = request_context(request)
    return EventStreamResponse(measured_events(context, body.load().requests()))


@router.get("/console/plan", responses=response_schemas(StepPredictions))
async def plan(request: Request, context_tokens: int = 512) -> Response:
    """The predicted seconds of steps over batch sizes, and what they consist of."""
    profile = profile_of(request_context(request).service)
    return JSONResponse(
        {
            "machine": profile.machine,
            "model": profile.model,
            "step_error": describe_error(profile),
            **predict_steps(profile, context_tokens),
        }
    )


def profile_of(service: Service) -> CapacityProfile:
    profile = service.client.capacity_profile
    if profile is None:
        raise NoProfile(NO_PROFILE)
    return profile


def describe_error(profile: CapacityProfile) -> dict[str, Any]:
    """How far predictions of steps are off: of the calibration, and of the steps served last."""
    return {
        "median": profile.median_error,
        "p95": profile.p95_error,
        "served_steps": profile.served_steps,
        "served_median": profile.served_error,
    }


def describe(result: BatchingResult) -> dict[str, Any]:
    """Times of each request, and the figures of them all."""
    requests = result.requests
    first_s = sorted(each.times[0] - each.arrival_s for each in requests)
    in_all_s = sorted(each.times[-1] - each.arrival_s for each in requests)
    num_tokens = sum(len(each.times) for each in requests)
    return {
        "requests": [[each.arrival_s, each.started_s, each.times[0], each.times[-1]] for each in requests],
        "end_s": result.end_s,
        "output_tokens_per_s": num_tokens / result.end_s,
        "ttft_mean_s": sum(first_s) / len(first_s),
        "e2e_mean_s": sum(in_all_s) / len(in_all_s),
        "e2e_p95_s": in_all_s[round(0.95 * (len(in_all_s) - 1))],
        "mean_rows": result.mean_rows,
        "num_steps": result.num_steps,
    }


# ── live ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def measured_events(context: RequestContext, requests: list[LoadRequest]) -> AsyncIterator[bytes]:
    """Events of all requests as they happen. Closing the iterator aborts the requests."""
    events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    begin_s = time.perf_counter()
    tasks = [
        asyncio.create_task(measure(context, number, each, begin_s, events)) for number, each in enumerate(requests)
    ]
    try:
        num_left = len(tasks)
        while num_left:
            event = await events.get()
            num_left -= event["kind"] != "first"
            yield sse_event(event)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(
    context: RequestContext, number: int, request: LoadRequest, begin_s: float, events: asyncio.Queue[dict[str, Any]]
) -> None:
    """Run one request at its time. It has random tokens, so that no run finds the prompts of another in the cache."""
    await asyncio.sleep(begin_s + request.at_s - time.perf_counter())
    service = context.service

    def report(kind: str, **fields: Any) -> None:
        events.put_nowait({"number": number, "kind": kind, "at_s": time.perf_counter() - begin_s, **fields})

    try:
        prompt = [random.randrange(service.ready.vocab_size) for _ in range(request.prompt_tokens)]
        params = SamplingParams(max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True)
        output_processor = await service.open({"prompt_token_ids": prompt}, params, context)
        has_token = False
        async with aclosing(service.generate([output_processor])) as stream:  # type: ignore[type-var]
            async for _ in stream:
                if not has_token:
                    has_token = True
                    report("first")
        report("end")
    except QuireError as error:
        report("failed", message=str(error))
    except Exception as error:  # without an event of each request's end the stream would not end
        log.error("a request of a live run failed", exc_info=error)
        report("failed", message="The server failed on this request.")
