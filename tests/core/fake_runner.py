"""A runner without a model: it keeps what each block would hold and checks every read a real kernel would make.

A slot of the cache remembers token, position and encoder's input of what was written there. A row is right only if,
position by position, the blocks in its table hold exactly its own tokens: so a wrong share, a missed copy or an early
free is seen at once.
A plan that fails leaves nothing in the blocks that it wrote, and what others computed from them is as worthless.
The next token is a hash of all tokens before it, so an answer depends on the whole context and on nothing else.
Encoder groups must hold the request's encoder tokens whenever it has a row; a state must be that of all tokens before.
"""

from __future__ import annotations

from zlib import crc32

from quire.core.beam_group import num_candidates
from quire.core.kv_cache import KVCache
from quire.core.plan import Candidates, Plan, Sampled
from quire.core.request import Request

VOCABULARY = 40  # small, so that an answer ends after some forty tokens


def next_token(tokens: list[int], seed: int = 0) -> int:
    return crc32(bytes(tokens), seed) % VOCABULARY


def mark_of(request: Request) -> int:
    """Keys and values of a request's tokens depend on what its encoder has read."""
    return crc32(bytes(request.encoder_tokens))


def next_logprobs(tokens: list[int], seed: int = 0) -> list[float]:
    """Of each token that may follow, for beams. No two are alike."""
    return [-(crc32(bytes([*tokens, token]), seed) % 4093 + token / 100) / 500 for token in range(VOCABULARY)]


class Witness:
    """A constraint that allows all and remembers what it was told."""

    error = ""

    def __init__(self, tokens: list[int] | None = None) -> None:
        self.tokens = tokens or []

    def allowed(self) -> bytes:
        return b""

    def advance(self, token: int) -> None:
        self.tokens.append(token)

    def copy(self) -> Witness:
        return Witness(list(self.tokens))


def exits(plan: Plan, row: int, tokens: list[int]) -> bool:
    """Whether a row's token is an exit's, at random, of tokens of an answer that have all been sampled."""
    request = plan.requests[row]
    may_exit = request.params.early_exit is not None and plan.yields[row] == 1 and row not in plan.drafts
    return may_exit and plan.starts[row] >= request.num_prompt and crc32(bytes(tokens)) % 4 != 0


class FakeRunner:
    def __init__(self, num_blocks: int, block_size: int, windows: tuple[int | None, ...], kv: KVCache) -> None:
        self.block_size = block_size
        self.windows = windows
        self.kv = kv
        self.cells: list[list[tuple[int, ...] | None]] = [[None] * block_size for _ in range(num_blocks + 1)]
        self.on_host: dict[int, list[tuple[int, ...] | None]] = {}
        self.is_broken = False  # a plan in flight fails: those behind it may read what is not there
        self.num_read_in_flight = 0  # positions that were read by the plan that wrote them, in another row
        self.num_encoded = 0
        self.num_exited = 0
        self.num_rows_lost = 0  # that read what a plan which fails was to write

    def run(self, plan: Plan, context: dict[str, list[int]], *, fails: bool = False) -> Sampled:
        """`context` holds each request's tokens, those still in flight included. A plan that fails writes rubbish."""
        self._move(plan)
        self._encode(plan)
        writers: dict[int, Request] = {}
        rows = list(zip(plan.requests, plan.starts, plan.counts, strict=True))
        known = [context[r.id] if r.beam is None else r.tokens for r in plan.requests]
        texts = [
            (text + (plan.drafts[row].tokens if row in plan.drafts else []))[: start + count]
            for row, (text, (_, start, count)) in enumerate(zip(known, rows, strict=True))
        ]
        if max(plan.counts) == 1:  # a kernel for such steps may read other rows' keys before they are written
            for (request, start, _), tokens in zip(rows, texts, strict=True):
                self._read(request, tokens[:start], start, writers)
        for (request, start, count), tokens in zip(rows, texts, strict=True):
            assert len(tokens) == start + count, "planned past what is known"
            assert len(tokens) < request.max_len or not request.max_tokens, (
                "the last token's k and v are of no use to anybody"
            )
            self._write(request, tokens, start, writers)
        for row, ((request, start, _), tokens) in enumerate(zip(rows, texts, strict=True)):
            is_there = self._read(request, tokens, start, writers) and self._read_encoder(request)
            if not (is_there and self._advance_state(request, tokens, start)):
                self._spoil(plan.computed_blocks([row], self.block_size))
                self.num_rows_lost += 1
        if fails:
            self._spoil(plan.filled_blocks | plan.computed_blocks(range(len(plan)), self.block_size))
            self._spoil({block for request in plan.encodes for table in request.fixed_tables for block in table})
            self.is_broken = True
        sampled = Sampled([self._sample(r, t, y) for (r, _, _), t, y in zip(rows, texts, plan.yields, strict=True)])
        for row, (request, tokens) in enumerate(zip(plan.requests, texts, strict=True)):
            if request.beam is not None and plan.yields[row]:
                sampled.candidates[row] = self._rank(request, tokens)
            if exits(plan, row, tokens):
                self._leave_uncomputed(request, plan.starts[row], len(tokens))
                sampled.exited[row] = 0
                self.num_exited += 1
        return sampled

    def _move(self, plan: Plan) -> None:
        """A host block can be read once, and only after it was written. Another request may use it from then on."""
        host_blocks = [host_block for _, host_block in plan.swap_out]
        blocks = [block for _, block in plan.swap_in]
        assert len(host_blocks) == len(set(host_blocks)), "two blocks are copied to one host block"
        assert len(blocks) == len(set(blocks)), "two host blocks are copied to one block"
        for block, host_block in plan.swap_out:
            self.on_host[host_block] = list(self.cells[block])
        for host_block, block in plan.swap_in:
            self.cells[block] = self.on_host.pop(host_block)
        for source, target in plan.copies:
            self.cells[target] = list(self.cells[source])

    def _encode(self, plan: Plan) -> None:
        for request in plan.encodes:
            assert request in plan.requests
            for table in request.fixed_tables[: self.kv.num_encoder_groups]:
                for position, token in enumerate(request.encoder_tokens):
                    block = table[position // self.block_size]
                    assert self.kv.pool.refs[block] == 1 or any(
                        r is not request and block in table for r in plan.requests for table in r.fixed_tables
                    ), f"encoder block {block} is filled while an earlier plan's request has it"
                    self.cells[block][position % self.block_size] = (token, position)
            self.num_encoded += 1

    def _read_encoder(self, request: Request) -> bool:
        for table in request.fixed_tables[: self.kv.num_encoder_groups]:
            assert len(table) == -(-len(request.encoder_tokens) // self.block_size)
            for position, token in enumerate(request.encoder_tokens):
                cell = self.cells[table[position // self.block_size]][position % self.block_size]
                if cell is None and self.is_broken:
                    return False
                assert cell == (token, position)
        return True

    def _advance_state(self, request: Request, tokens: list[int], start: int) -> bool:
        """A state is all tokens that it has taken in. A row from position 0 begins a new one."""
        for (block,) in request.fixed_tables[self.kv.num_encoder_groups :]:
            assert self.kv.pool.refs[block] == 1, "a state is shared"
            state = self.cells[block][0]
            if start and state is None and self.is_broken:
                return False
            assert not start or state == (crc32(bytes(tokens[:start])), start)
            self.cells[block][0] = (crc32(bytes(tokens)), len(tokens))
        return True

    def _write(self, request: Request, tokens: list[int], start: int, writers: dict[int, Request]) -> None:
        for table in request.tables:
            for position in range(start, len(tokens)):
                block = table[position // self.block_size]
                assert block, "writes to a block it does not have"
                assert writers.setdefault(block, request) is request, f"block {block} has two writers"
                is_new = block in self.kv.filling
                assert is_new or self.kv.pool.refs[block] == 1, f"block {block} is written while it is shared"
                assert is_new or block not in self.kv.tree.owners, f"block {block} is written though it is published"
                self.cells[block][position % self.block_size] = (tokens[position], position, mark_of(request))

    def _read(self, request: Request, tokens: list[int], start: int, writers: dict[int, Request]) -> bool:
        """Whether all that a row looks at is there."""
        for table, window in zip(request.tables, self.windows, strict=True):
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, len(tokens)):
                block = table[position // self.block_size]
                assert block, f"position {position} is read but its block was given back"
                cell = self.cells[block][position % self.block_size]
                if cell is None and self.is_broken:
                    return False
                assert cell == (tokens[position], position, mark_of(request))
                self.num_read_in_flight += position < start and writers.get(block, request) is not request
        return True

    def _leave_uncomputed(self, request: Request, start: int, stop: int) -> None:
        """The row's later layers were skipped: nobody may read what it has written."""
        for table in request.tables:
            for position in range(start, stop):
                block = table[position // self.block_size]
                assert block
                self.cells[block][position % self.block_size] = None

    def _spoil(self, blocks: set[int]) -> None:
        for block in blocks:
            self.cells[block] = [None] * self.block_size

    def _sample(self, request: Request, tokens: list[int], num_yields: int) -> list[int]:
        """Accept drafts as long as they are what would have been sampled, then add one token."""
        if not num_yields or request.beam is not None:
            return []
        known, accepted = len(tokens) - num_yields + 1, []
        for draft in [*tokens[known:], None]:
            token = next_token([*request.encoder_tokens, *tokens[:known], *accepted], request.seed)
            accepted.append(token)
            if token != draft:
                break
        return accepted

    def _rank(self, request: Request, tokens: list[int]) -> Candidates:
        assert request.beam is not None
        assert isinstance(request.constraint, Witness)
        assert request.beam.group.folded or request.constraint.tokens == tokens[request.num_prompt :]
        ranked = sorted(enumerate(next_logprobs(tokens, request.seed)), key=lambda each: -each[1])
        found = [(token, logprob, rank + 1) for rank, (token, logprob) in enumerate(ranked)]
        return Candidates(found[: num_candidates(request)], [])
