"""`quire bench phases`: steps of prompts and of decoding over batch sizes and contexts, and the cost fitted to them.

The engine answers random prompts, greedy, without prefix cache and drafts. Every run of a scenario has the same steps,
so each step's time is the median of its runs. Every fifth scenario is left out of a first fit, whose errors are
reported. `--save` writes the profile that `quire simulate` reads.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quire.capacity.model_size import ModelSize
from quire.capacity.profile import CapacityProfile, EngineSizes
from quire.capacity.step_cost import Cost, MeasuredStep, StepShape, errors, fit, fit_host, shape_of
from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.client import InProcess
from quire.engine.limits import Limits, measure_limits
from quire.engine.machine import machine
from quire.engine.observer import PlanObserver
from quire.engine.profiles import describe_machine, read_sizes, server_target_s
from quire.engine.sizing import measure_on_cpu, measure_on_gpu
from quire.errors import InvalidParams

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512)
PROMPTS = (8, 40, 100, 250, 700, 2000, 4000)
MAX_PROMPT_TOKENS = 4_000  # of all requests of a scenario
DECODE_STEPS = 8  # in which all requests of a scenario decode
HELD_OUT = 5  # every fifth scenario is left out of the first fit
MIN_SCENARIOS = 2

Document = dict[str, Any]


class Scenario(NamedTuple):
    batch: int
    prompt_tokens: int

    def output_tokens(self, sizes: EngineSizes) -> int:
        """Long enough that the first request still decodes when the last prompt is computed."""
        num_prefill_steps = -(-self.batch * self.prompt_tokens // max(1, sizes.max_tokens_per_step - self.batch))
        return num_prefill_steps + DECODE_STEPS


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """One batch size and prompt length. Decode seconds are of a step in which all requests decode."""

    scenario: Scenario
    prefill_s: float
    decode_s: float | None
    steps: list[MeasuredStep]


def run(
    config: EngineConfig,
    path: Path,
    *,
    repeats: int = 3,
    report: Callable[[int, int | None], None] | None = None,
) -> tuple[CapacityProfile, Document]:
    """Measure an engine and fit its cost. Returns the profile, and the document that `--json` prints."""
    client = InProcess(config, path)
    sizes = read_sizes(client.engine, server_target_s(client.engine))
    scenarios = list(choose_scenarios(sizes))
    if len(scenarios) < MIN_SCENARIOS:
        raise InvalidParams(
            f"The engine has room for {len(scenarios)} of the scenarios, and a fit needs {MIN_SCENARIOS}. "
            "Raise max_len, max_requests or the memory for the cache."
        )
    size = model_size(config, client.info.device, path)
    measure(client, scenarios[1], sizes, 1)  # warms up
    limits = measure_limits(config, client.info, path)
    results = []
    for number, scenario in enumerate(scenarios):
        if report:
            report(number, len(scenarios))
        results.append(measure(client, scenario, sizes, repeats))
    profile = make_profile(config, sizes, results)
    limits = limits.best(measure_limits(config, client.info, path))
    document = describe(config, size, limits, profile, results)
    return profile, {**document, "engine": client.info.summary}


def model_size(config: EngineConfig, device: str, path: Path) -> ModelSize:
    size, _ = measure_on_cpu(config, path) if device == "cpu" else measure_on_gpu(config, path)
    return size


def choose_scenarios(sizes: EngineSizes) -> Iterator[Scenario]:
    """Batch sizes and prompt lengths that fit into the cache, and take not too long."""
    for batch in BATCHES:
        for prompt in PROMPTS:
            scenario = Scenario(batch, prompt)
            length = prompt + scenario.output_tokens(sizes)
            blocks = batch * -(-length // sizes.block_size) * len(sizes.windows)
            if (
                batch <= sizes.max_requests
                and length <= sizes.max_len
                and blocks <= sizes.num_blocks
                and batch * prompt <= MAX_PROMPT_TOKENS
            ):
                yield scenario


def measure(client: InProcess, scenario: Scenario, sizes: EngineSizes, repeats: int) -> ScenarioResult:
    """Run a scenario several times. Each step's time is the median of its runs."""
    runs = [list(run_scenario(client, scenario, sizes, number)) for number in range(repeats)]
    shapes = [step.shape for step in runs[0]]
    assert all([step.shape for step in each] == shapes for each in runs), "runs of a scenario differ in their steps"
    steps = [
        MeasuredStep(shape, *(statistics.median(column) for column in zip(*(step[1:] for step in each), strict=True)))
        for shape, each in zip(shapes, zip(*runs, strict=True), strict=True)
    ]
    return summarize(scenario, steps)


def summarize(scenario: Scenario, steps: list[MeasuredStep]) -> ScenarioResult:
    decode = [step for step in steps if step.shape.tokens == step.shape.sampled == scenario.batch]
    prefill_s = sum(step.seconds for step in steps if step.shape.tokens > step.shape.sampled)
    return ScenarioResult(scenario, prefill_s, median_step(decode).seconds if decode else None, thin(steps, decode))


def thin(steps: Sequence[MeasuredStep], decode: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """The steps with prompts, and one for all steps in which the whole batch decodes."""
    return [step for step in steps if step not in decode] + ([median_step(decode)] if decode else [])


def median_step(steps: Sequence[MeasuredStep]) -> MeasuredStep:
    middle = steps[len(steps) // 2].shape
    seconds, host_s = (statistics.median(column) for column in zip(*(step[1:] for step in steps), strict=True))
    return MeasuredStep(middle, seconds, host_s)


def run_scenario(client: InProcess, scenario: Scenario, sizes: EngineSizes, number: int) -> Iterator[MeasuredStep]:
    """Run requests to their end. The time of a step includes its planning, and on a GPU is the device's."""
    rng = random.Random(f"{scenario} {number}")
    vocabulary = client.info.config.vocab_size
    max_tokens = scenario.output_tokens(sizes)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for index in range(scenario.batch):
        prompt = [rng.randrange(vocabulary) for _ in range(scenario.prompt_tokens)]
        client.add(Request(f"{number} {index}", prompt, params, max_tokens=max_tokens))
    engine, shapes = client.engine, deque[StepShape]()
    engine.observers.append(PlanObserver(lambda plan: shapes.append(shape_of(plan, sizes.windows))))
    try:
        while engine.has_work:
            begin_s = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - begin_s
            if engine.step_s is not None:  # a step has been committed
                is_host_hidden = sizes.depth > 1
                host_s = 0.0 if is_host_hidden else seconds - engine.step_s
                yield MeasuredStep(shapes.popleft(), engine.step_s if is_host_hidden else seconds, host_s)
    finally:
        engine.observers.pop()


def make_profile(config: EngineConfig, sizes: EngineSizes, results: Sequence[ScenarioResult]) -> CapacityProfile:
    held_out = [step for number, each in enumerate(results) if number % HELD_OUT == 0 for step in each.steps]
    kept = [step for number, each in enumerate(results) if number % HELD_OUT for step in each.steps]
    found = errors(fit(kept, sizes.windows), held_out)
    cost = fit([*kept, *held_out], sizes.windows)
    median, p95 = (float(found[int(share * (len(found) - 1))]) for share in (0.5, 0.95))
    host_step_s, host_row_s = fit_host([*kept, *held_out])
    machine_name, now = describe_machine(config), time.time()
    return CapacityProfile(config.model, machine_name, sizes, cost, median, p95, host_step_s, host_row_s, now)


def describe(
    config: EngineConfig, size: ModelSize, limits: Limits, profile: CapacityProfile, results: Sequence[ScenarioResult]
) -> Document:
    """The document that `--json` prints."""
    return {
        "machine": machine(config),
        "model": profile.model,
        "rows": [row(result, profile.cost, size) for result in results],
        "error": {"median": profile.median_error, "p95": profile.p95_error},
        "limits": asdict(limits),
    }


def row(result: ScenarioResult, cost: Cost, size: ModelSize) -> Document:
    """A scenario as measured, and as the fitted cost predicts it. `work` is what the roofline needs."""
    batch, prompt = result.scenario
    prefill = [step for step in result.steps if step.shape.tokens > step.shape.sampled]
    decode = result.steps[-1:] if result.decode_s is not None else []
    return {
        "batch": batch,
        "prompt_tokens": prompt,
        "prefill_tokens_per_s": batch * prompt / result.prefill_s if result.prefill_s else None,
        "decode_step_ms": 1e3 * result.decode_s if result.decode_s is not None else None,
        "predicted_ms": predict_ms(decode, cost),
        "prefill_ms": 1e3 * result.prefill_s if result.prefill_s else None,
        "predicted_prefill_ms": predict_ms(prefill, cost),
        "prefill_work": work(prefill, size),
        "decode_work": work(decode, size),
    }


def predict_ms(steps: Sequence[MeasuredStep], cost: Cost) -> float | None:
    return 1e3 * sum(cost.seconds(step.shape) for step in steps) if steps else None


def work(steps: Sequence[MeasuredStep], size: ModelSize) -> Document | None:
    """Multiplications and additions, bytes of weights and cache that are read, and seconds."""
    if not steps:
        return None
    shapes = [step.shape for step in steps]
    return {
        "flop": sum(size.product_flops(shape) + size.attention_flops(shape) for shape in shapes),
        "bytes": sum(size.weights_read(shape) + size.keys_read(shape) for shape in shapes),
        "seconds": sum(step.seconds for step in steps),
    }
