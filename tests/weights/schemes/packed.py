"""Writes tiny quantized models of every method with plain numpy, for tests that load whole models and damage them.

Packing is written for itself, code by code: quire's readers are not used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.tools.tiny_models import tiny_config, tiny_weights, write_directory

Array = NDArray[Any]
Tensors = dict[str, torch.Tensor]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that nibble i of a word holds


def pack_rows(codes: Array, bits: int) -> Array:
    """Codes of `bits` bits, the lowest first, code by code: [n, count] -> [n, words] int32."""
    words = np.zeros((len(codes), codes.shape[1] * bits // 32), np.uint64)
    for index in range(codes.shape[1]):
        at = index * bits
        value = codes[:, index].astype(np.uint64) << np.uint64(at % 32)
        words[:, at // 32] |= value & np.uint64(0xFFFFFFFF)
        if at % 32 + bits > 32:
            words[:, at // 32 + 1] |= value >> np.uint64(32)
    return words.astype(np.uint32).view(np.int32)


def pack_awq(codes: Array) -> Array:
    """[n, outputs] -> [n, outputs / 8] int32"""
    words = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
    for place, output in enumerate(AWQ_ORDER):
        words |= codes[:, output::8].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)


def gptq(
    stem: str, weight: Array, rng: np.random.Generator, *, bits: int, group: int, order: int, v2: bool, sym: bool
) -> tuple[Tensors, Array]:
    """`order`: whether inputs are in another order; above 1, the seed of that order."""
    rows, cols = weight.shape
    groups = cols // group
    codes = rng.integers(0, 1 << bits, (rows, cols), dtype=np.uint8)
    zeros = rng.integers(1, 1 << bits, (rows, groups), dtype=np.uint8)
    zeros = np.full_like(zeros, 1 << (bits - 1)) if sym else zeros
    scales = (rng.uniform(0.5, 1.5, (rows, groups)) * 0.3 / (1 << bits)).astype(np.float16)
    index = np.arange(cols) // group
    index = np.random.default_rng(int(order) if order > 1 else rng).permutation(index) if order else index
    tensors = {
        "qweight": np.ascontiguousarray(pack_rows(codes, bits).T),
        "qzeros": pack_rows(np.ascontiguousarray((zeros if v2 else zeros - 1).T), bits),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": index.astype(np.int32),
    }
    dense = (codes.astype(np.float32) - zeros[:, index]) * scales.astype(np.float32)[:, index]
    return {f"{stem}.{kind}": torch.from_numpy(value) for kind, value in tensors.items()}, dense


def awq(stem: str, weight: Array, rng: np.random.Generator, *, group: int) -> tuple[Tensors, Array]:
    rows, cols = weight.shape
    codes = rng.integers(0, 16, (rows, cols), dtype=np.uint8)
    zeros = rng.integers(0, 16, (rows, cols // group), dtype=np.uint8)
    scales = (rng.uniform(0.5, 1.5, zeros.shape) * 0.02).astype(np.float16)
    tensors = {
        "qweight": pack_awq(np.ascontiguousarray(codes.T)),
        "qzeros": pack_awq(np.ascontiguousarray(zeros.T)),
        "scales": np.ascontiguousarray(scales.T),
    }
    index = np.arange(cols) // group
    dense = (codes.astype(np.float32) - zeros[:, index]) * scales.astype(np.float32)[:, index]
    return {f"{stem}.{kind}": torch.from_numpy(value) for kind, value in tensors.items()}, dense


def squeezellm(stem: str, weight: Array, rng: np.random.Generator) -> tuple[Tensors, Array]:
    codes = rng.integers(0, 16, weight.shape, dtype=np.uint8)
    tables = (rng.standard_normal((len(weight), 16)) * 0.1).astype(np.float16)
    tensors = {"qweight": np.ascontiguousarray(pack_rows(codes, 4).T), "lookup_table": tables}
    dense = np.take_along_axis(tables.astype(np.float32), codes.astype(np.int64), axis=1)
    return {f"{stem}.{kind}": torch.from_numpy(value) for kind, value in tensors.items()}, dense


def float8(stem: str, weight: Array, rng: np.random.Generator, *, kind: str) -> tuple[Tensors, Array]:
    """kind: tensor, inverse (as tensor, under another name), channel, block (16 x 32) or modelopt."""
    rows, cols = weight.shape
    codes = torch.from_numpy(rng.uniform(-400, 400, (rows, cols)).astype(np.float32)).to(torch.float8_e4m3fn)
    shape = {"tensor": (1,), "inverse": (), "modelopt": (), "channel": (rows, 1)}.get(
        kind, (-(-rows // 16), -(-cols // 32))
    )
    scales = np.asarray(rng.uniform(0.5, 1.5, shape) * 4e-4, np.float32)
    full = np.repeat(np.repeat(scales, 16, 0)[:rows], 32, 1)[:, :cols] if kind == "block" else scales
    name = "weight_scale_inv" if kind in ("block", "inverse") else "weight_scale"
    tensors = {f"{stem}.weight": codes, f"{stem}.{name}": torch.from_numpy(scales)}
    if kind == "modelopt":
        tensors[f"{stem}.input_scale"] = torch.tensor(0.5)
    return tensors, codes.float().numpy() * full


def int8(stem: str, weight: Array, rng: np.random.Generator) -> tuple[Tensors, Array]:
    codes = rng.integers(-127, 128, weight.shape, dtype=np.int8)
    scales = (rng.uniform(0.5, 1.5, (len(weight), 1)) * 2e-3).astype(np.float32)
    tensors = {"weight": codes, "weight_scale": scales}
    return {f"{stem}.{k}": torch.from_numpy(v) for k, v in tensors.items()}, codes.astype(np.float32) * scales


def eetq(stem: str, weight: Array, rng: np.random.Generator, *, kind: str) -> tuple[Tensors, Array]:
    """In the steps of EETQ: rows permuted in 16, transposed, two columns in turn with 64 rows each, bytes swapped."""
    codes = rng.integers(-128, 128, weight.shape[::-1], dtype=np.int8)  # [inputs, outputs]
    scales = (rng.uniform(0.5, 1.5, len(weight)) * 2e-3).astype(np.float16)
    permuted = np.empty_like(codes)
    for row in range(len(codes)):
        permuted[row] = codes[row // 16 * 16 + 8 * (row % 4 // 2) + row % 2 + row % 16 // 4 * 2]
    flat = np.empty(codes.size, np.int8)
    for output, column in enumerate(permuted.T):
        for tile in range(0, len(column), 64):
            start = output // 2 * 2 * len(column) + 2 * tile + output % 2 * 64
            flat[start : start + 64] = column[tile : tile + 64]
    stored = (flat.view(np.uint8) + np.uint8(128)).reshape(-1, 4)[:, [0, 2, 1, 3]]
    tensors = {kind: stored.reshape(codes.shape).view(np.int8), "weight_scales": scales}
    dense = np.ascontiguousarray((codes.astype(np.float32) * scales.astype(np.float32)).T)
    return {f"{stem}.{k}": torch.from_numpy(np.ascontiguousarray(v)) for k, v in tensors.items()}, dense


GROUP = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
METHODS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    **{
        f"gptq {bits}{' order' if order else ''}{' v2' if v2 else ''}{' sym' if sym else ''}": (
            gptq,
            {"bits": bits, "group": 32, "order": order, "v2": v2, "sym": sym},
            {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": order, "sym": sym}
            | ({"checkpoint_format": "gptq_v2"} if v2 else {}),
        )
        for bits, order, v2, sym in [
            (2, False, False, False),
            (3, False, False, False),
            (3, False, True, True),
            (4, False, False, True),
            (4, False, True, False),
            (4, True, False, False),
            (8, False, False, True),
            (8, True, True, False),
        ]
    },
    "awq": (awq, {"group": 32}, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "squeezellm": (squeezellm, {}, {"quant_method": "squeezellm", "wbits": 4}),
    "fp8 tensor": (float8, {"kind": "tensor"}, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 inverse": (float8, {"kind": "inverse"}, {"quant_method": "fp8", "weight_block_size": None}),
    "fp8 channel": (float8, {"kind": "channel"}, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "fp8 block": (float8, {"kind": "block"}, {"quant_method": "fp8", "weight_block_size": [16, 32]}),
    "modelopt": (float8, {"kind": "modelopt"}, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "eetq": (eetq, {"kind": "weight"}, {"quant_method": "eetq", "weights": "int8"}),
    "eetq package": (eetq, {"kind": "qweight"}, {"quant_method": "eetq"}),
    "w8a8": (
        int8,
        {},
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "ignore": ["re:.*embed", "lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP}},
        },
    ),
}  # fmt: skip

WHOLE_TILES = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 128}  # outputs of 64 or 128


def quantized_model(folder: Path, method: str, *, plain: tuple[str, ...] = (), **config: Any) -> tuple[Path, Path]:
    """A directory that a package could have written, and one with the same values in float32.

    Layers whose names contain one of `plain` keep float32 weights.
    """
    make, options, section = METHODS[method]
    config = (WHOLE_TILES if make is eetq else {}) | config
    rng, stored, dense = np.random.default_rng(0), {}, {}
    for name, weight in tiny_weights("llama", **config).items():
        if "_proj" not in name or any(part in name for part in plain):
            stored[name] = dense[name] = weight
            continue
        tensors, values = make(name.removesuffix(".weight"), weight.numpy(), rng, **options)
        stored |= tensors
        dense[name] = torch.from_numpy(np.ascontiguousarray(values))
    written = tiny_config("llama", **config)
    quantized = write_directory(folder / "quantized", written | {"quantization_config": section}, stored)
    return quantized, write_directory(folder / "plain", written, dense)
