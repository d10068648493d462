"""Where the measured profile of an engine is kept, and what belongs to it: its options, its machine, its sizes.

`bench/phases.py` measures profiles, and `step_meter.py` keeps them fresh while an engine serves.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quire.capacity.profile import CapacityProfile, EngineSizes, load_profile
from quire.config import EngineConfig, cache_dir
from quire.engine.backend import choose_itl_target
from quire.errors import InvalidParams
from quire.kernels import isa

if TYPE_CHECKING:
    from quire.engine.engine import Engine

# The options of an engine that its costs depend on: each combination has a profile of its own.
DECIDE_COSTS = (
    "device",
    "dtype",
    "kernels",
    "weights",
    "quantize",
    "kv_dtype",
    "exact",
    "block_size",
    "threads",
    "tensor_parallel_size",
)

log = logging.getLogger("quire.engine")


def profile_path(config: EngineConfig) -> Path:
    """Where the profile of a configuration is kept."""
    options = [(name, getattr(config, name)) for name in DECIDE_COSTS]
    digest = hashlib.blake2b(repr(options).encode(), digest_size=6).hexdigest()
    return cache_dir() / "capacity" / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', config.model)}-{digest}.json"


def describe_machine(config: EngineConfig) -> str:
    """The GPU, or the CPU and its threads. The engine has imported torch if it needs it."""
    cpu, torch = isa.read_cpu(), sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"{cpu.model}, {config.threads or cpu.cores} threads"


def read_sizes(engine: Engine, itl_target_s: float | None) -> EngineSizes:
    """The sizes of a running engine, with a latency target."""
    scheduler, info = engine.scheduler, engine.info
    return EngineSizes(
        info.cache.num_blocks,
        info.cache.block_size,
        scheduler.max_tokens_per_step,
        scheduler.max_requests,
        info.max_len,
        scheduler.kv.windows,
        prefix_cache=True,
        itl_target_s=itl_target_s,
        row_unit=scheduler.pace.unit,
        num_host_blocks=scheduler.swap.num_host_blocks,
        copy_s=scheduler.swap.costs.copy_s,
        depth=engine.runner.depth,
        num_encoder_groups=scheduler.kv.num_encoder_groups,
        num_state_groups=scheduler.kv.num_state_groups,
    )


def server_target_s(engine: Engine) -> float | None:
    """The latency target that a server has by default."""
    return choose_itl_target(None, engine.info.device)


def find_calibration(config: EngineConfig, engine: Engine) -> CapacityProfile | None:
    """What `quire bench phases --save` measured of such an engine on this machine. None if there is nothing usable."""
    path = profile_path(config)
    if not path.exists():
        return None
    try:
        profile = load_profile(path)
    except InvalidParams as error:
        log.info("steps are not predicted before enough have been served: %s", error)
        return None
    here = describe_machine(config)
    if profile.machine != here or profile.sizes.windows != engine.scheduler.kv.windows:
        log.info("%s was measured on %s; steps are predicted once enough have been served", path, profile.machine)
        return None
    return profile
