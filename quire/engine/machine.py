"""What a machine is, for reports and recordings."""

from __future__ import annotations

import platform
import sys
from typing import Any

from quire.config import EngineConfig
from quire.kernels import isa


def machine(config: EngineConfig) -> dict[str, Any]:
    """The engine has imported torch if it needs it."""
    cpu, torch = isa.read_cpu(), sys.modules.get("torch")
    return {
        "cpu": cpu.model,
        "cores": cpu.cores,
        "threads": config.threads or cpu.cores,
        "gpu": torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": None if torch is None else str(torch.__version__),
    }
