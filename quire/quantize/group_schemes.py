"""GPTQ and AWQ: codes of groups of columns, chosen so that they make up for each other's errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.kernels.cpu.native import Native
from quire.quantize.packing import pack_awq, pack_down_columns, pack_words
from quire.quantize.rounding import Groups, fit_groups, round_with_feedback
from quire.quantize.schemes import Quantized, check_multiple
from quire.quantize.statistics import InputStatistics, Needs
from quire.quantize.tensors import Tensor

Floats = NDArray[np.float32]


def code_groups(
    native: Native, values: Floats, size: int, bits: int, statistics: InputStatistics, *, zeros: bool
) -> tuple[Floats, Groups]:
    """Codes from 0 on and their groups, for inputs like those of the calibration."""
    assert statistics.moments is not None
    high = (1 << bits) - 1
    middle = 1 << (bits - 1)
    limits = (0, high) if zeros else (-middle, high - middle)
    groups = fit_groups(native, values, size, limits, statistics.mean_squares, zeros=zeros)
    codes = round_with_feedback(native, values, groups.grid(), limits, statistics.moments)
    if zeros:
        return codes, groups
    return codes + middle, Groups(size, 0, high, groups.scales, np.full_like(groups.zeros, middle))


def group_values(codes: Floats, groups: Groups) -> Floats:
    scales, bases = groups.grid()
    return scales * codes + bases


@dataclass(frozen=True, slots=True)
class GPTQ:
    """AutoGPTQ's layout (v1 zeros, which are stored less one), with groups in the order of the columns."""

    native: Native
    bits: int
    group: int
    symmetric: bool
    needs: Needs = "moments"
    follows = True

    def check(self, name: str, rows: int, cols: int) -> None:
        check_multiple(name, "columns", cols, self.group, f"a group size of {self.group}")
        check_multiple(name, "rows", rows, 32, "GPTQ")

    def quantize(self, name: str, values: Floats, statistics: InputStatistics | None) -> Quantized:
        assert statistics is not None
        codes, groups = code_groups(
            self.native, values, self.group, self.bits, statistics, zeros=not self.symmetric
        )  # fmt: skip
        if not self.symmetric:
            groups, codes = with_positive_zeros(groups, codes)
        zeros = groups.zeros.T.astype(np.int64) - 1
        index = np.arange(values.shape[1], dtype=np.int32) // self.group
        tensors = {
            "qweight": Tensor.of(pack_down_columns(codes, self.bits), "I32"),
            "qzeros": Tensor.of(pack_words(zeros & ((1 << self.bits) - 1), self.bits), "I32"),
            "scales": Tensor.of(groups.scales.T.astype("<f2"), "F16"),
            "g_idx": Tensor.of(index, "I32"),
        }
        return Quantized(tensors, group_values(codes, groups))

    def config(self) -> dict[str, Any]:
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group,
            "sym": self.symmetric,
            "desc_act": False,
            "static_groups": True,
            "damp_percent": 0.01,
            "true_sequential": False,
            "lm_head": False,
            "checkpoint_format": "gptq",
        }


def with_positive_zeros(groups: Groups, codes: Floats) -> tuple[Groups, Floats]:
    """Zeros of 1 and more: a zero is stored less one, and not all readers add 1 to the largest code as 0. A group that
    has only positive values loses its smallest step instead."""
    is_zero = groups.zeros == 0
    if not is_zero.any():
        return groups, codes
    raised = np.repeat(is_zero, groups.size, axis=1)
    codes = np.where(raised, np.minimum(codes + 1, groups.high), codes)
    return Groups(groups.size, groups.low, groups.high, groups.scales, np.maximum(groups.zeros, 1)), codes


@dataclass(frozen=True, slots=True)
class AWQ:
    """AutoAWQ's gemm layout."""

    native: Native
    group: int
    needs: Needs = "moments"
    follows = True

    def check(self, name: str, rows: int, cols: int) -> None:
        check_multiple(name, "columns", cols, self.group, f"a group size of {self.group}")
        check_multiple(name, "rows", rows, 8, "AWQ")

    def quantize(self, name: str, values: Floats, statistics: InputStatistics | None) -> Quantized:
        assert statistics is not None
        codes, groups = code_groups(self.native, values, self.group, 4, statistics, zeros=True)
        tensors = {
            "qweight": Tensor.of(pack_awq(codes.T), "I32"),
            "qzeros": Tensor.of(pack_awq(groups.zeros.T), "I32"),
            "scales": Tensor.of(groups.scales.T.astype("<f2"), "F16"),
        }
        return Quantized(tensors, group_values(codes, groups))

    def config(self) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": self.group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
