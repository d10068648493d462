"""Eligibility: which requests can have drafts, by the state that they are in. The controller asks."""

from __future__ import annotations

from quire.core.request import Request


def may_draft(request: Request) -> bool:
    """Whether drafts can follow the request's last token: it is on the host, and the next token is not the last."""
    return (
        not request.num_in_flight
        and request.beam is None
        and request.params.early_exit is None  # the exit guesses its tokens already
        and request.max_len - len(request.tokens) > 1
        and request.num_planned == len(request.tokens) - 1
    )


def may_draft_next(request: Request) -> bool:
    """Whether drafts could follow the token in flight, once it is on the host."""
    return (
        request.num_in_flight == request.num_expected == 1
        and request.beam is None
        and request.max_len - len(request.tokens) > 2
        and request.num_planned == len(request.tokens)
    )


def may_be_drafted(request: Request) -> bool:
    """Whether the device may draft behind a step of a request that was planned: nothing of the host is needed to sample
    its tokens, and several are left, unless drafts of that step are right."""
    left = request.max_len - len(request.tokens) - request.num_expected
    return not request.processes_logits and request.beam is None and left > 1


def has_prompt(request: Request) -> bool:
    """Whether a running request has more tokens to compute than its last one. Then the step is not free for drafts."""
    return len(request.tokens) + request.num_expected - request.num_planned > 1


def is_forced(request: Request) -> bool:
    """Whether the request's grammar allows one next token only. Then it is a draft that cannot be wrong."""
    return request.constraint is not None and bool(request.constraint.forced())
