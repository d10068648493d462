"""The formats of compressed-tensors (packed integers and float8) and of bitsandbytes (NF4)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.kernels.cpu.native import Native
from quire.quant.code_format import NF4, e4m3_values
from quire.quantize.group_schemes import code_groups, group_values
from quire.quantize.packing import FP8_MAX, NF4_BLOCK, pack_nibbles, pack_words, to_e4m3, to_nf4
from quire.quantize.rounding import Groups, nearest_codes
from quire.quantize.schemes import Quantized, check_multiple
from quire.quantize.statistics import InputStatistics, Needs
from quire.quantize.tensors import Tensor, from_bfloat16, to_bfloat16

Floats = NDArray[np.float32]


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
