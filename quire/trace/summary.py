"""What is in a recording, as counts and times: `quire trace show`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from quire.trace.format import Step
from quire.trace.recording import RecordedRequest, Recording


def summarize(recording: Recording) -> dict[str, Any]:
    """The document that `quire trace show --json` prints."""
    requests, steps, engine = list(recording.requests.values()), recording.steps, recording.engine
    ends = [request.end for request in requests if request.end is not None]
    return {
        "quire": recording.header.quire,
        "started": recording.header.started,
        "model": recording.header.model,
        "digest": recording.header.digest,
        "anonymous": recording.header.anonymous,
        "replicas": recording.header.replicas,
        "complete": recording.is_closed,
        "kernels": engine and engine.kernels,
        "machine": engine and engine.machine,
        "seconds": last_moment(recording),
        "requests": len(requests),
        "prompts": sum(request.leader is None for request in requests),
        "tenants": len({request.tenant for request in requests}),
        "finished": dict(Counter(end.finish for end in ends)),
        "unfinished": len(requests) - len(ends),
        "prompt_tokens": sum(request.num_prompt for request in requests),
        "cached_tokens": sum(end.cached for end in ends),
        "output_tokens": sum(map(count_output, requests)),
        "steps": len(steps),
        "step_seconds": round(sum(step_seconds(step) for step in steps), 6),
        "step_kinds": dict(Counter(step_kind(step) for step in steps)),
        "computed_tokens": sum(sum(step.counts) for step in steps),
        "drafted": sum(end.drafted for end in ends),
        "accepted": sum(end.accepted for end in ends),
        "preemptions": sum(end.preemptions for end in ends),
        "swapped_blocks": sum(step.swap_out for step in steps),
        "failed_steps": sum(step.failed for step in steps),
        "restarts": len(recording.restarts),
        "resumed": recording.num_resumed,
        "ttft_s": percentiles([moment - request.at for request, moment in first_tokens(recording)]),
    }


def count_output(request: RecordedRequest) -> int:
    """Tokens of its answer, or of its answers if it was a beam search."""
    end = request.end
    if end is not None and end.beams is not None:
        return sum(map(len, end.beams))
    if end is not None and end.beam_lengths is not None:
        return sum(end.beam_lengths)
    return request.num_output


def step_seconds(step: Step) -> float:
    return step.done - step.at if step.seconds is None else step.seconds


def step_kind(step: Step) -> str:
    """What a step computes: chunks of prompts, next tokens (and drafts after them), or both."""
    decodes = [count == given for count, given in zip(step.counts, step.yields, strict=True)]
    if step.failed:
        return "failed"
    if not any(decodes):
        return "prompt"
    if not all(decodes):
        return "mixed"
    return "verify" if step.drafts else "decode"


def first_tokens(recording: Recording) -> list[tuple[RecordedRequest, float]]:
    """Requests whose first token is in the recording, with its time."""
    found = []
    for request in recording.requests.values():
        if request.token_steps and (step := request.token_steps[0]) is not None:
            found.append((request, recording.steps[step].done))
    return found


def last_moment(recording: Recording) -> float:
    moments = [request.at for request in recording.requests.values()]
    moments += [request.end.at for request in recording.requests.values() if request.end is not None]
    return max([0.0, *moments, *(step.done for step in recording.steps)])


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {f"p{share}": round(ordered[round(share / 100 * (len(ordered) - 1))], 6) for share in (50, 90, 99)}
