"""Runner: runs the model on one plan and returns the sampled tokens. It keeps no requests and makes no decisions.

For every plan, blocks are swapped and copied, the batch is filled, the model runs, a token is sampled at every sample
of the batch, and the tokens are read back. The engine calls `launch`; the core's tests have a fake runner.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.core.drafts import ROOT
from quire.core.plan import Plan, Sampled, TokenLogprobs
from quire.core.request import Request
from quire.engine.batch import Batch, BatchBuffers, Samples
from quire.engine.cache import CacheTensors
from quire.engine.sampler import LogprobsArrays, Sampler, SamplerOutput, to_candidates, to_token_logprobs
from quire.kernels import Kernels
from quire.kernels.arrays import Array, Arrays
from quire.models.decoder import Decoder

if TYPE_CHECKING:
    from quire.engine.split_steps import SplitSteps

LOGPROBS_CHUNK = 64  # prompt positions whose logits are in memory at the same time


class RunningStep(Protocol):
    """A plan that has been launched."""

    @property
    def must_commit_first(self) -> bool:
        """Whether this step must be committed before the next is planned: it verifies drafts, or it failed."""
        ...

    def is_done(self) -> bool:
        """Whether its tokens are on the host."""
        ...

    def sample(self) -> None:
        """Sample, if sampling needs the tokens of the step before. Called when these are committed."""
        ...

    def wait(self) -> Sampled:
        """Block until its tokens are on the host. Called once, in the order of launches."""
        ...


class Runner(Protocol):
    cache: CacheTensors

    @property
    def depth(self) -> int:
        """How many plans may be in flight."""
        ...

    def launch(self, plan: Plan, is_behind: bool = False) -> RunningStep:
        """Start to compute the plan's rows.

        With `is_behind` another plan is in flight, so the host may not have the last token of a request yet. A row
        without a token that can be sampled is in `Sampled.failed`.
        """
        ...

    def prepare(self) -> None:
        """Called once, before the first plan."""
        ...

    def idle(self, seconds: float) -> bool:
        """Called when the host is idle for `seconds`. Prepares later plans; False if nothing can be prepared in that
        time."""
        ...

    def finish(self, request_id: str) -> None:
        """A request has ended. Frees what is kept for it."""
        ...

    def reset(self) -> None:
        """Forget all requests: plans were dropped."""
        ...


class StepStates(NamedTuple):
    """Hidden states of a step's tokens. The next step overwrites them.

    Row r of the plan has the tokens query_starts[r] : query_starts[r + 1]. In a row with drafts, node n is the token
    query_starts[r] + 1 + n.
    """

    query_starts: Sequence[int]
    hidden: Array  # [tokens, hidden_size], after the last norm
    taps: Sequence[Array]  # [tokens, hidden_size] after each tapped layer, if the model was recorded with any


class StepListener(Protocol):
    """Reads the hidden states of steps: a draft head."""

    def keep(self, plan: Plan, sampled: Sampled, states: StepStates) -> None:
        """Called after each step, before its commit. Values that are needed later must be copied."""
        ...


class PromptLogprobs(NamedTuple):
    """Log probabilities of some of a prompt's tokens."""

    row: int  # of the plan
    targets: Sequence[int]
    logprobs: LogprobsArrays


@dataclass(slots=True)
class Step:
    """A plan in flight: its samples, their hidden states, and the sampled tokens."""

    runner: ModelRunner
    plan: Plan
    samples: Samples
    hidden: Array  # [samples or more, hidden_size]
    states: StepStates
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    exits: dict[int, int] = field(default_factory=dict)  # tokens that the exit chose, by row; these have no samples
    waiting: Collection[int] = ()  # of these rows, those whose later layers are not computed
    output: SamplerOutput | None = None
    begin_s: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0

    @property
    def must_commit_first(self) -> bool:
        return bool(self.samples.drafts)

    def is_done(self) -> bool:
        return self.output is not None

    def sample(self) -> None:
        if self.output is None:
            self.output = self.runner.sampler.sample(self.samples, self.hidden)
            self.seconds = time.perf_counter() - self.begin_s

    def wait(self) -> Sampled:
        assert self.output is not None
        sampled = collect(self.plan, self.samples, self.output, self.prompt_logprobs, self.seconds)
        for row, token in self.exits.items():
            sampled.tokens[row] = [token]
            sampled.exited[row] = 0 if row in self.waiting else self.plan.counts[row]
        self.runner.move_accepted(self.plan, sampled)
        for listener in self.runner.listeners:
            listener.keep(self.plan, sampled, self.states)
        return sampled


class ModelRunner:
    """A model, its cache and its buffers. `launch` computes the whole plan. `listeners` get the states of each step.
    With `split` it runs the model in two parts.
    """

    depth = 1

    def __init__(
        self,
        model: Decoder,
        cache: CacheTensors,
        buffers: BatchBuffers,
        ops: Kernels,
        listeners: Sequence[StepListener] = (),
        split: SplitSteps | None = None,
    ) -> None:
        self.model = model
        self.split = split
        self.cache = cache
        self.buffers = buffers
        self.ops = ops
        self.listeners = list(listeners)
        self.sampler = Sampler(model.head, buffers.state, ops)
        # With `prompt_logprobs`: called with a request, a position, the logits after the tokens from there on, and
        # the states of these tokens at the exit, if there is one.
        self.on_prompt_logits: Callable[[Request, int, Array, Array | None], None] | None = None

    def launch(self, plan: Plan, is_behind: bool = False) -> RunningStep:
        begin_s = time.perf_counter()
        self.cache.swap_blocks(plan.swap_out, plan.swap_in)
        self.cache.copy_blocks(plan.copies)
        batch = self.buffers.fill(plan)
        assert batch.last_token_entries is None, "a token is not on the host"
        step = self._run(plan, batch) if self.split is None else self._run_split(self.split, plan, batch)
        step.begin_s = begin_s
        step.sample()
        return step

    def _run(self, plan: Plan, batch: Batch) -> Step:
        hidden = self.model(batch.tokens, batch.positions, batch.paging, self.cache.layers)
        return Step(
            self,
            plan,
            batch.samples,
            select_samples(hidden, batch.samples, self.ops.arrays),
            StepStates(batch.paging.host_query_starts, hidden, getattr(self.model, "taps", ())),
            self._prompt_logprobs(plan, batch, hidden),
        )

    def _run_split(self, split: SplitSteps, plan: Plan, batch: Batch) -> Step:
        found = split.run(plan, batch, self.sampler)
        samples = without_rows(batch.samples, found.exits) if found.exits else batch.samples
        return Step(
            self,
            plan,
            samples,
            select_samples(found.hidden, samples, self.ops.arrays),
            StepStates(batch.paging.host_query_starts, found.hidden, found.taps),
            self._prompt_logprobs(plan, batch, found.hidden, found.states),
            found.exits,
            found.waiting,
        )

    def prepare(self) -> None:
        pass

    def idle(self, seconds: float) -> bool:
        return False

    def finish(self, request_id: str) -> None:
        if self.split is not None:
            self.split.finish(request_id)

    def reset(self) -> None:
        self.buffers.reset()
        if self.split is not None:
            self.split.reset()

    def move_accepted(self, plan: Plan, sampled: Sampled) -> None:
        """Move the keys and values of accepted side branches of draft trees to where the next step expects them."""
        if any(path != list(range(len(path))) for path in sampled.accepted.values()):
            groups = range(len(self.buffers.tables))
            self.cache.move_tokens([find_moves(plan, sampled, group, self.buffers.block_size) for group in groups])

    def _prompt_logprobs(
        self, plan: Plan, batch: Batch, hidden: Array, exit_states: Array | None = None
    ) -> list[PromptLogprobs]:
        """Log probabilities of prompt tokens, for requests with `prompt_logprobs`.

        hidden, exit_states [tokens, hidden_size]
        """
        result: list[PromptLogprobs] = []
        for row, request in enumerate(plan.requests):
            if not has_prompt_logprobs(plan, row):
                continue
            first, start, count = batch.paging.host_query_starts[row], plan.starts[row], plan.counts[row]
            targets = request.tokens[start + 1 : min(start + count + 1, request.num_prompt)]
            for begin in range(0, len(targets), LOGPROBS_CHUNK):
                chunk = targets[begin : begin + LOGPROBS_CHUNK]
                rows = slice(first + begin, first + begin + len(chunk))
                states = hidden[rows]
                if self.on_prompt_logits is not None:
                    at_exit = exit_states[rows] if exit_states is not None else None
                    self.on_prompt_logits(request, start + begin, self.sampler.head(states), at_exit)
                logprobs = self.sampler.score(states, chunk, request.params.prompt_logprobs or 0)
                result.append(PromptLogprobs(row, chunk, logprobs))
        return result


def has_prompt_logprobs(plan: Plan, row: int) -> bool:
    """Whether a row computes tokens of a prompt whose log probabilities are requested."""
    request = plan.requests[row]
    return request.params.prompt_logprobs is not None and plan.starts[row] < request.num_prompt - 1


def without_rows(samples: Samples, rows: Collection[int]) -> Samples:
    """The samples of the other rows."""
    kept = [nth for nth, row in enumerate(samples.rows) if row not in rows]
    names = ("requests", "rows", "indices", "lengths", "nodes", "entries")
    columns = {name: getattr(samples, name) for name in names}
    return Samples(**{name: [column[nth] for nth in kept] for name, column in columns.items()}, drafts=samples.drafts)


def select_samples(hidden: Array, samples: Samples, arrays: Arrays) -> Array:
    """hidden [tokens, hidden_size] -> [samples, hidden_size]"""
    if samples.indices == list(range(len(hidden))):
        return hidden
    return hidden[arrays.put(samples.indices, "int64")]


def collect(
    plan: Plan,
    samples: Samples,
    output: SamplerOutput,
    prompt_logprobs: Sequence[PromptLogprobs],
    seconds: float,
    nums_right: Sequence[int] = (),
) -> Sampled:
    """Convert a step's output, which is on the host. `nums_right`: of the drafts that the device has made, by row."""
    sampled = Sampled([[] for _ in range(len(plan))], seconds=seconds)
    tokens, max_logits = output.tokens.tolist(), output.max_logits.tolist()
    logprobs: dict[int, TokenLogprobs] = {}
    if output.logprobs is not None:
        nums_top = [samples.requests[nth].params.logprobs or 0 for nth in output.logprobs_indices]
        converted = to_token_logprobs(output.logprobs, [tokens[nth] for nth in output.logprobs_indices], nums_top)
        logprobs = dict(zip(output.logprobs_indices, converted, strict=True))
    if output.beams is not None:
        beams = [samples.requests[nth] for nth in output.beam_indices]
        for nth, candidates in zip(output.beam_indices, to_candidates(output.beams, beams), strict=True):
            sampled.candidates[samples.rows[nth]] = candidates
    for nth, row in enumerate(samples.rows):
        if samples.nodes[nth] != ROOT or samples.requests[nth].finished or samples.requests[nth].beam is not None:
            continue  # a draft, a beam, or a request that finished in the step before, after this one was planned
        accept(plan, sampled, row, nth, tokens, max_logits, logprobs, nums_right)
    for row, targets, tensors in prompt_logprobs:
        num_top = plan.requests[row].params.prompt_logprobs or 0
        nums_top = [num_top] * len(targets)
        sampled.prompt_logprobs.setdefault(row, []).extend(to_token_logprobs(tensors, targets, nums_top))
    return sampled


def accept(
    plan: Plan,
    sampled: Sampled,
    row: int,
    first: int,
    tokens: Sequence[int],
    max_logits: Sequence[float],
    logprobs: Mapping[int, TokenLogprobs],
    nums_right: Sequence[int] = (),
) -> None:
    """Append the tokens of a row, whose first sample is `first`: one, and one more after each draft that is right.

    A draft is right if it is the token sampled after its parent. So the result equals sampling one by one. Of drafts
    that the device has made, the device has counted the right ones.
    """
    drafts, node = plan.drafts.get(row), ROOT
    path: list[int] = []
    while True:
        nth = first + node - ROOT
        if not math.isfinite(max_logits[nth]):
            sampled.failed.append(row)
            break
        sampled.tokens[row].append(tokens[nth])
        if nth in logprobs:
            sampled.logprobs.setdefault(row, []).append(logprobs[nth])
        if drafts is None:
            break
        if drafts.on_device:
            following = node + 1 if node + 1 < nums_right[row] else None
        else:
            following = drafts.child(node, tokens[nth])
        if following is None:
            break
        node = following
        path.append(node)
    if drafts is not None:
        sampled.accepted[row] = path


def find_moves(plan: Plan, sampled: Sampled, group: int, block_size: int) -> list[tuple[int, int]]:
    """For accepted side branches of trees: (from slot, to slot) of each token, in order.

    The accepted nodes of a row then lie directly after its first token.
    """
    moves: list[tuple[int, int]] = []
    for row, path in sampled.accepted.items():
        table, first = plan.requests[row].tables[group], plan.starts[row] + 1
        for index, node in enumerate(path):
            if node != index:
                source, target = first + node, first + index
                moves.append((slot_of(table, source, block_size), slot_of(table, target, block_size)))
    return moves


def slot_of(table: Sequence[int | None], position: int, block_size: int) -> int:
    block = table[position // block_size]
    assert block is not None, "the block is behind the window"
    return block * block_size + position % block_size
