"""TorchRunner: runs plans on torch's ops, where quire's own kernels are not used."""

from __future__ import annotations

import torch

from quire.core.plan import Plan
from quire.engine.runner import ModelRunner, RunningStep


class TorchRunner(ModelRunner):
    @torch.inference_mode()
    def launch(self, plan: Plan, is_behind: bool = False) -> RunningStep:
        return super().launch(plan, is_behind)
