"""Schemes: how a matrix becomes the tensors of a format. One class a format.

`quantize` gets the values of one part [rows, cols] and the statistics of its inputs. It returns the tensors of the file
and the values that they stand for. `needs` says which statistics. What a scheme makes of a whole layer before that
(AWQ's scales) is in `awq.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.errors import UnsupportedModel
from quire.kernels.cpu.native import Native
from quire.quant.code_format import NF4, e4m3_values
from quire.quant.ggml_types import GGMLType
from quire.quantize.calibration import InputStatistics, Needs
from quire.quantize.packing import (
    FP8_MAX,
    NF4_BLOCK,
    pack_awq,
    pack_down_columns,
    pack_nibbles,
    pack_words,
    to_e4m3,
    to_nf4,
)
from quire.quantize.rounding import (
    Groups,
    dequantize_blocks,
    fit_groups,
    nearest_codes,
    quantize_blocks,
    recode_blocks,
    round_with_feedback,
)
from quire.quantize.tensors import Tensor, dense_tensor, from_bfloat16, rounded, to_bfloat16

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Quantized:
    """The tensors of a part by the suffix of their names, their values in float32, and their bits."""

    tensors: dict[str, Tensor]
    values: Floats

    @property
    def nbytes(self) -> int:
        return sum(tensor.data.nbytes for tensor in self.tensors.values())


class Scheme(Protocol):
    @property
    def needs(self) -> Needs: ...

    @property
    def follows(self) -> bool:
        """Whether a layer is quantized for the inputs that the quantized layers before it give."""
        ...

    def check(self, name: str, rows: int, cols: int) -> None:
        """Raise if a matrix of that shape cannot be stored."""
        ...

    def quantize(self, name: str, values: Floats, statistics: InputStatistics | None) -> Quantized: ...

    def config(self) -> dict[str, Any]:
        """The quantization_config of config.json; empty for dense matrices."""
        ...


def check_multiple(name: str, what: str, size: int, unit: int, format: str) -> None:
    if size % unit:
        raise UnsupportedModel(
            f"{name} has {size:,} {what}, and {format} needs a multiple of {unit}. Choose another format or group size."
        )


@dataclass(frozen=True, slots=True)
class Blocks:
    """GGUF blocks. `types` gives the type of each matrix by its name."""

    native: Native
    types: Mapping[str, GGMLType]
    needs: Needs
    follows = False

    def check(self, name: str, rows: int, cols: int) -> None:
        check_multiple(name, "columns", cols, self.types[name].block_size, self.types[name].name)

    def quantize(self, name: str, values: Floats, statistics: InputStatistics | None) -> Quantized:
        type = self.types[name]
        if not type.quantized:
            halves = values.astype("<f2")
            return Quantized({"": Tensor(type.name, values.shape, halves)}, halves.astype(np.float32))
        blocks = quantize_blocks(self.native, type, values, None if statistics is None else statistics.mean_squares)
        if statistics is not None and statistics.moments is not None and type is not GGMLType.Q8_0:
            blocks = recode_blocks(self.native, type, blocks, values, statistics.moments)
        dense = dequantize_blocks(self.native, type, blocks, values.shape[1])
        return Quantized({"": Tensor(type.name, values.shape, blocks)}, dense)

    def config(self) -> dict[str, Any]:
        raise AssertionError("GGUF files have no quantization_config")


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


@dataclass(frozen=True, slots=True)
class PackedInts:
    """compressed-tensors, pack-quantized: symmetric codes of 4 bits in groups, or of 8 bits with a scale a row."""

    native: Native
    bits: int
    group: int | None  # None: a scale a row

    @property
    def needs(self) -> Needs:
        return "nothing" if self.group is None else "moments"

    @property
    def follows(self) -> bool:
        return self.group is not None

    def check(self, name: str, rows: int, cols: int) -> None:
        check_multiple(name, "columns", cols, self.group or 32 // self.bits, f"a group size of {self.group}")

    def quantize(self, name: str, values: Floats, statistics: InputStatistics | None) -> Quantized:
        if self.group is None:
            codes, groups = row_codes(values, self.bits)
        else:
            assert statistics is not None
            codes, groups = code_groups(self.native, values, self.group, self.bits, statistics, zeros=False)
        tensors = {
            "weight_packed": Tensor.of(pack_words(codes, self.bits), "I32"),
            "weight_scale": Tensor.of(groups.scales.astype("<f2"), "F16"),
            "weight_shape": Tensor.of(np.array(values.shape, "<i8"), "I64"),
        }
        return Quantized(tensors, group_values(codes, groups))

    def config(self) -> dict[str, Any]:
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": True,
            "strategy": "channel" if self.group is None else "group",
            "group_size": self.group,
            "dynamic": False,
        }
        return compressed_config("pack-quantized", weights, None)


def row_codes(values: Floats, bits: int) -> tuple[Floats, Groups]:
    """Codes from 0 on with a scale a row. The scale is rounded up, so that no value is cut off."""
    middle = 1 << (bits - 1)
    scales = (np.abs(values).max(1, keepdims=True) / np.float32(middle - 1)).astype(np.float16).astype(np.float32)
    groups = Groups(values.shape[1], 0, 2 * middle - 1, scales, np.full_like(scales, middle))
    return nearest_codes(values, groups), groups


def compressed_config(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


@dataclass(frozen=True, slots=True)
class Float8:
    """compressed-tensors, float-quantized: e4m3 with a scale a row. Servers with fp8 products round the inputs too."""

    needs: Needs = "nothing"
    follows = False

    def check(self, name: str, rows: int, cols: int) -> None:
        """Any shape can be stored."""

    def quantize(self, name: str, values: Floats, statistics: InputStatistics | None) -> Quantized:
        scales = to_bfloat16(np.abs(values).max(1, keepdims=True) / np.float32(FP8_MAX))
        wide = from_bfloat16(scales)
        codes = to_e4m3(np.divide(values, wide, out=np.zeros_like(values), where=wide != 0))
        tensors = {"weight": Tensor.of(codes, "F8_E4M3"), "weight_scale": Tensor.of(scales, "BF16")}
        return Quantized(tensors, e4m3_values()[codes] * wide)

    def config(self) -> dict[str, Any]:
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
        inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
        return compressed_config("float-quantized", weights, inputs)


@dataclass(frozen=True, slots=True)
class Half:
    """Dense matrices in float16: a conversion between kinds of files."""

    needs: Needs = "nothing"
    follows = False

    def check(self, name: str, rows: int, cols: int) -> None:
        """Any shape can be stored."""

    def quantize(self, name: str, values: Floats, statistics: InputStatistics | None) -> Quantized:
        return Quantized({"weight": dense_tensor(values, "F16")}, rounded(values, "F16"))

    def config(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class NormalFloat:
    """bitsandbytes' NF4: flat blocks of 64 values with a float32 scale."""

    dtype: str  # of the model, as torch names it
    needs: Needs = "nothing"
    follows = False

    def check(self, name: str, rows: int, cols: int) -> None:
        check_multiple(name, "values", rows * cols, NF4_BLOCK, "NF4")

    def quantize(self, name: str, values: Floats, statistics: InputStatistics | None) -> Quantized:
        codes, largest = to_nf4(values)
        state = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "dtype": self.dtype, "shape": list(values.shape)}
        levels = np.array(NF4, np.float32)
        tensors = {
            "weight": Tensor.of(pack_nibbles(codes)[:, None], "U8"),
            "weight.absmax": Tensor.of(largest, "F32"),
            "weight.quant_map": Tensor.of(levels, "F32"),
            "weight.quant_state.bitsandbytes__nf4": Tensor.of(
                np.frombuffer(json.dumps(state).encode(), np.uint8), "U8"
            ),
        }
        dense = levels[codes].reshape(-1, NF4_BLOCK) * largest[:, None]
        return Quantized(tensors, dense.reshape(values.shape))

    def config(self) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": self.dtype,
            "bnb_4bit_quant_storage": "uint8",
        }
