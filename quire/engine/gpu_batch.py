"""GpuBuffers: a plan as tensors for captured steps, whose shapes and addresses never change.

What differs from step to step is in the numbers: which rows have one query, and which tiles the others are cut into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.core.params import SamplingParams
from quire.core.plan import Plan
from quire.core.request import Request
from quire.engine.batch import Batch, BatchBuffers, Buffer
from quire.engine.logits import send
from quire.engine.sampler import MIN_TEMPERATURE, floor_of, signed
from quire.kernels.cuda.attention import Work, cut
from quire.kernels.cuda.deliver import Delivery
from quire.kernels.cuda.prefill import TILE_QUERIES, Tiles
from quire.kernels.cuda.sample import Draws

NUM_BUFFERS = 9  # of a step, beside a table and slots for each group of layers
SPARE_TILES = 32  # beside full ones: each row may have one that is not


class GpuBuffers(BatchBuffers):
    """Room for the largest step there can be, on the host and on the device."""

    def __init__(
        self, max_tokens: int, max_rows: int, max_len: int, num_groups: int, block_size: int, device: torch.device
    ) -> None:
        delivery = Delivery(NUM_BUFFERS + 2 * num_groups)
        super().__init__(max_tokens, max_rows, max_len, num_groups, block_size, device, delivery)
        self.device = device
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.singles = Buffer((max_rows,), torch.int32, device, delivery)
        self.tiles = Buffer((1 + 2 * room_for_tiles(max_tokens),), torch.int32, device, delivery)
        self.seeds = Buffer((max_rows,), torch.int64, device, delivery)
        self.settings = Buffer((max_rows, len(settings_of(SamplingParams()))), torch.float64, device, delivery)
        self._drawn: list[Request] = []  # whose seeds and settings the device has

    def fill_decode(self, plan: Plan, in_flight: Mapping[str, int], size: int) -> Batch:
        """A step of single tokens, filled up to `size` of them."""
        batch = self.fill(plan, in_flight, size, size)
        batch.paging.work = Work(True, None, None, [])
        return batch

    def fill_mixed(self, plan: Plan, in_flight: Mapping[str, int], size: int) -> Batch | None:
        """Any step, filled up to `size` tokens; None if its rows are too many for the tiles of that size."""
        singles, tiles = cut(plan.counts, {}, trees=False)
        if len(tiles) > room_for_tiles(size):
            return None
        batch = self.fill(plan, in_flight, size, self.max_rows)
        self.singles.host[: len(singles)], self.singles.host[len(singles) :] = singles, -1
        self.tiles.host[: 1 + 2 * len(tiles)] = Tiles.flatten(tiles)
        shown = Tiles(self.tiles.send(1 + 2 * room_for_tiles(size)))
        batch.paging.work = Work(False, self.singles.send(self.max_rows) if singles else None, shown, [])
        self._has_sent()
        return batch

    def fill_draws(self, plan: Plan) -> Draws | None:
        """What the plan's rows want drawn, which the device mostly has already; None if all take the likeliest token.

        What rows want whose logits are changed does not matter: their tokens are chosen once more. Called when the plan
        has been laid out and nothing else launched, so that the next step need not wait long.
        """
        if all(request.params.greedy or request.changes_logits for request in plan.requests):
            return None
        num_rows = len(plan)
        if self._drawn != plan.requests:
            self.seeds.host[:num_rows] = [signed(request.seed) for request in plan.requests]
            self.settings.host[:num_rows] = [settings_of(request.params) for request in plan.requests]
            self.seeds.send(num_rows)
            self.settings.send(num_rows)
            self._has_sent()
            self._drawn = list(plan.requests)
        return describe_draws(plan.requests, self.seeds.view(num_rows), self.settings.view(num_rows))

    def send_draws(self, requests: Sequence[Request]) -> Draws:
        """What some of a plan's rows want drawn, beside all of them."""
        seeds = send([signed(request.seed) for request in requests], np.int64, self.device)
        settings = send([settings_of(request.params) for request in requests], np.float64, self.device)
        return describe_draws(requests, seeds, settings)


def describe_draws(requests: Sequence[Request], seeds: Tensor, settings: Tensor) -> Draws:
    params = [request.params for request in requests]
    has_top_p = any(each.top_p < 1.0 for each in params)
    return Draws(seeds, settings, has_top_k=any(each.top_k for each in params), has_top_p=has_top_p)


def room_for_tiles(num_tokens: int) -> int:
    return num_tokens // TILE_QUERIES + SPARE_TILES


def settings_of(params: SamplingParams) -> tuple[float, float, float, float]:
    """A row of `Draws.settings`."""
    temperature = 0.0 if params.greedy else max(params.temperature, MIN_TEMPERATURE)
    return temperature, params.top_k, params.top_p, floor_of(params)
