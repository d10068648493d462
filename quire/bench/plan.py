"""The engine that `quire plan` plans for: this machine's from its measured profile, or a GPU's from its data sheet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from quire.bench.profiles import describe_age, find_profile
from quire.capacity.memory import Memory, engine_memory, gpu_blocks
from quire.capacity.model_size import ModelSize
from quire.capacity.plan import PlannedEngine
from quire.capacity.profile import CapacityProfile, EngineSizes
from quire.capacity.roofline import MEASURED_GPU, SPREAD, Roofline, find_gpu, rates_of
from quire.config import EngineConfig
from quire.engine.memory import CUDA_SHARE, GIB, WEIGHTS_REMEDY, readable
from quire.engine.profiles import profile_path
from quire.engine.sizing import gpu_sizes, measure_on_cpu, measure_on_gpu, process_bytes
from quire.errors import InvalidParams, NotEnoughMemory
from quire.store import resolve

SERVED_STEPS = 1000  # before a profile's errors while serving are believed
MAX_SERVED_ERROR = 0.1


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the figures of a plan come from."""

    machine: str
    kind: str  # measured, extrapolated or not measured
    note: str


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What is known of an engine. `engine` is None if its steps have not been measured."""

    size: ModelSize
    sizes: EngineSizes
    memory: Memory
    origin: Origin
    engine: PlannedEngine | None


def plan_here(config: EngineConfig, profile_file: Path | None) -> EnginePlan:
    """This machine, or the one that a profile was measured on."""
    if profile_file is None and not profile_path(config).exists():
        return plan_unmeasured(config)
    profile = find_profile(config, profile_file)
    path = resolve(profile.model).path
    named = replace(config, model=profile.model)
    is_gpu = profile.sizes.depth > 1
    size = measure_on_gpu(named, path)[0] if is_gpu else measure_on_cpu(named, path)[0]
    rates = rates_of(profile.cost, size, profile.sizes, profile.host_step_s, profile.host_row_s)
    memory = engine_memory(size, profile.sizes, process_bytes(), is_gpu=is_gpu)
    engine = PlannedEngine(size, profile.sizes, profile.cost, rates, profile.median_error)
    return EnginePlan(
        size, profile.sizes, memory, Origin(profile.machine, "measured", describe_errors(profile)), engine
    )


def describe_errors(profile: CapacityProfile) -> str:
    """How old a profile is and how far it is off, as a clause."""
    age = describe_age(profile.measured_at)
    median, p95 = 100 * profile.median_error, 100 * profile.p95_error
    if profile.served_steps >= SERVED_STEPS and (profile.served_error or 0.0) > MAX_SERVED_ERROR:
        return (
            f"not calibrated: the last {profile.served_steps:,} steps that were served were off by "
            f"{100 * (profile.served_error or 0.0):.0f}% in the median. Measure again: quire bench phases MODEL --save"
        )
    return (
        f"measured{f' {age}' if age else ''}: predicted steps are {median:.1f}% off in the median and {p95:.1f}% at "
        "the 95th percentile"
    )


def plan_unmeasured(config: EngineConfig) -> EnginePlan:
    if config.device == "cuda":
        raise InvalidParams(
            "No steps of this GPU have been measured. Measure them: quire bench phases MODEL --save (a minute or two); "
            "or plan from a data sheet with --gpu."
        )
    size, sizes = measure_on_cpu(config, resolve(config.model).path)
    note = f"no steps measured yet; measure them: quire bench phases {config.model} --save (a minute or two)"
    memory = engine_memory(size, sizes, process_bytes())
    return EnginePlan(size, sizes, memory, Origin("this machine's CPU", "not measured", note), None)


def plan_gpu(config: EngineConfig, name: str) -> EnginePlan:
    """A GPU that need not be here."""
    sheet = find_gpu(name)
    size, layout = measure_on_gpu(config, resolve(config.model).path)
    sizes = gpu_sizes(config, size, layout, 1)
    memory_bytes = int(sheet.memory_gib * GIB)
    num_blocks = gpu_blocks(size, memory_bytes, sizes.max_tokens_per_step, sizes.max_requests, CUDA_SHARE)
    if config.kv_memory is not None:
        num_blocks = min(num_blocks, int(config.kv_memory * GIB) // size.block_bytes)
    num_blocks = min(num_blocks, config.num_blocks or num_blocks)
    if not num_blocks and config.kv_memory is not None and size.block_bytes > config.kv_memory * GIB:
        raise NotEnoughMemory(
            f"kv_memory is {config.kv_memory:g} GiB, less than one block of the cache takes "
            f"({readable(size.block_bytes)}). Raise it."
        )
    if not num_blocks:
        raise NotEnoughMemory(
            f"The weights take {readable(size.weight_bytes)}, and a {sheet.name} has {sheet.memory_gib:g} GiB, so "
            f"nothing is left for a cache. {WEIGHTS_REMEDY}"
        )
    sizes = gpu_sizes(config, size, layout, num_blocks)
    rates = sheet.rates()
    note = (
        f"extrapolated: a data sheet times the shares of it that quire reaches on an H200, ±{100 * SPREAD:.0f}%"
        f"{'' if sheet.name == MEASURED_GPU else '; quire has not been measured on this GPU'}"
    )
    memory = engine_memory(size, sizes, 0, is_gpu=True)
    engine = PlannedEngine(size, sizes, Roofline(size, rates), rates)
    return EnginePlan(size, sizes, memory, Origin(sheet.name, "extrapolated", note), engine)
