"""LiveChanges and CacheDescription: what an engine shows of itself to the server.

docs/live.md says what the fields mean. Requests have their wire ids here. `view.py` and `cache_description.py` make
these messages, `server/console/` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.core.explain import Room, Wait


class EngineFacts(msgspec.Struct, array_like=True, frozen=True):
    """What does not change while an engine runs."""

    num_blocks: int
    block_size: int
    max_requests: int
    max_tokens_per_step: int
    batching: str
    device: str


class Event(msgspec.Struct, array_like=True):
    """A part of a request's life. `amount`: tokens that were computed, or blocks that were swapped."""

    kind: str
    start_s: float
    end_s: float
    step: int | None = None
    num_steps: int = 0
    amount: int = 0


class MissReason(msgspec.Struct, array_like=True, frozen=True):
    """A `Miss` of the prefix tree: why the tokens from position `token` on were not cached."""

    kind: str
    token: int
    step: int | None


class RequestRow(msgspec.Struct, array_like=True):
    """One request."""

    number: int
    id: str
    tenant: str
    state: str
    arrived_s: float
    num_prompt: int
    num_cached: int
    num_computed: int
    num_output: int
    max_tokens: int
    num_blocks: int
    num_swapped_blocks: int
    num_preemptions: int
    num_drafted: int
    num_accepted: int
    num_beams: int
    wait: Wait | None = None
    miss: MissReason | None = None


class EndedRequest(msgspec.Struct, array_like=True, frozen=True):
    """`finish` is None for a request that waits behind those that are shown."""

    row: RequestRow
    finish: str | None


class StepRow(msgspec.Struct, array_like=True, frozen=True):
    """One step that has been committed, or has failed."""

    step: int
    start_s: float
    seconds: float | None
    predicted_s: float | None
    failed: bool
    num_prompt_rows: int
    num_prompt_tokens: int
    num_decode_rows: int
    num_draft_rows: int
    num_draft_tokens: int
    num_admitted: int
    num_preempted: int


class LiveChanges(msgspec.Struct, tag=True):
    """What has changed since the last message. With `facts` it is a snapshot: it has all blocks and all requests.

    `blocks` are runs of four numbers: first block, count, state, owner. `events` are those of each request by number.
    """

    sent_s: float
    blocks: list[int]
    requests: list[RequestRow]
    ended: list[EndedRequest]
    events: dict[int, list[Event]]
    steps: list[StepRow]
    room: Room
    num_running: int
    num_waiting: int
    num_free_blocks: int
    decode_s: float | None  # average duration of a step without prompts
    prompt_token_s: float | None  # what a prompt token adds
    facts: EngineFacts | None = None


class CacheNode(msgspec.Struct, array_like=True):
    """Blocks in a row without a branch. `parent` is an index into the description's nodes."""

    parent: int | None
    num_blocks: int
    num_tokens: int
    first_tokens: list[int]
    num_hits: int
    requests: list[int]


class CacheRoot(msgspec.Struct, array_like=True):
    """The prefixes of one salt, in sum."""

    is_shown: bool
    num_blocks: int
    num_hits: int


class CacheDescription(msgspec.Struct, tag=True):
    """The prefix tree, bounded in size."""

    number: int
    nodes: list[CacheNode]
    roots: list[CacheRoot]
    num_hidden_blocks: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    block_size: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_evicted: int


def make_runs(blocks: Sequence[int], states: Sequence[int], owners: Sequence[int]) -> list[int]:
    """First block, count, state and owner of each run of neighbours that are alike."""
    runs: list[int] = []
    expected = state = owner = 0
    for block, its_state, its_owner in zip(blocks, states, owners, strict=True):
        if block == expected and its_state == state and its_owner == owner:
            runs[-3] += 1
        else:
            runs += (block, 1, its_state, its_owner)
            state, owner = its_state, its_owner
        expected = block + 1
    return runs
