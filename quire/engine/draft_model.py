"""DraftModel: a small model that guesses what the large one will say. It is a proposer.

Its keys and values are in the same blocks as those of the large model: its layers are further layers of the cache. So
block tables and prefix hits serve both. It computes only tokens that it has not computed yet, when it is asked for
drafts. After a swap it computes all of them again, and after a copy those of the copied block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.core.block_pool import BlockPool
from quire.core.drafts import Drafts
from quire.core.plan import Plan
from quire.core.request import Request
from quire.engine.batch import Batch, BatchBuffers
from quire.engine.draft_chains import begin_chains, draw_drafts, plan_pass
from quire.kernels import Kernels
from quire.kernels.arrays import Array
from quire.kernels.paging import LayerCache
from quire.models.decoder import Decoder

CONFIDENT = 0.98  # the odds of a draft whose probability is 1


@dataclass(slots=True)
class Computed:
    """The first tokens of a request whose keys and values the draft model has computed, and where."""

    num_tokens: int
    blocks: list[int | None]
    num_preemptions: int
    num_known: int  # tokens that the request had then
    drafts: list[int]  # that follow them; the request may go on differently


class DraftModel:
    """`reserve` allocates blocks for drafts (`Scheduler.reserve`), `pool` returns the block pool."""

    name = "draft"
    is_parallel = False
    drafts_per_pass = 1

    def __init__(
        self,
        model: Decoder,
        layers: Sequence[LayerCache],
        buffers: BatchBuffers,
        ops: Kernels,
        max_tokens: int,
        pool: Callable[[], BlockPool],
        reserve: Callable[[Request, int], int],
    ) -> None:
        self._model = model
        self._layers = layers
        self._buffers = buffers
        self._ops = ops
        self._max_tokens = max_tokens
        self._pool = pool
        self._reserve = reserve
        self._computed: dict[str, Computed] = {}
        self._filled: dict[int, int] = {}  # full blocks that the draft model has filled: their number of allocations

    def catch_up(self, requests: Sequence[Request]) -> None:
        for request in requests:
            start, last = self._count_computed(request), len(request.tokens) - 1
            while start < last:
                count = min(last - start, self._max_tokens)
                self._forward(self._buffers.fill(Plan(0, [request], [start], [count], [0])))
                start += count
            self._note(request, last)

    def propose_requests(self, requests: Sequence[Request], max_drafts: Sequence[int]) -> list[Drafts | None]:
        """A chain for each request. `catch_up` was called for those that get drafts."""
        chains = begin_chains(self.name, requests, max_drafts, self._reserve)
        left = [chain for chain in chains if chain is not None]
        while left:
            states = self._forward(self._buffers.fill(plan_pass(left)))
            draw_drafts(left, self._model.head(states), odds_of, self._ops)
            left = [chain for chain in left if not chain.is_done]
        for chain in chains:
            if chain is not None:
                self._note(chain.request, len(chain.request.tokens) + len(chain.drafts) - 1, chain.drafts.tokens)
        return [None if chain is None else chain.drafts for chain in chains]

    def finish(self, request_id: str) -> None:
        self._computed.pop(request_id, None)

    def reset(self) -> None:
        self._computed.clear()
        self._filled.clear()

    def _count_computed(self, request: Request) -> int:
        """How many of the request's first tokens are computed, without the last one."""
        tables, size = request.tables[0], self._buffers.block_size
        last = len(request.tokens) - 1
        known = self._computed.get(request.id)
        num_tokens = 0
        if known is not None and known.num_preemptions == request.num_preemptions:
            num_tokens = min(known.num_tokens, last, count_right(known, request.tokens))
            while num_tokens and known.blocks[: -(-num_tokens // size)] != tables[: -(-num_tokens // size)]:
                num_tokens = (num_tokens - 1) // size * size  # a block was copied
        allocations = self._pool().num_allocations
        for index in range(num_tokens // size):  # confirmed: later requests with the same prefix have these blocks
            if (block := tables[index]) is not None:
                self._filled[block] = allocations[block]
        index = num_tokens // size
        while (index + 1) * size <= last:
            block = tables[index]
            if block is None or self._filled.get(block) != allocations[block]:
                break
            index += 1
            num_tokens = index * size
        return num_tokens

    def _note(self, request: Request, num_tokens: int, drafts: Sequence[int] = ()) -> None:
        blocks, num_known = list(request.tables[0]), len(request.tokens)
        self._computed[request.id] = Computed(num_tokens, blocks, request.num_preemptions, num_known, list(drafts))

    def _forward(self, batch: Batch) -> Array:
        return self._model(batch.tokens, batch.positions, batch.paging, self._layers)


def odds_of(probability: float) -> float:
    return CONFIDENT * probability


def count_right(computed: Computed, tokens: Sequence[int]) -> int:
    """How many of the request's first tokens are those that were known and drafted then."""
    count = computed.num_known
    for draft, token in zip(computed.drafts, tokens[count:], strict=False):
        if draft != token:
            break
        count += 1
    return count
