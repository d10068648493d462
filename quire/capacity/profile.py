"""CapacityProfile: an engine as the simulator needs it: sizes of the scheduler and the cost of a step, in one file.

`quire bench phases --save` measures and writes it; `quire simulate` reads it.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quire import __version__
from quire.capacity.step_cost import Cost, StepCost
from quire.core.kv_cache import fixed_blocks, peak_blocks
from quire.core.pace import Pace
from quire.core.policy import Policy
from quire.core.scheduler import Scheduler
from quire.core.swap import SwapCosts
from quire.errors import InvalidParams


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """What a scheduler is built with."""

    num_blocks: int
    block_size: int
    max_tokens_per_step: int
    max_requests: int
    max_len: int
    windows: tuple[int | None, ...]
    prefix_cache: bool = True
    itl_target_s: float | None = None
    row_unit: int = 1
    num_host_blocks: int = 0
    copy_s: float | None = None  # of a block, to the host and back
    depth: int = 1  # plans in flight
    num_encoder_groups: int = 0
    num_state_groups: int = 0

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_tokens_per_step", "max_requests", "max_len", "row_unit", "depth"):
            is_count(name, getattr(self, name), 1)
        for name in ("num_host_blocks", "num_encoder_groups", "num_state_groups"):
            is_count(name, getattr(self, name), 0)
        for window in self.windows:
            if window is not None:
                is_count("a window", window, 1)
        for name, may_be_0 in (("itl_target_s", False), ("copy_s", True)):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
            if value is not None and not (is_number and (value or may_be_0)):
                raise ValueError(f"{name} is {value!r}")
        if not isinstance(self.prefix_cache, bool):
            raise ValueError(f"prefix_cache is {self.prefix_cache!r}")

    def request_blocks(self, length: int) -> int:
        """The most blocks of the cache that a request of `length` tokens holds, as the scheduler counts them."""
        grown = peak_blocks(length, self.max_tokens_per_step, self.block_size, self.windows)
        return grown + fixed_blocks(length, self.block_size, self.num_encoder_groups, self.num_state_groups)

    def scheduler(self, policy: Policy | None = None) -> Scheduler:
        return Scheduler(
            self.num_blocks,
            self.block_size,
            self.max_tokens_per_step,
            self.max_requests,
            policy,
            windows=self.windows,
            num_encoder_groups=self.num_encoder_groups,
            num_state_groups=self.num_state_groups,
            prefix_cache=self.prefix_cache,
            num_host_blocks=self.num_host_blocks,
            costs=SwapCosts(copy_s=self.copy_s),
            pace=Pace(self.itl_target_s, self.row_unit),
        )


def is_count(name: str, value: object, least: int) -> None:
    """Raise ValueError for what is no whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}")


def finite(name: str, value: Any) -> float:
    """Raise ValueError for what is not a finite number of at least 0."""
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} is {value!r}")
    return number


NUMBERS = ("median_error", "p95_error", "host_step_s", "host_row_s", "measured_at")
NO_COST = StepCost((), ())


@dataclass(frozen=True, slots=True)
class CapacityProfile:
    """A measured engine."""

    model: str
    machine: str
    sizes: EngineSizes
    cost: Cost
    median_error: float  # relative, of steps that were not fitted
    p95_error: float
    host_step_s: float = 0.0  # of a step's seconds, what planning and committing take: for the step,
    host_row_s: float = 0.0  # and for each row
    measured_at: float = 0.0  # seconds since 1970; 0 if unknown
    served_steps: int = 0  # of the last 1,000 steps that an engine has served, those that were predicted,
    served_error: float | None = None  # and the median of their relative errors

    def resized(self, **changes: Any) -> CapacityProfile:
        """The same engine with other sizes. None keeps a size."""
        given = {name: value for name, value in changes.items() if value is not None}
        return replace(self, sizes=replace(self.sizes, **given))

    def to_dict(self) -> dict[str, Any]:
        assert isinstance(self.cost, StepCost), "extrapolated costs are not kept"
        return {"quire": __version__, **asdict(replace(self, cost=NO_COST)), "cost": self.cost.to_dict()}

    @classmethod
    def of(cls, document: dict[str, Any]) -> CapacityProfile:
        """From `to_dict`. For what is no profile, it raises one of the errors that `load_profile` explains."""
        sizes = dict(document["sizes"])
        sizes["windows"] = tuple(sizes["windows"])
        cost = StepCost.of(document["cost"])
        if cost.windows != sizes["windows"]:
            raise ValueError(f"the costs are of the windows {cost.windows}, the sizes of {sizes['windows']}")
        served_error = document["served_error"]
        numbers = {name: finite(name, document[name]) for name in NUMBERS}
        return cls(
            str(document["model"]),
            str(document["machine"]),
            EngineSizes(**sizes),
            cost,
            served_steps=int(finite("served_steps", document["served_steps"])),
            served_error=None if served_error is None else finite("served_error", served_error),
            **numbers,
        )

    def save(self, path: Path) -> None:
        document = self.to_dict()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # several servers may keep one profile
        try:
            partial.write_text(json.dumps(document, indent=1))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def check_version(path: Path, version: object) -> None:
    """Costs are those of the kernels that were measured."""
    if version != __version__:
        raise InvalidParams(
            f"{path} was measured with quire {version}, and this is {__version__}. Measure again: quire bench phases "
            "MODEL --save."
        )


def load_profile(path: Path) -> CapacityProfile:
    """Read a profile. Raises InvalidParams if the file is none."""
    try:
        document = json.loads(path.read_text())
        check_version(path, document["quire"])
        return CapacityProfile.of(document)
    except FileNotFoundError:
        raise InvalidParams(
            f"There is no profile {path}. Measure one: quire bench phases MODEL --save (a minute or two)."
        ) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise InvalidParams(
            f"{path} is not a profile ({type(error).__name__}: {error}). Write it again: quire bench phases --save."
        ) from None
