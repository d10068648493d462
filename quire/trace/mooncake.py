"""A recording as requests of published traces have them: times, lengths, and ids of prompt blocks that may be shared.

Other tools read Mooncake's JSON lines; `bench/serve/traces.py` reads recordings through this.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from quire.trace.anonymous import prompt_digests
from quire.trace.format import PROMPT_BLOCK
from quire.trace.recording import RecordedRequest, Recording, by_arrival
from quire.trace.summary import count_output

MOONCAKE_BLOCK = 512  # tokens
NO_KEY = b""


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """`blocks`: an id for each `PROMPT_BLOCK` tokens of the prompt and one for the rest."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: list[int]


def traffic(recording: Recording) -> Iterator[TrafficRequest]:
    """By arrival. Prompts of different tenants share nothing."""
    numbers: dict[str, int] = {}
    for request in by_arrival(list(recording.requests.values())):
        blocks = [numbers.setdefault(digest, len(numbers)) for digest in digests_of(request)]
        yield TrafficRequest(request.at, request.num_prompt, count_output(request), blocks)


def digests_of(request: RecordedRequest) -> list[str]:
    if request.blocks is not None:
        return request.blocks
    return prompt_digests(NO_KEY, request.tenant, request.prompt or [])


def mooncake_lines(recording: Recording) -> Iterator[str]:
    """Each digest stands for all tokens up to its end, so the last of 512 tokens stands for their block."""
    stride, numbers = MOONCAKE_BLOCK // PROMPT_BLOCK, dict[int, int]()
    for request in traffic(recording):
        lasts = [*request.blocks[stride - 1 :: stride], *request.blocks[-1:]][
            : -(-request.prompt_tokens // MOONCAKE_BLOCK)
        ]
        yield json.dumps(
            {
                "timestamp": round(1e3 * request.at_s),
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
                "hash_ids": [numbers.setdefault(block, len(numbers)) for block in lasts],
            }
        )
