"""What CUDA tests share. Importing it skips the importing module where there is no GPU."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("this machine has no NVIDIA GPU", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

DEVICE = torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def assert_near(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """By the norm of the difference, and no NaN anywhere."""
    assert got.shape == expected.shape
    assert got.isfinite().all()
    error = (got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    assert error < TOLERANCES[dtype], float(error)
