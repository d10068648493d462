"""CapacityProfile: an engine as the simulator needs it: sizes of the scheduler and the cost of a step, in one file.

`quire bench phases --save` measures and writes it; `quire simulate` reads it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quire.capacity.step_cost import StepCost
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

    def scheduler(self, policy: Policy | None = None) -> Scheduler:
        return Scheduler(
            self.num_blocks,
            self.block_size,
            self.max_tokens_per_step,
            self.max_requests,
            policy,
            windows=self.windows,
            prefix_cache=self.prefix_cache,
            num_host_blocks=self.num_host_blocks,
            costs=SwapCosts(copy_s=self.copy_s),
            pace=Pace(self.itl_target_s, self.row_unit),
        )


@dataclass(frozen=True, slots=True)
class CapacityProfile:
    """A measured engine."""

    model: str
    machine: str
    sizes: EngineSizes
    cost: StepCost
    median_error: float  # relative, of steps that were not fitted
    p95_error: float

    def resized(self, **changes: Any) -> CapacityProfile:
        """The same engine with other sizes. None keeps a size."""
        given = {name: value for name, value in changes.items() if value is not None}
        return replace(self, sizes=replace(self.sizes, **given))

    def save(self, path: Path) -> None:
        document = {**asdict(self), "cost": self.cost.to_dict()}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(document, indent=1))
        partial.replace(path)


def load_profile(path: Path) -> CapacityProfile:
    """Read a profile. Raises InvalidParams if the file is none."""
    try:
        document = json.loads(path.read_text())
        sizes = dict(document["sizes"])
        sizes["windows"] = tuple(sizes["windows"])
        return CapacityProfile(
            str(document["model"]),
            str(document["machine"]),
            EngineSizes(**sizes),
            StepCost.of(document["cost"]),
            float(document["median_error"]),
            float(document["p95_error"]),
        )
    except FileNotFoundError:
        raise InvalidParams(
            f"There is no profile {path}. Measure one: quire bench phases MODEL --save (about a minute)."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidParams(
            f"{path} is not a profile ({type(error).__name__}: {error}). Write it again: quire bench phases --save."
        ) from None
