"""Answers to many prompts as token ids, taken from the engine itself. `LLM.generate` makes text of every token as it
comes, which takes the host as long as planning it. Called by `dialogues.py`. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from quire.core.params import SamplingParams
from quire.core.request import Finish, Request
from quire.engine.client import no_garbage_collection
from quire.llm import LLM

ROOM = 1.25  # of the cache for each request, in lengths of a whole dialogue
REFILL = 8  # such a part of the requests is replaced together: a step with prompts takes a GPU longer than one without


class Answer(NamedTuple):
    tokens: list[int]  # the one that ends it included
    finish: Finish


def answer(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Answer]:
    """In the order of the prompts, which must leave room for their answers. Nobody else uses the LLM meanwhile."""
    engine, max_requests = llm._client.engine, find_max_requests(llm, prompts, params)
    waiting = enumerate(make_requests(llm, prompts, params))
    running: dict[str, tuple[int, Request]] = {}
    answers: dict[int, Answer] = {}
    try:
        with no_garbage_collection():
            while len(answers) < len(prompts):
                if len(running) <= max_requests - max(1, max_requests // REFILL):
                    for index, request in waiting:
                        running[request.id] = index, request
                        engine.add(request)
                        if len(running) == max_requests:
                            break
                for update in engine.step():
                    if update.finish:
                        index, request = running.pop(update.id)
                        answers[index] = Answer(request.tokens[request.num_prompt :], update.finish)
    except BaseException:
        with suppress(Exception):  # the first error counts
            for request_id in running:
                engine.abort(request_id)
        raise
    return [answers[index] for index in range(len(prompts))]


def find_max_requests(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> int:
    """So many that usually none is preempted: what it has computed would be computed again."""
    cache, num_tokens = llm.info.cache, sum(map(len, prompts)) + sum(each.max_tokens or 0 for each in params)
    longest = ROOM * num_tokens / max(1, len(prompts))
    return max(1, min(llm.info.max_requests, int(cache.num_blocks * cache.block_size / max(1.0, longest))))


def make_requests(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Iterator[Request]:
    processor = llm._input_processor
    for prompt, its_params in zip(prompts, params, strict=True):
        made = processor.build(None, list(prompt), its_params, next(processor.request_counter))
        yield made.requests[0]
