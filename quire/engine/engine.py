"""Engine: scheduler and runner put together. This is the only place that turns an EngineConfig into objects.

`step` is the heart: schedule, run, commit, deliver. Clients (`client.py`) call it; nothing above them sees this module.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.config import EngineConfig
from quire.core.kv_cache import fixed_blocks
from quire.core.pace import Pace, blend
from quire.core.plan import Plan, Sampled, Update, explain_no_token
from quire.core.policy import Batching, Continuous, Dynamic, Policy, Static, WaitingRatio
from quire.core.request import Finish, Request
from quire.core.scheduler import Scheduler
from quire.core.swap import SwapCosts
from quire.engine.backend import (
    choose_device,
    choose_dtype,
    choose_itl_target,
    choose_kv_dtype,
    choose_max_requests,
    choose_ops,
    choose_quantize,
    choose_step_tokens,
    describe_ops,
)
from quire.engine.batch import BatchBuffers, BufferShape
from quire.engine.cache import CacheTensors, lay_out, shape_blocks
from quire.engine.costs import StepCosts, time_copies
from quire.engine.faults import LESS_WORK, explain, find_loss, give_back_memory, is_out_of_memory, told_clearly
from quire.engine.memory import (
    GRAPH_BYTES,
    SMALLER_WEIGHTS,
    CacheSize,
    check_weights,
    describe,
    find_room,
    size_cache,
    size_swap,
)
from quire.engine.precompile import Precompilation
from quire.engine.runner import ModelRunner, Runner, RunningStep
from quire.engine.trial import Trial, read_libraries
from quire.errors import DeviceLost
from quire.kernels import Kernels
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder
from quire.weights.loader import (
    LoadedModel,
    build_model,
    build_random_model,
    count_weights,
    opened,
    read_config,
    shorten,
    survey,
    weight_bytes,
)

log = logging.getLogger("quire.engine")

BATCH_WAIT_S = 0.05  # of dynamic batching, and
WAITING_SERVED_RATIO, MAX_WAITING_TOKENS = 0.3, 20  # of batching by ratio, unless others are given
IDLE_S = 0.001  # between two looks at a batch that is still forming
LOOK_S = 0.0003  # between two looks at a step that is under way
MARGIN_S = 0.001  # by which a step is planned and launched before the last one is expected to end
EARLY_SHARE = 0.08  # of what a step is expected to take: so much sooner it may end
MIN_LATE_S = 0.004  # behind shorter steps nobody waits: planning would take too large a part of them


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the layers above need to know about a running engine."""

    model: str
    config: ModelConfig
    max_len: int
    max_requests: int
    weight_bytes: int
    cache: CacheSize
    device: str
    summary: str


@dataclass(slots=True)
class Launched:
    """A plan under way."""

    plan: Plan
    running: RunningStep
    begins_s: float  # as far as is known
    expected_s: float  # that it will take; minus infinity if nobody can tell

    @property
    def ends_s(self) -> float:
        """When it is expected to end at the earliest."""
        return self.begins_s + (1 - EARLY_SHARE) * self.expected_s


class Engine:
    """Requests in, updates out, one step at a time."""

    def __init__(self, scheduler: Scheduler, runner: Runner, info: EngineInfo) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.info = info
        self.step_s: float | None = None  # what the step took that the last call of `step` took in, if it did
        self._launched: deque[Launched] = deque()
        self._costs = StepCosts(scheduler.swap.costs, scheduler.pace, scheduler.max_tokens_per_step)
        self._launch_s = 0.0  # that planning and launching take
        self.before_run: Callable[[Plan], None] | None = None  # told of each plan before it is run

    def add(self, request: Request) -> None:
        self.scheduler.add(request, time.monotonic())

    def abort(self, request_id: str, finish: Finish = Finish.ABORT) -> Update | None:
        return self.scheduler.abort(request_id, finish)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._launched)

    def idle(self) -> bool:
        """Do a little of what makes later steps faster, while there is no work; whether there may be more of it."""
        return self.runner.idle(math.inf)

    def step(self) -> list[Update]:
        """Launch what the runner has room for and take in the oldest plan.

        A runner that works ahead computes the next one while the host takes in this one's tokens. Behind a long step
        the next one is planned as late as possible, so that requests which arrive meanwhile join it; until then there
        is no update.
        """
        try:
            return self._step()
        except DeviceLost:
            raise
        except Exception as error:
            return self._recover(error)
        except BaseException:
            self.scheduler.reset()
            self._drop_plans()
            raise

    def _step(self) -> list[Update]:
        self.step_s = None
        while self._may_launch and self._launch():
            pass
        left_s = self._time_left() if self._launched else IDLE_S
        if left_s > 0:
            self._pass_time(left_s)
            return []
        if self.scheduler.pace.target_s is None:  # nobody waits for single tokens, as long as the device has work
            self.runner.idle(self._launched[-1].ends_s - time.monotonic())
        oldest = self._launched.popleft()
        plan = oldest.plan
        ends_now = not oldest.running.is_done()
        try:
            sampled = oldest.running.wait()
        except Exception as error:
            return self._fail(plan, error)
        if self._launched and ends_now:
            self._launched[0].begins_s = time.monotonic()
        if sampled.seconds is not None:
            self._costs.learn(plan, sampled.seconds)
        self.step_s = sampled.seconds
        updates = self._end_failed(plan, sampled) + self.scheduler.commit(plan, sampled)
        self._sample_next()
        return updates

    def _sample_next(self) -> None:
        """The tokens of the plan behind the one just taken in can be chosen now, if they could not before."""
        if self._launched:
            following = self._launched[0]
            try:
                following.running.sample()
            except Exception as error:
                following.running = Failure(error)

    @property
    def _may_launch(self) -> bool:
        """Nothing is launched behind a plan that failed: its tokens will not come, and its blocks lack content."""
        if self._launched and self._launched[-1].running.must_land:
            return False
        return len(self._launched) < self.runner.depth and self._time_left() <= 0

    def _time_left(self) -> float:
        """Seconds until the next plan has to be made: none behind a short step, or if there is no target."""
        if len(self._launched) != 1 or self.scheduler.pace.target_s is None:
            return 0.0
        only = self._launched[0]
        if only.expected_s < MIN_LATE_S or only.running.is_done():
            return 0.0
        return only.ends_s - MARGIN_S - self._launch_s - time.monotonic()

    def _pass_time(self, left_s: float) -> None:
        """Until a plan may be made, a moment at a time."""
        if not self._launched:
            time.sleep(min(IDLE_S, left_s))
        elif not self.runner.idle(left_s):
            time.sleep(min(LOOK_S, left_s))

    def _launch(self) -> bool:
        now_s = time.monotonic()
        plan = self.scheduler.schedule(now_s)
        if plan is None:
            return False
        if self.before_run is not None:
            self.before_run(plan)
        try:
            running: RunningStep = self.runner.launch(plan)
        except Exception as error:
            running = Failure(error)
        launched_s, expected_s = time.monotonic(), None
        if self.runner.depth > 1 and not isinstance(running, Failure):
            self._launch_s = blend(self._launch_s or None, launched_s - now_s)
            expected_s = self._costs.predict(plan)
        is_behind = bool(self._launched) and not self._launched[-1].running.is_done()
        begins_s = max(launched_s, self._launched[-1].ends_s) if is_behind else launched_s
        self._launched.append(Launched(plan, running, begins_s, -math.inf if expected_s is None else expected_s))
        return True

    def _fail(self, plan: Plan, error: Exception) -> list[Update]:
        """End the requests of a plan that could not be run."""
        log.error("step %d failed with %d requests", plan.step, len(plan), exc_info=error)
        updates = self.scheduler.fail(plan, explain(error, plan))
        self._check_device(error)
        return updates

    def _recover(self, error: Exception) -> list[Update]:
        """Go on after an error in planning or in taking a plan in: one request ends, the others are computed again."""
        log.error("planning failed with %d requests", len(self.scheduler.requests), exc_info=error)
        updates = self.scheduler.recover(error, f"The engine failed on this request: {error}")
        self._drop_plans()
        self._check_device(error)
        return updates

    def _drop_plans(self) -> None:
        """Forget the plans under way, once they have ended."""
        launched, self._launched = self._launched, deque()
        for each in launched:
            with suppress(Exception):
                each.running.wait()
        self.runner.reset()

    def _check_device(self, error: Exception) -> None:
        """After an error on a GPU. One that is lost ends the engine, since no later plan could be run."""
        if self.info.device == "cuda":
            if is_out_of_memory(error):
                give_back_memory(error)
            elif loss := find_loss(torch.device("cuda")):
                raise loss from error

    def _end_failed(self, plan: Plan, sampled: Sampled) -> list[Update]:
        ends = []
        for request in (plan.requests[row] for row in sampled.failed):
            ends.append(self.scheduler.abort(request.id, Finish.ERROR, explain_no_token(request)))
        return [update for update in ends if update is not None]


class Failure:
    """In place of a running step, if it could not be launched: the error, when its turn has come."""

    must_land = True

    def __init__(self, error: Exception) -> None:
        self._error = error

    def is_done(self) -> bool:
        return True

    def sample(self) -> None:
        pass

    def wait(self) -> Sampled:
        raise self._error


def build_engine(
    config: EngineConfig,
    path: Path,
    progress: Callable[[int, int], None] | None = None,
    precompilation: Precompilation | None = None,
) -> Engine:
    """Load the model at `path` and put an engine around it."""
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    libraries = read_libraries(device, dtype) if device.type == "cuda" else None
    with told_clearly("the weights", SMALLER_WEIGHTS, device):
        loaded, ops = load(config, path, dtype, device, progress)
    model = loaded.config
    kv_dtype = choose_kv_dtype(config.kv_dtype, dtype, ops)
    max_requests = choose_max_requests(config, device)
    step_tokens = choose_step_tokens(config.max_tokens_per_step, max_requests, ops)
    specs = loaded.model.cache_specs()
    layout = lay_out(specs, shape_blocks(specs, ops, kv_dtype, config.block_size))
    if precompilation is not None:
        if ops.fused is None:
            precompilation.cancel()  # these ops need none of it
        else:
            precompilation.wait()
    step_bytes = 0  # a CPU has nothing set aside for steps
    if libraries is not None:
        trial = Trial(loaded.model, ops, layout, step_tokens, max_requests, model.max_len, config.block_size)
        step_bytes = trial.measure(libraries)
    room = find_room(device, step_bytes)
    size = size_cache(
        block_bytes=layout.block_bytes,
        block_size=config.block_size,
        windows=layout.windows,
        num_fixed=fixed_blocks(model.max_len, config.block_size, layout.num_encoder_groups, layout.num_state_groups),
        max_tokens_per_step=step_tokens,
        num_blocks=config.num_blocks,
        kv_memory=config.kv_memory,
        max_len=model.max_len,
        max_len_wanted=config.max_len,
        max_requests=max_requests,
        room=room,
    )
    computes = describe_ops(ops, dtype)
    kv_dtypes = " and ".join(dict.fromkeys(spec.dtype or kv_dtype for spec in specs))
    summary = describe(
        config.model, model.family, computes, loaded.weight_bytes, room.kept, size, kv_dtypes, max_requests
    )  # fmt: skip
    info = EngineInfo(config.model, model, size.max_len, max_requests, loaded.weight_bytes, size, device.type, summary)
    swap_slots = size_swap(config.swap_memory, size.block_bytes, device)
    with told_clearly("the cache", f"End other programs on the GPU, or {LESS_WORK}.", device):
        cache = CacheTensors(layout, size, device, swap_slots)
        shape = BufferShape(
            step_tokens, max_requests, size.max_len, layout.windows, config.block_size, model.vocab_size, device,
            layout.num_fixed_groups,
        )  # fmt: skip
        decoder = ops.record(loaded.model, cache.layers, step_tokens)
        runner = build_runner(decoder, cache, ops, shape, model, dtype, step_bytes + GRAPH_BYTES)
        runner.prepare()
        costs = SwapCosts(copy_s=time_copies(cache, device) if swap_slots else None)
    scheduler = Scheduler(
        size.num_blocks,
        size.block_size,
        step_tokens,
        max_requests,
        Policy(choose_batching(config, max_requests), config.order),
        windows=layout.windows,
        num_encoder_groups=layout.num_encoder_groups,
        num_state_groups=layout.num_state_groups,
        prefix_cache=config.prefix_cache,
        swap_slots=swap_slots,
        costs=costs,
        pace=Pace(choose_itl_target(config.itl_target_ms, device), ops.row_unit),
    )
    return Engine(scheduler, runner, info)


def load(
    config: EngineConfig,
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None] | None,
) -> tuple[LoadedModel, Kernels]:
    """The model, and the ops that it is made of."""
    if config.weights == "random":
        model = shorten(read_config(path), config.max_len, path)
        ops = choose_ops(config, model, dtype, device)
        check_weights(count_weights(model, ops) * dtype.itemsize, device)
        rounding = None if config.quantize == "none" else config.quantize
        return build_random_model(model, dtype=dtype, device=device, ops=ops, quantize=rounding), ops
    with opened(path) as (described, checkpoint):
        model = shorten(described, config.max_len, path)
        ops = choose_ops(config, model, dtype, device)
        stored = survey(model, checkpoint, ops)
        quantize = choose_quantize(config.quantize, stored)
        check_weights(weight_bytes(stored, dtype), device)
        return build_model(
            model, checkpoint, dtype=dtype, device=device, ops=ops, quantize=quantize, progress=progress
        ), ops


def build_runner(
    decoder: Decoder,
    cache: CacheTensors,
    ops: Kernels,
    shape: BufferShape,
    model: ModelConfig,
    dtype: torch.dtype,
    graph_bytes: int,
) -> Runner:
    if ops.fused is None:
        return ModelRunner(decoder, cache, BatchBuffers(shape), ops)
    from quire.engine.gpu_batch import GpuBuffers, Heads  # these load Triton
    from quire.engine.gpu_runner import GpuRunner
    from quire.kernels.cuda.attention import varlen_items
    from quire.kernels.cuda.attention.scoring import Scoring

    scoring = Scoring(model.scale, None, None, model.attention_softcap)
    uses_items = not ops.exact and varlen_items.suits(dtype, cache.layers[0], scoring)
    group = model.num_heads // model.num_kv_heads
    heads = Heads(group, model.num_kv_heads, model.windows[-1], uses_items, ops.exact)
    return GpuRunner(decoder, cache, GpuBuffers(shape, heads), ops, graph_bytes)


def choose_batching(config: EngineConfig, max_requests: int) -> Batching:
    size = config.batch_size or max_requests
    if config.batching == "static":
        return Static(size)
    if config.batching == "dynamic":
        return Dynamic(size, BATCH_WAIT_S if config.batch_wait is None else config.batch_wait)
    if config.batching == "ratio":
        ratio, tokens = config.waiting_served_ratio, config.max_waiting_tokens
        return WaitingRatio(
            WAITING_SERVED_RATIO if ratio is None else ratio, MAX_WAITING_TOKENS if tokens is None else tokens
        )  # fmt: skip
    return Continuous()
