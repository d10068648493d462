"""The measured profile of a configuration, with the sizes that options change. Simulations and plans begin with it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from quire.capacity.profile import CapacityProfile, load_profile
from quire.config import EngineConfig
from quire.engine.profiles import DECIDE_COSTS, describe_machine, profile_path
from quire.errors import InvalidParams
from quire.kernels.cuda_driver import count_devices

MAX_BLOCKS = 1 << 25  # the simulator's scheduler keeps some bytes of each


def find_profile(config: EngineConfig, path: Path | None) -> CapacityProfile:
    """The profile at `path`, or the one of this machine, with the sizes that the configuration changes."""
    profile = load_profile(path or profile_path(config))
    if path:
        check_selection(config, profile)
    else:
        check_machine(config, profile)
    if config.max_len is not None and config.max_len > profile.sizes.max_len:
        raise InvalidParams(
            f"max_len is {config.max_len:,}, but the engine that was measured takes requests of "
            f"{profile.sizes.max_len:,} tokens. Lower it, or measure with a "
            "larger one: quire bench phases MODEL --save --max-len N."
        )
    return resize(profile, config)


def check_selection(config: EngineConfig, profile: CapacityProfile) -> None:
    """A profile that is named decides what these options would choose one by."""
    given = [name for name in DECIDE_COSTS if getattr(config, name) != getattr(EngineConfig(), name)]
    if given:
        raise InvalidParams(f"{given[0]} is part of what --profile has measured; leave it out.")
    if config.model not in (EngineConfig().model, profile.model):
        raise InvalidParams(f"--profile is of {profile.model}, not of {config.model}; leave MODEL out.")


def check_machine(config: EngineConfig, profile: CapacityProfile) -> None:
    """A cache directory may come from another machine. GPUs are not compared: their names need their libraries."""
    here = describe_machine(config)
    if (config.device == "cpu" or not count_devices()) and profile.machine != here:
        raise InvalidParams(
            f"The profile was measured on {profile.machine}, and this is {here}. Measure again: quire bench phases "
            "MODEL --save; or name the file with --profile to simulate the other machine."
        )


def resize(profile: CapacityProfile, config: EngineConfig) -> CapacityProfile:
    resized = profile.resized(
        num_blocks=config.num_blocks,
        max_requests=config.max_requests,
        max_tokens_per_step=config.max_tokens_per_step,
        max_len=config.max_len,
        prefix_cache=config.prefix_cache,
    )
    if config.itl_target_ms is not None:
        target_s = config.itl_target_ms / 1e3 or None  # 0 is no target
        resized = replace(resized, sizes=replace(resized.sizes, itl_target_s=target_s))
    sizes = resized.sizes
    if sizes.num_blocks > MAX_BLOCKS:
        raise InvalidParams(f"num_blocks is {sizes.num_blocks:,}; a simulation has at most {MAX_BLOCKS:,}. Lower it.")
    if sizes.max_tokens_per_step < sizes.max_requests:
        raise InvalidParams(
            f"max_tokens_per_step is {sizes.max_tokens_per_step}, below max_requests ({sizes.max_requests}): every "
            "running request needs a token a step. Raise the one or lower the other."
        )
    return resized


def describe_age(measured_at: float) -> str:
    """'3 hours ago'; empty if the time is not known."""
    if not measured_at:
        return ""
    seconds = max(0.0, time.time() - measured_at)
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count:,} {unit}{'s' if count > 1 else ''} ago"
    return "less than a minute ago"
