"""The JSON documents of the console: rows of requests, steps, lives. docs/live.md has their fields.

A document is made for a caller who may see everything; `mask` removes what is another tenant's.
"""

from __future__ import annotations

from typing import Any

from quire.core.explain import Room, Wait, describe_wait
from quire.engine.live_changes import EngineFacts, Event, MissReason, RequestRow, StepRow

Document = dict[str, Any]


def public_id(wire_id: str) -> str:
    """The request's id without the number that the supervisor puts before it."""
    return wire_id.partition(":")[2]


def request_document(row: RequestRow, room: Room, estimate_s: float | None) -> Document:
    return {
        "number": row.number,
        "id": public_id(row.id),
        "tenant": row.tenant,
        "own": True,
        "state": row.state,
        "arrived_s": round(row.arrived_s, 3),
        "prompt_tokens": row.num_prompt,
        "cached_tokens": row.num_cached,
        "computed_tokens": row.num_computed,
        "output_tokens": row.num_output,
        "max_tokens": row.max_tokens,
        "blocks": row.num_blocks,
        "swapped_blocks": row.num_swapped_blocks,
        "preemptions": row.num_preemptions,
        "drafted_tokens": row.num_drafted,
        "accepted_tokens": row.num_accepted,
        "beams": row.num_beams,
        "wait": None if row.wait is None else wait_document(row.wait, room, estimate_s),
    }


def wait_document(wait: Wait, room: Room, estimate_s: float | None) -> Document:
    return {
        "position": wait.position,
        "resource": wait.resources[0],
        "resources": wait.resources,
        "sentence": describe_wait(wait, room),
        "estimate_s": None if estimate_s is None else float(f"{estimate_s:.2g}"),
    }


def step_document(row: StepRow) -> Document:
    return {
        "step": row.step,
        "start_s": round(row.start_s, 6),
        "seconds": None if row.seconds is None else round(row.seconds, 6),
        "predicted_s": None if row.predicted_s is None else round(row.predicted_s, 6),
        "failed": row.failed,
        "prompt_rows": row.num_prompt_rows,
        "prompt_tokens": row.num_prompt_tokens,
        "decode_rows": row.num_decode_rows,
        "draft_rows": row.num_draft_rows,
        "draft_tokens": row.num_draft_tokens,
        "admitted": row.num_admitted,
        "preempted": row.num_preempted,
    }


def facts_document(facts: EngineFacts) -> Document:
    return {
        "num_blocks": facts.num_blocks,
        "block_size": facts.block_size,
        "max_requests": facts.max_requests,
        "max_tokens_per_step": facts.max_tokens_per_step,
        "batching": facts.batching,
        "device": facts.device,
    }


def event_document(event: Event) -> Document:
    document: Document = {
        "kind": event.kind,
        "start_s": round(event.start_s, 6),
        "end_s": round(event.end_s, 6),
    }
    if event.step is not None:
        document |= {"step": event.step, "steps": event.num_steps, "tokens": event.amount}
    elif event.amount:
        document["blocks"] = event.amount
    return document


def mask(document: Document, tenant: str | None) -> Document:
    """The document as a tenant may see it. None: everything may be seen."""
    if tenant is None or document["tenant"] == tenant:
        return document
    return {**document, "id": None, "tenant": None, "own": False}


MISSES = {
    "never seen": "From token {token:,} on, no cached prompt begins like this one.",
    "diverged": "From token {token:,} on, it differs from what is cached.",
    "evicted": "The block from token {token:,} on was cached and has been evicted at step {step:,}.",
    "salted apart": "Its beginning is cached for another tenant, and tenants do not share their caches.",
    "below the block floor": "From token {token:,} on, less than a block is left, and only whole blocks are cached.",
}
NOT_COPIED = "their block was being computed or was evicted, or no block was free for a copy"


def describe_miss(miss: MissReason | None, num_cached: int, num_prompt: int, *, masked: bool) -> str:
    """Why no more of the prompt was cached. A tenant is not told that another one has the same prompt."""
    found = f"{num_cached:,} of {num_prompt:,} prompt tokens were cached."
    if miss is None:
        return found
    kind = "never seen" if masked and miss.kind == "salted apart" else miss.kind
    text = f"{found} {MISSES[kind].format(token=miss.token, step=miss.step or 0)}"
    if miss.kind == "diverged" and miss.token > num_cached:
        text += f" The {miss.token - num_cached:,} before it were not copied: {NOT_COPIED}."
    return text
