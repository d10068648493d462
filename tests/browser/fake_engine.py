"""A made-up engine for the console's tests: lines of the live stream, one request's life, a prefix tree, an answer.

The page itself is served by the real routes. Ids, tenants and texts are hostile: each tries to become markup.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from quire.capacity.batching import RandomLoad, compare_batching
from quire.capacity.profile import CapacityProfile, EngineSizes
from quire.capacity.step_cost import KNOTS, StepCost
from quire.capacity.step_parts import predict_steps
from quire.server.console import page
from quire.server.console.planning import describe, describe_error

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\'"&amp;'
LIFE = (
    ("queued", 0.0, 1.2),
    ("prompt", 1.2, 1.3),
    ("prompt", 1.3, 1.42),
    ("decode", 1.42, 2.4),
    ("preempted", 2.4, 2.4),
    ("queued", 2.4, 2.9),
    ("prompt", 2.9, 3.0),
    ("decode", 3.0, 4.4),
)
LOAD = ("rate", "num_requests", "prompt_tokens", "output_tokens", "spread", "seed")
MISS = "512 of 655 prompt tokens were cached. From token 512 on, this prompt differs from what is cached."
SIZES = EngineSizes(4096, 16, 512, 32, 4096, (None,))


def made_up_cost() -> StepCost:
    coefficients = [0.0] * (2 + 2 * len(KNOTS) + 2)
    coefficients[0], coefficients[1], coefficients[2 + len(KNOTS) - 1] = 0.011, 1e-4, 1.9e-4
    coefficients[-2], coefficients[-1] = 2e-7, 4e-8
    resampled = tuple(tuple(value * share for value in coefficients) for share in (0.95, 1.05))
    return StepCost((None,), tuple(coefficients), resampled)


PROFILE = CapacityProfile("made-up", "a made-up machine", SIZES, made_up_cost(), 0.03, 0.08)


@dataclass(slots=True)
class FakeRequest:
    number: int
    prompt: int
    max_tokens: int
    arrived_s: float
    computed: int = 0
    output: int = 0
    blocks: list[int] = field(default_factory=list)
    running: bool = False

    def row(self, position: int) -> dict[str, Any]:
        wait = None
        if not self.running:
            sentence = f"It is number {position} in line and needs {self.prompt // 16} blocks; 12 are free. {HOSTILE}"
            wait = {
                "position": position,
                "resource": "blocks",
                "resources": ["blocks"],
                "sentence": sentence,
                "estimate_s": 0.3 * position,
            }
        is_own = self.number % 5 != 0
        return {
            "number": self.number,
            "id": f"{HOSTILE}-{self.number}" if is_own else None,
            "tenant": HOSTILE if is_own else None,
            "own": is_own,
            "state": "running" if self.running else "waiting",
            "arrived_s": self.arrived_s,
            "prompt_tokens": self.prompt,
            "cached_tokens": min(32, self.computed),
            "computed_tokens": self.computed,
            "output_tokens": self.output,
            "max_tokens": self.max_tokens,
            "blocks": len(self.blocks),
            "swapped_blocks": 0,
            "preemptions": 0,
            "drafted_tokens": 0,
            "accepted_tokens": 0,
            "beams": 1,
            "wait": wait,
        }


class FakeEngine:
    """Requests that arrive, compute their prompts in chunks, decode and end."""

    def __init__(self, num_blocks: int = 4096, seed: int = 0) -> None:
        self.num_blocks = num_blocks
        self.rng = random.Random(seed)
        self.states, self.owners = [0] * num_blocks, [0] * num_blocks
        self.requests: dict[int, FakeRequest] = {}
        self.free = list(range(num_blocks))
        self.cached: list[int] = []
        self.step = self.sequence = self.output_tokens = 0
        self.now_s = time.time()
        self.ended: list[int] = []
        self.changed: set[int] = set()
        self.steps: list[dict[str, Any]] = []

    def advance(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    def _step(self) -> None:
        if len(self.requests) < 24:
            number = self.step * 32 + len(self.requests) + 1
            length = max(8, self.rng.choice((40, 200, 640, 1500)) * self.num_blocks // 4096)
            self.requests[number] = FakeRequest(number, length, self.rng.randint(20, 200), self.now_s)
        budget, prompt_tokens, prompt_rows, decode_rows = 512, 0, 0, 0
        for request in list(self.requests.values()):
            if not request.running and sum(each.running for each in self.requests.values()) >= 16:
                continue
            request.running = True
            if request.computed < request.prompt:
                count = min(budget, request.prompt - request.computed)
                budget -= count
                request.computed += count
                prompt_tokens += count
                prompt_rows += count > 0
            else:
                decode_rows += 1
                request.output += 1
                request.computed += 1
            self._grow(request)
            if request.output >= request.max_tokens:
                self._end(request)
        self.output_tokens += decode_rows
        self.step += 1
        seconds = 0.012 + 2e-4 * (prompt_tokens + decode_rows)
        self.now_s += seconds
        self.steps.append(
            {
                "step": self.step,
                "start_s": self.now_s - seconds,
                "seconds": seconds,
                "predicted_s": seconds * 1.05,
                "failed": False,
                "prompt_rows": prompt_rows,
                "prompt_tokens": prompt_tokens,
                "decode_rows": decode_rows,
                "draft_rows": 0,
                "draft_tokens": 0,
                "admitted": 0,
                "preempted": 0,
            }
        )

    def _grow(self, request: FakeRequest) -> None:
        while len(request.blocks) * 16 < request.computed:
            block = self.free.pop(0) if self.free else self.cached.pop(0)
            request.blocks.append(block)
            self._mark(block, 2, request.number)

    def _end(self, request: FakeRequest) -> None:
        for block in request.blocks:
            self._mark(block, 1, 0)
            self.cached.append(block)
        del self.requests[request.number]
        self.ended.append(request.number)

    def _mark(self, block: int, state: int, owner: int) -> None:
        self.states[block], self.owners[block] = state, owner
        self.changed.add(block)

    def line(self, kind: str) -> dict[str, Any]:
        blocks = range(self.num_blocks) if kind == "snapshot" else sorted(self.changed)
        waiting = [request for request in self.requests.values() if not request.running]
        running = [request for request in self.requests.values() if request.running]
        rows = [request.row(0) for request in running] + [
            request.row(place) for place, request in enumerate(waiting, 1)
        ]
        line = {
            "type": kind,
            "replica": 0,
            "sequence": self.sequence,
            "time_s": self.now_s,
            "engine": {
                "num_blocks": self.num_blocks,
                "block_size": 16,
                "max_requests": 16,
                "max_tokens_per_step": 512,
                "batching": "continuous",
                "device": "cpu",
            },
            "blocks": [value for block in blocks for value in (block + 1, 1, self.states[block], self.owners[block])],
            "requests": rows,
            "ended": [{"number": number, "finish": "stop"} for number in self.ended],
            "num_running": len(running),
            "num_waiting": len(waiting),
            "num_free_blocks": len(self.free) + len(self.cached),
            "num_cached_blocks": len(self.cached),
            "steps": self.steps[-256:],
            "totals": {
                "requests_running": len(running),
                "requests_waiting": len(waiting),
                "preemptions_total": 3,
                "output_tokens_total": self.output_tokens,
                "prompt_tokens_total": 1000,
                "cached_prompt_tokens_total": 310,
            },
        }
        if kind == "delta":
            del line["engine"]
        self.sequence += 1
        self.changed, self.ended, self.steps = set(), [], []
        return line


@dataclass(slots=True)
class FakeServer:
    """The page with made-up data. `key` is the one that is accepted; `drops` streams end after their snapshot."""

    key: str | None = None
    num_blocks: int = 4096
    drops: int = 0
    num_streams: int = 0
    bodies: list[Any] = field(default_factory=list)
    url: str = ""

    def app(self) -> Starlette:
        reads = {
            "/console/live": self.live,
            "/console/engine": self.engine,
            "/console/requests/{name:path}": self.life,
            "/console/cache": self.cache,
            "/console/plan": self.plan,
        }
        writes = {
            "/console/batching": self.batching,
            "/console/batching/run": self.run,
            "/v1/chat/completions": self.chat,
        }
        routes = [Route(path, self.checked(answer)) for path, answer in reads.items()]
        routes += [Route(path, self.checked(answer), methods=["POST"]) for path, answer in writes.items()]
        app = Starlette(routes=[*routes, *page.router.routes])
        app.state.console_files = page.load_files()
        return app

    def checked(self, answer: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        """A route that needs the key."""

        async def respond(request: Request) -> Response:
            if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
                return JSONResponse({"error": {"message": "The API key is missing or wrong."}}, 401)
            answered = await answer(request)
            return answered if isinstance(answered, Response) else JSONResponse(answered)

        return respond

    async def engine(self, request: Request) -> Any:
        return {
            "model": HOSTILE,
            "summary": "",
            "max_len": 4096,
            "max_requests": 32,
            "batching": "continuous",
            "order": "fcfs",
            "sampling": {"temperature": 0.2, "top_p": 0.9},
            "has_exit": False,
            "no_profile": None,
        }

    async def live(self, request: Request) -> Any:
        self.num_streams += 1
        return StreamingResponse(self.lines(self.num_streams), media_type="application/x-ndjson")

    async def lines(self, number: int) -> AsyncIterator[bytes]:
        engine = FakeEngine(self.num_blocks)
        engine.advance(120)
        yield encode({"type": "hello", "version": 1, "model": HOSTILE, "replicas": 1, "masked": False})
        yield encode(engine.line("snapshot"))
        while number > self.drops:
            await asyncio.sleep(0.1)
            engine.advance(4)
            yield encode(engine.line("delta"))

    async def life(self, request: Request) -> Any:
        name = request.path_params["name"]
        if name == "nobody":
            return JSONResponse({"error": {"message": f"There is no request {HOSTILE}."}}, 404)
        common = {"step": 5, "steps": 3, "tokens": 40}
        events = [{"kind": kind, "start_s": 100 + start, "end_s": 100 + end, **common} for kind, start, end in LIFE]
        life = {
            "id": name,
            "replica": 0,
            "number": 3,
            "own": True,
            "state": "ended",
            "finish": "stop",
            "arrived_s": 100.0,
            "ended_s": 104.4,
            "prompt_tokens": 655,
            "cached_tokens": 512,
            "output_tokens": 44,
            "max_tokens": 60,
            "events": events,
            "num_dropped_events": 0,
            "miss": f"{MISS} {HOSTILE}",
        }
        return {"requests": [life]}

    async def cache(self, request: Request) -> Any:
        rng, nodes = random.Random(1), [tree_node(0, None, 24, 3)]
        for number in range(1, 40):
            nodes.append(tree_node(number, rng.randrange(number), rng.randint(1, 20), number % 4))
        return {
            "replica": 0,
            "block_size": 16,
            "num_blocks": 4096,
            "num_cached_blocks": 600,
            "num_free_blocks": 3000,
            "prompt_tokens": 9000,
            "cached_tokens": 6100,
            "evicted_blocks": 17,
            "tenants": [{"own": True, "tenant": "", "blocks": 600, "hits": 40}],
            "nodes": nodes,
            "num_hidden": 2,
        }

    async def plan(self, request: Request) -> Any:
        about = {"machine": PROFILE.machine, "model": HOSTILE, "step_error": describe_error(PROFILE)}
        return {**about, **predict_steps(PROFILE, int(request.query_params["context_tokens"]))}

    async def batching(self, request: Request) -> Any:
        body = await request.json()
        requests = RandomLoad(*(body[name] for name in LOAD)).requests()
        results = compare_batching(PROFILE, requests, body["batch_size"], body["batch_wait_s"])
        return {
            "requests": [[each.at_s, each.prompt_tokens, each.output_tokens] for each in requests],
            "policies": {name: describe(result) for name, result in results.items()},
            "step_error": describe_error(PROFILE),
            "machine": PROFILE.machine,
            "seconds": 0.1,
        }

    async def run(self, request: Request) -> Any:
        body = await request.json()
        events = [
            {"number": number, "kind": kind, "at_s": 0.1 * number + at_s}
            for number in range(body["num_requests"])
            for kind, at_s in (("first", 0.3), ("end", 1.0))
        ]
        return StreamingResponse(map(event, events), media_type="text/event-stream")

    async def chat(self, request: Request) -> Any:
        self.bodies.append(await request.json())
        headers = {"x-request-id": "abc"}
        return StreamingResponse(self.answer(), media_type="text/event-stream", headers=headers)

    async def answer(self) -> AsyncIterator[str]:
        for index, token in enumerate((HOSTILE, " is", " quoted", ":\n```\n", "<b>code</b>", "\n```\n", "Done.")):
            top = [{"token": token, "logprob": -0.1 - index}, {"token": HOSTILE, "logprob": -3.0}]
            content = [{**top[0], "bytes": list(token.encode()), "top_logprobs": top}]
            choice = {"index": 0, "delta": {"content": token}, "logprobs": {"content": content}, "token_ids": [index]}
            yield event({"choices": [choice]})
            await asyncio.sleep(0.02)
        usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
        yield event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"


def event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"


def tree_node(number: int, parent: int | None, blocks: int, num_holders: int) -> dict[str, Any]:
    text = f"{HOSTILE} You are node {number}"
    return {
        "node": number,
        "parent": parent,
        "blocks": blocks,
        "tokens": 16 * blocks,
        "text": text,
        "hits": number,
        "requests": [number] if num_holders == 1 else [],
        "in_use": num_holders == 1,
    }


def encode(line: dict[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"


@contextmanager
def serving(fake: FakeServer) -> Iterator[FakeServer]:
    """The server in a thread, on a free port."""
    server = uvicorn.Server(uvicorn.Config(fake.app(), port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join(10)
