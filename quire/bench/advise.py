"""`quire advise`: which option of an engine would serve a load better. One option at a time, through the simulator.

Options that only change the schedule are simulated with the measured costs. Options that change the cost of a step
need a profile of their own: one that is there is used, `--measure` makes the others, and without it they are listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from quire.bench.phases import run as measure_phases
from quire.bench.profiles import find_profile, resize
from quire.bench.replicas import RecordedLoad, ServerLoad, simulate_servers
from quire.bench.serve.traces import TraceRequest
from quire.bench.simulate import simulate, without_idle_cache
from quire.capacity.figures import speculation_speedup
from quire.capacity.profile import CapacityProfile
from quire.config import EngineConfig, flag_with_value
from quire.engine.batching import make_policy
from quire.engine.profiles import DECIDE_COSTS, profile_path
from quire.engine.sizing import measure_on_cpu, measure_on_gpu
from quire.errors import QuireError
from quire.kernels.isa import usable_cores

WORTH = 0.05  # gains below this are not advised
NUM_REPEATS = 2  # of each scenario, where an option is measured
MAX_DRAFTS = 8

# Goals, and whether less is better.
GOALS = {
    "e2e": ("e2e_ms", True),
    "ttft": ("ttft_ms", True),
    "tpot": ("tpot_ms", True),
    "throughput": ("output_tokens_per_s", False),
}

Summary = dict[str, Any]
Report = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True)
class Knob:
    """A configuration in which one option has another value. `changed` names it first, then what follows from it."""

    config: EngineConfig
    changed: tuple[str, ...]

    @property
    def option(self) -> str:
        """The changed option with its value."""
        (field,) = (each for each in fields(self.config) if each.name == self.changed[0])
        return flag_with_value(field, getattr(self.config, field.name))

    def command(self, program: str = "quire serve") -> str:
        """The command that has the option."""
        return " ".join([program, self.config.model, *flags(self.config)])

    @property
    def changes_cost(self) -> bool:
        return any(name in DECIDE_COSTS for name in self.changed)


@dataclass(frozen=True, slots=True)
class Advice:
    """What an option would do. Gains are shares by goal; None: not known without measuring."""

    option: str
    command: str
    gains: dict[str, float] | None
    note: str = ""


def flags(config: EngineConfig) -> list[str]:
    """The options that differ from the defaults, as on a command line."""
    return [
        flag_with_value(each, getattr(config, each.name))
        for each in fields(config)
        if each.name != "model" and getattr(config, each.name) != each.default
    ]


def list_knobs(config: EngineConfig, profile: CapacityProfile) -> Iterator[Knob]:
    """Each option with other values than the configuration has."""
    sizes = profile.sizes

    def knob(**changes: Any) -> Knob:
        return Knob(replace(config, **changes), tuple(changes))

    if config.batching == "continuous":
        yield knob(batching="static")
        yield knob(batching="dynamic")
        yield knob(batching="ratio")
    else:
        yield knob(batching="continuous", batch_size=None, batch_wait=None, waiting_served_ratio=None,
                   max_waiting_tokens=None)  # fmt: skip
    for tokens in (sizes.max_tokens_per_step // 4, sizes.max_tokens_per_step // 2):
        if tokens >= sizes.max_requests:
            yield knob(max_tokens_per_step=tokens)
    for requests in (sizes.max_requests // 4, sizes.max_requests // 2):
        if requests:
            yield knob(max_requests=requests)
    target_ms = 1e3 * (sizes.itl_target_s or 0.0)
    for other_ms in (0.0, target_ms / 2, target_ms * 2):
        if other_ms != target_ms:
            yield knob(itl_target_ms=other_ms)
    yield knob(prefix_cache=not config.prefix_cache)
    for blocks in (sizes.num_blocks // 2, sizes.num_blocks * 2):
        if blocks:
            yield knob(num_blocks=blocks)
    yield from list_cost_knobs(config, profile)


def list_cost_knobs(config: EngineConfig, profile: CapacityProfile) -> Iterator[Knob]:
    """Options that change what a step costs."""
    is_gpu = profile.sizes.depth > 1
    changes: list[tuple[str, Any]] = [("kv_dtype", "fp8"), ("block_size", 32)]
    changes += [("quantize", "fp8"), ("quantize", "int4")] if is_gpu else [("quantize", "int8"), ("quantize", "int4")]
    changes += [] if is_gpu else [("kv_dtype", "int8")]
    if not is_gpu and (config.threads or usable_cores()) > 1:
        changes.append(("tensor_parallel_size", 2))
    for name, value in changes:
        if value != getattr(config, name):
            options: dict[str, Any] = {name: value}
            yield Knob(replace(config, **options), (name,))


def run_load(profile: CapacityProfile, config: EngineConfig, entries: Sequence[TraceRequest]) -> Summary:
    return dict(simulate(profile, entries, make_policy(config, profile.sizes.max_requests))["summary"])


def gains(base: Summary, other: Summary) -> dict[str, float]:
    """How much better each goal is: the share of time that is saved, or of throughput that is added."""
    found = {}
    for goal, (name, is_less_better) in GOALS.items():
        before, after = (mean(summary[name]) for summary in (base, other))
        if before and after is not None:
            found[goal] = 1 - after / before if is_less_better else after / before - 1
    if other["num_ok"] < base["num_ok"]:
        return dict.fromkeys(found, -1.0)  # it refuses requests
    return found


def mean(value: Any) -> float | None:
    """Of a distribution; a number is its own mean."""
    found = value["mean"] if isinstance(value, dict) else value
    return None if found is None else float(found)


def advise(
    config: EngineConfig,
    profile: CapacityProfile,
    entries: Sequence[TraceRequest],
    *,
    model_path: Path,
    measures: bool = False,
    acceptance: float | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Simulate every option. With `measures` those that change costs are measured first, if they were not."""
    knobs = [knob for knob in list_knobs(config, profile) if is_possible(knob, profile, model_path)]
    base = run_load(profile, config, entries)
    found = []
    for number, knob in enumerate(knobs):
        if report:
            report(number, len(knobs))
        found.append(try_knob(knob, profile, entries, base, model_path, measures=measures))
    found.append(advise_speculation(profile, config, base, entries, acceptance))
    found.append(advise_replicas(profile, config, base, entries))
    return {"base": base, "advice": found, "num_requests": len(entries)}


def is_possible(knob: Knob, profile: CapacityProfile, model_path: Path) -> bool:
    """Whether an engine can be built so: a quantized model cannot be rounded, for one. Headers say it."""
    if not knob.changes_cost:
        return True
    try:
        if profile.sizes.depth > 1:
            measure_on_gpu(knob.config, model_path)
        else:
            measure_on_cpu(knob.config, model_path)
    except QuireError:
        return False
    return True


def try_knob(
    knob: Knob,
    profile: CapacityProfile,
    entries: Sequence[TraceRequest],
    base: Summary,
    model_path: Path,
    *,
    measures: bool = False,
) -> Advice:
    option, command = knob.option, knob.command()
    if not knob.changes_cost:
        return Advice(option, command, gains(base, run_load(resize(profile, knob.config), knob.config, entries)))
    path = profile_path(knob.config)
    if measures and not path.exists():
        measured, _ = measure_phases(knob.config, model_path, repeats=NUM_REPEATS)
        measured.save(path)
    if not path.exists():
        return Advice(option, command, None, f"measure it: {knob.command('quire bench phases')} --save")
    found = find_profile(knob.config, None)
    return Advice(option, command, gains(base, run_load(found, knob.config, entries)))


def advise_speculation(
    profile: CapacityProfile,
    config: EngineConfig,
    base: Summary,
    entries: Sequence[TraceRequest],
    acceptance: float | None,
) -> Advice:
    """By the formula of figures.py at the load's mean batch: drafts are not simulated."""
    command = Knob(replace(config, speculate="suffix"), ("speculate",)).command()
    if acceptance is None:
        return Advice(
            "--speculate suffix", command, None,
            f"measure the chance that a draft is right: quire bench speculation {config.model}; then --acceptance",
        )  # fmt: skip
    batch, context = mean_batch(base), mean_context(entries)
    speedups = [
        speculation_speedup(profile.cost, profile.sizes.windows, batch, context, acceptance, drafts)
        for drafts in range(1, MAX_DRAFTS + 1)
        if batch * (1 + drafts) <= profile.sizes.max_tokens_per_step
    ]
    gain = 1 - 1 / max(speedups, default=1.0)
    return Advice("--speculate suffix", command, {"tpot": gain}, f"a formula, at batch {batch:,}, not simulated")


def mean_batch(base: Summary) -> int:
    """Requests in the engine on average: arrivals a second times the seconds of each (Little's law)."""
    seconds = (mean(base["e2e_ms"]) or 0.0) / 1e3
    return max(1, round((base["requests_per_s"] or 0.0) * seconds))


def mean_context(entries: Sequence[TraceRequest]) -> int:
    return max(1, sum(entry.prompt_tokens + entry.output_tokens // 2 for entry in entries) // len(entries))


def advise_replicas(
    profile: CapacityProfile, config: EngineConfig, base: Summary, entries: Sequence[TraceRequest]
) -> Advice:
    """Two engines. On a GPU the second needs another GPU; on a CPU each has half of the threads: another cost."""
    command = f"{Knob(config, ()).command()} --replicas 2"
    note = "with a second GPU" if profile.sizes.depth > 1 else ""
    if profile.sizes.depth == 1:
        half = replace(config, threads=max(1, (config.threads or usable_cores()) // 2))
        if not profile_path(half).exists():
            measure = (
                f"measure an engine with half of the threads: {Knob(half, ()).command('quire bench phases')} --save"
            )
            return Advice("--replicas 2", command, None, measure)
        profile = find_profile(half, None)
    policy = partial(make_policy, config, profile.sizes.max_requests)
    load = ServerLoad(without_idle_cache(profile, entries), policy, RecordedLoad(entries), 2, 1, {})
    return Advice("--replicas 2", command, gains(base, simulate_servers(load, 1).summary()), note)
