"""Drafts from repeated text in plain Python, where the C++ extension is missing: the most recent occurrence of the last
three or two tokens, as a chain. `suffix.py` calls it. Names and arguments are those of `csrc/bind_suffix.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence

Proposed = tuple[list[int], list[int] | None, list[float]]

ORDERS = (3, 2)  # longest first
FIRST_ODDS = {3: 0.55, 2: 0.35}  # of the first draft by the order of its match
NEXT_ODDS = 0.75
PREDICTED_ODDS = 0.9
MAX_REQUEST_TOKENS = 65536
OVERLAP = 3


class _Half:
    """Tokens, and for each n-gram of a document the index of the token that followed it last."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.following: dict[tuple[int, ...], int] = {}
        self.start = 0  # of the last document

    def append(self, token: int) -> None:
        end = len(self.tokens)
        for order in ORDERS:
            if end - order >= self.start:
                self.following[tuple(self.tokens[end - order :])] = end
        self.tokens.append(token)


class _Text:
    """The last `limit` tokens, or up to half of them. The older half is dropped when the younger one is full."""

    def __init__(self, limit: int) -> None:
        self.half_limit = max(1, limit // 2)
        self.halves = [_Half(), _Half()]  # younger, older

    def append(self, token: int) -> None:
        if len(self.halves[0].tokens) >= self.half_limit:
            self.halves = [_Half(), self.halves[0]]
        self.halves[0].append(token)

    def separate(self) -> None:
        self.halves[0].start = len(self.halves[0].tokens)

    def find(self, tail: tuple[int, ...], count: int) -> list[int]:
        """Tokens that followed the tail, up to the half's end."""
        for half in self.halves:
            at = half.following.get(tail)
            if at is not None:
                return half.tokens[at : at + count]
        return []


class TenantText:
    def __init__(self, limit: int) -> None:
        self.text = _Text(limit)

    def __len__(self) -> int:
        return sum(len(half.tokens) for half in self.text.halves)


class RequestText:
    def __init__(self, owner: int, prediction: Sequence[int], num_prompt: int) -> None:
        self.prediction = list(prediction)
        self.num_prompt = num_prompt
        self._clear()

    def __len__(self) -> int:
        return self.size

    def _clear(self) -> None:
        self.size = 0
        self.last_token: int | None = None
        self.num_published = self.num_prompt
        self.text = _Text(MAX_REQUEST_TOKENS)
        for token in self.prediction:
            self.text.append(token)
        self.text.separate()

    def extend(self, tokens: Sequence[int]) -> None:
        if self.size and (len(tokens) < self.size or tokens[self.size - 1] != self.last_token):
            self._clear()
        for token in tokens[self.size :]:
            self.text.append(token)
        self.size = len(tokens)
        self.last_token = tokens[-1] if tokens else None

    def predicted(self, tokens: Sequence[int], count: int) -> list[int]:
        """How the prediction goes on, if the answer so far is how it begins."""
        num_answer = len(tokens) - self.num_prompt
        if num_answer < 0 or not self.prediction or list(tokens[self.num_prompt :]) != self.prediction[:num_answer]:
            return []
        return self.prediction[num_answer : num_answer + count]


def propose_repeats(
    requests: Sequence[RequestText],
    tenants: Sequence[TenantText | None],
    tokens: Sequence[Sequence[int]],
    max_drafts: Sequence[int],
    only_chains: bool,
) -> list[Proposed | None]:
    """For each request (tokens, parents, odds), or None."""
    proposed = []
    for request, tenant, text, count in zip(requests, tenants, tokens, max_drafts, strict=True):
        request.extend(text)
        proposed.append(_propose(request, tenant, text, count) if count > 0 else None)
    return proposed


def _propose(request: RequestText, tenant: TenantText | None, tokens: Sequence[int], count: int) -> Proposed | None:
    drafts = request.predicted(tokens, count)
    if drafts:
        return drafts, None, [PREDICTED_ODDS] * len(drafts)
    texts = [request.text] if tenant is None else [request.text, tenant.text]
    for order in ORDERS:
        if len(tokens) < order:
            continue
        tail = tuple(tokens[-order:])
        for text in texts:
            drafts = text.find(tail, count)
            if drafts:
                return drafts, None, [FIRST_ODDS[order], *[NEXT_ODDS] * (len(drafts) - 1)]
    return None


def publish_answer(request: RequestText, tenant: TenantText, tokens: Sequence[int]) -> None:
    request.extend(tokens)
    tenant.text.separate()
    for token in tokens[max(0, request.num_published - OVERLAP) :]:
        tenant.text.append(token)
    request.num_published = len(tokens)
