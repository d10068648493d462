"""Which requests of two recordings are the same one.

Requests that agree in prompt, parameters and seed are paired first, in their order of arrival. What is left is paired
by less and less, so that a request of which one thing was changed meets its counterpart.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import msgspec

from quire.trace.recording import RecordedRequest, Recording

Key = Callable[[RecordedRequest], Hashable]
Pair = tuple[RecordedRequest, RecordedRequest]


# Parameters that change what is reported, or how fast, and no token.
WITHOUT_EFFECT = ("logprobs", "prompt_logprobs", "prediction", "skip_special_tokens", "include_stop_str_in_output")


def deciding_params(request: RecordedRequest) -> dict[str, Any]:
    return {name: value for name, value in request.params.items() if name not in WITHOUT_EFFECT}


def prompt_key(request: RecordedRequest) -> Hashable:
    return tuple(request.prompt or request.blocks or ())


def params_key(request: RecordedRequest) -> Hashable:
    """Everything that a request asks for, besides its prompt and seed."""
    asked = (deciding_params(request), request.max_tokens, sorted(request.end_token_ids), request.bad_word_ids)
    return msgspec.json.encode(asked, order="deterministic")


def is_greedy(request: RecordedRequest) -> bool:
    return request.params.get("temperature", 1.0) == 0 or bool(request.params.get("use_beam_search"))


def seed_key(request: RecordedRequest) -> Hashable:
    """A greedy request draws nothing."""
    return None if is_greedy(request) else request.seed


STAGES: Sequence[Key] = (
    lambda request: (prompt_key(request), params_key(request), seed_key(request)),
    lambda request: (prompt_key(request), params_key(request), request.id),
    lambda request: (prompt_key(request), params_key(request)),
    lambda request: (prompt_key(request), seed_key(request)),
    prompt_key,
    lambda request: (params_key(request), request.seed),
    lambda request: request.id,
    lambda request: None,
)


def pair_requests(
    first: Recording, second: Recording
) -> tuple[list[Pair], list[RecordedRequest], list[RecordedRequest]]:
    """Pairs in the order of the first recording's arrivals, and the requests that only one of them has."""
    left, right = list(first.requests.values()), list(second.requests.values())
    pairs: list[Pair] = []
    for key in STAGES:
        if not left or not right:
            break
        found = match(left, right, key)
        pairs += found
        taken = {id(request) for pair in found for request in pair}
        left = [request for request in left if id(request) not in taken]
        right = [request for request in right if id(request) not in taken]
    order = {request_id: number for number, request_id in enumerate(first.requests)}
    return sorted(pairs, key=lambda pair: order[pair[0].id]), left, right


def match(left: Sequence[RecordedRequest], right: Sequence[RecordedRequest], key: Key) -> list[Pair]:
    waiting: dict[Hashable, deque[RecordedRequest]] = defaultdict(deque)
    for request in right:
        waiting[key(request)].append(request)
    return [(request, waiting[found].popleft()) for request in left if waiting[found := key(request)]]
