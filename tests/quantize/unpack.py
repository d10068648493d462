"""Values of quantized tensors, by formulas written from the formats' descriptions and not from quire's own packing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quire.weights.safetensors import SafetensorsFiles


def dense_of(files: SafetensorsFiles, name: str, config: dict[str, Any] | None) -> np.ndarray:
    """A tensor [rows, cols] or [size] in float32."""
    stem = name.removesuffix("weight")
    companions = ("weight_scale", "weight.absmax", "qweight", "weight_packed")
    if config is None or not any(f"{stem}{each}" in files.tensors for each in companions):
        return as_float(files, name)
    method = config["quant_method"]
    if method == "gptq":
        return gptq(files, stem, config["bits"])
    if method == "awq":
        return awq(files, stem, config["group_size"])
    if method == "bitsandbytes":
        return nf4(files, name)
    if config["format"] == "float-quantized":
        codes = torch.from_numpy(files.read(name).copy()).view(torch.float8_e4m3fn).float().numpy()
        return codes * as_float(files, f"{name}_scale")
    return packed_ints(files, stem, config["config_groups"]["group_0"]["weights"]["num_bits"])


def as_float(files: SafetensorsFiles, name: str) -> np.ndarray:
    values = files.read(name)
    if files.tensors[name].dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def bit_stream(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes of each row, whose bits follow each other from word to word: through Python's whole numbers."""
    rows = []
    for row in words.astype("<u4"):
        number = int.from_bytes(row.tobytes(), "little")
        rows.append([number >> bits * i & (1 << bits) - 1 for i in range(32 * len(row) // bits)])
    return np.array(rows)


def gptq(files: SafetensorsFiles, stem: str, bits: int) -> np.ndarray:
    codes = bit_stream(np.ascontiguousarray(files.read(f"{stem}qweight").T), bits).T
    zeros = (bit_stream(files.read(f"{stem}qzeros"), bits) + 1) % (1 << bits)
    scales, group = files.read(f"{stem}scales").astype(np.float32), files.read(f"{stem}g_idx")
    return ((codes - zeros[group]) * scales[group]).T


def awq(files: SafetensorsFiles, stem: str, group: int) -> np.ndarray:
    def columns(words: np.ndarray) -> np.ndarray:
        out = np.empty((len(words), 8 * words.shape[1]), np.int64)
        for nibble, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            out[:, column::8] = words.astype(np.uint32) >> 4 * nibble & 15
        return out

    codes, zeros = columns(files.read(f"{stem}qweight")), columns(files.read(f"{stem}qzeros"))
    scales = files.read(f"{stem}scales").astype(np.float32)
    index = np.arange(len(codes)) // group
    return ((codes - zeros[index]) * scales[index]).T


def packed_ints(files: SafetensorsFiles, stem: str, bits: int) -> np.ndarray:
    rows, cols = files.read(f"{stem}weight_shape").tolist()
    codes = bit_stream(files.read(f"{stem}weight_packed"), bits) - (1 << bits - 1)
    assert codes.shape == (rows, cols)
    scales = files.read(f"{stem}weight_scale").astype(np.float32)
    return codes * np.repeat(scales, cols // scales.shape[1], axis=1)


def nf4(files: SafetensorsFiles, name: str) -> np.ndarray:
    import json

    state = json.loads(files.read(f"{name}.quant_state.bitsandbytes__nf4").tobytes())
    packed = files.read(name).ravel()
    codes = np.stack([packed >> 4, packed & 15], axis=1).ravel()
    values = files.read(f"{name}.quant_map")[codes].reshape(-1, state["blocksize"])
    return (values * files.read(f"{name}.absmax")[:, None]).reshape(state["shape"])
