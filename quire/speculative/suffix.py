"""Drafts from repeated text: what followed the last tokens of a request where they occurred before.

They occurred in its prompt, its answer, its prediction, or in recent answers of the same tenant. The index is in C++
(`csrc/suffix.h`). Where the extension is missing, `ngram.py` does the same with less care.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

from quire.core.drafts import Drafts
from quire.kernels.cpu.native import Missing, load
from quire.speculative import ngram
from quire.speculative.proposer import Context

PUBLISH_TOKENS = 64  # new tokens of a running answer until the tenant's other requests can match them


class _Indexed:
    """A request that has an index."""

    __slots__ = ("num_published", "salt", "text", "tokens")

    def __init__(self, text: Any, context: Context) -> None:
        self.text = text
        self.tokens = context.tokens
        self.salt = context.salt
        self.num_published = context.num_prompt


class SuffixProposer:
    """One index for each request, and one for each tenant: a salt.

    max_tenants     tenants whose answers are kept, or 0. The one that answered least recently is dropped first
    tenant_tokens   tokens that are kept of a tenant's answers, or 0. The oldest are dropped first
    only_chains     propose no trees
    """

    name = "suffix"

    def __init__(self, *, max_tenants: int = 64, tenant_tokens: int = 65536, only_chains: bool = False) -> None:
        module = load()
        self._texts: Any = ngram if isinstance(module, Missing) else module
        self._max_tenants = max_tenants if tenant_tokens > 0 else 0
        self._tenant_tokens = tenant_tokens
        self._only_chains = only_chains
        self._requests: dict[str, _Indexed] = {}
        self._tenants: OrderedDict[bytes, Any] = OrderedDict()
        self._owners = itertools.count(1)
        self._lock = Lock()  # C++ runs without the GIL

    def propose(self, contexts: Sequence[Context], max_drafts: Sequence[int]) -> list[Drafts | None]:
        with self._lock:
            requests = [self._find(context) for context in contexts]
            found = self._texts.propose_repeats(
                [request.text for request in requests],
                [self._tenants.get(request.salt) for request in requests],
                [request.tokens for request in requests],
                list(max_drafts),
                self._only_chains,
            )
            for request in requests:
                if len(request.tokens) - request.num_published >= PUBLISH_TOKENS:
                    self._publish(request)
        return [each and Drafts(each[0], each[1], each[2], self.name) for each in found]

    def finish(self, request_id: str) -> None:
        with self._lock:
            request = self._requests.pop(request_id, None)
            if request is not None and len(request.tokens) > request.num_published:
                self._publish(request)

    def reset(self) -> None:
        with self._lock:
            self._requests.clear()

    def _find(self, context: Context) -> _Indexed:
        request = self._requests.get(context.request_id)
        if request is None or request.salt != context.salt:
            text = self._texts.RequestText(next(self._owners), context.prediction, context.num_prompt)
            request = self._requests[context.request_id] = _Indexed(text, context)
        request.tokens = context.tokens
        if len(context.tokens) < request.num_published:  # the request began again
            request.num_published = context.num_prompt
        return request

    def _publish(self, request: _Indexed) -> None:
        request.num_published = len(request.tokens)
        if not self._max_tenants:
            return
        tenant = self._tenants.get(request.salt)
        if tenant is None:
            if len(self._tenants) == self._max_tenants:
                self._tenants.popitem(last=False)
            tenant = self._tenants[request.salt] = self._texts.TenantText(self._tenant_tokens)
        self._tenants.move_to_end(request.salt)
        self._texts.publish_answer(request.text, tenant, request.tokens)
