"""Makes `fixtures/*.safetensors`: matrices as the packages write them, with a digest of what these make of them.

Needs an environment of its own:
pip install torch==2.13.0 numpy safetensors bitsandbytes compressed-tensors transformers
Each file has the tensors of one linear layer, and in its metadata the `quantization_config`, the shape, the package,
and the blake2b digest of the dequantized float32 matrix (negative zeros as zeros).
"""

import json
from hashlib import blake2b
from pathlib import Path

import bitsandbytes
import compressed_tensors
import torch
import transformers
from bitsandbytes import functional
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import save_file

FOLDER = Path(__file__).with_name("fixtures")
NAME = "model.layers.0.mlp.up_proj"


def save(name, package, config, tensors, dense, rows, cols):
    dense = dense.float().contiguous() + 0.0
    assert dense.shape == (rows, cols), dense.shape
    about = {
        "quantization_config": json.dumps(config),
        "shape": json.dumps([rows, cols]),
        "package": package,
        "digest": blake2b(dense.numpy().tobytes(), digest_size=16).hexdigest(),
        "first": json.dumps(dense.flatten()[:8].tolist()),
    }
    FOLDER.mkdir(exist_ok=True)
    tensors = {f"{NAME}.{kind}": value.contiguous() for kind, value in tensors.items()}
    save_file(tensors, FOLDER / f"{name}.safetensors", about)


def weights(rows, cols, seed=0):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 0.05


def bnb4(name, kind, nested, rows, cols, block=64):
    packed, state = functional.quantize_4bit(
        weights(rows, cols), blocksize=block, compress_statistics=nested, quant_type=kind
    )
    tensors = {"weight": packed} | {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    state.shape = torch.Size((1, rows * cols))  # blocks are flat; on a CPU, the package dequantizes others wrongly
    dense = functional.dequantize_4bit(packed, state).view(rows, cols)
    save(name, f"bitsandbytes {bitsandbytes.__version__}", config, tensors, dense, rows, cols)


def bnb8(rows=16, cols=64):
    layer = bitsandbytes.nn.Linear8bitLt(cols, rows, bias=False, has_fp16_weights=False, threshold=6.0)
    layer.weight = bitsandbytes.nn.Int8Params(weights(rows, cols).half(), requires_grad=False, has_fp16_weights=False)
    layer = layer.to("cpu")
    if layer.weight.data.dtype != torch.int8:
        codes, scb, _ = functional.int8_vectorwise_quant(weights(rows, cols).half())
    else:
        codes, scb = layer.weight.data, layer.weight.SCB
    tensors = {"weight": codes, "SCB": scb, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    dense = functional.int8_vectorwise_dequant(codes, scb)
    save("llm-int8", f"bitsandbytes {bitsandbytes.__version__}", config, tensors, dense, rows, cols)


def compressed(name, stored_as, args, scale, *, zero=None, total=None, rows=16, cols=64, scale_type=torch.bfloat16):
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(stored_as)
    state = {"weight": weights(rows, cols), "weight_scale": scale.to(scale_type).float()}
    if zero is not None:
        state["weight_zero_point"] = zero
    if total is not None:
        state["weight_global_scale"] = total
    stored = compressor.compress(state, scheme)
    dense = in_float32(stored, scheme) if total is not None else compressor.decompress(stored, scheme)["weight"]
    if stored["weight_scale"].dtype == torch.float32:
        stored["weight_scale"] = stored["weight_scale"].to(scale_type)
    config = {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme.weights.model_dump(mode="json")}},
    }
    package = f"compressed-tensors {compressed_tensors.__version__}"
    save(name, package, config, {k: v for k, v in stored.items() if isinstance(v, torch.Tensor)}, dense, rows, cols)


def in_float32(stored, scheme):
    """As NVFP4's decompress, which rounds to bfloat16."""
    rows, width = stored["weight_packed"].shape
    codes = unpack_fp4_from_uint8(stored["weight_packed"], rows, 2 * width, dtype=torch.float32)
    return dequantize(
        codes, stored["weight_scale"].float(), None, scheme.weights, torch.float32, stored["weight_global_scale"]
    )


def draw(*shape, low=0.005, high=0.02, seed=1):
    return low + (high - low) * torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def integers(low, high, *shape):
    return torch.randint(low, high, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(2))


def all_compressed():
    group = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    compressed("ct-int4", "pack-quantized", group, draw(16, 2))
    zeros = integers(-8, 8, 16, 2)
    compressed("ct-int4-zeros", "pack-quantized", {**group, "symmetric": False}, draw(16, 2), zero=zeros)
    channel = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    compressed("ct-int8-packed", "pack-quantized", channel, draw(16, 1) / 8)
    compressed("ct-int3", "pack-quantized", {**group, "num_bits": 3}, draw(16, 2))
    compressed("ct-w8a8", "int-quantized", channel, draw(16, 1) / 8)
    zeros = integers(-100, 100, 16, 1)
    compressed("ct-w8a8-zeros", "int-quantized", {**channel, "symmetric": False}, draw(16, 1) / 8, zero=zeros)
    compressed("ct-w8a8-tensor", "int-quantized", {**channel, "strategy": "tensor"}, draw(1) / 8)
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    compressed("ct-fp8", "float-quantized", fp8, draw(16, 1) / 32)
    compressed("ct-fp8-tensor", "float-quantized", {**fp8, "strategy": "tensor"}, draw(1) / 32)
    block = {**fp8, "strategy": "block", "block_structure": [8, 32]}
    compressed("ct-fp8-block", "float-quantized", block, draw(2, 2) / 32)
    fp4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    scale = draw(16, 4, low=100, high=400).to(torch.float8_e4m3fn)
    compressed(
        "nvfp4", "nvfp4-pack-quantized", fp4, scale.float(), total=torch.tensor([12345.0]), scale_type=torch.float32
    )
    mx = {**fp4, "strategy": "group", "group_size": 32}
    scale = torch.exp2(torch.randint(-9, -3, (16, 2), generator=torch.Generator().manual_seed(3)).float())
    compressed("mxfp4", "mxfp4-pack-quantized", mx, scale, scale_type=torch.float32)


def fp8_blocks(rows=32, cols=96):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes = (weights(rows, cols) * 1000).to(torch.float8_e4m3fn)
    scales = draw(rows // 16, cols // 32)
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 32], "activation_scheme": "dynamic"}
    dense = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
    package = f"transformers {transformers.__version__}"
    save("fp8-block", package, config, {"weight": codes, "weight_scale_inv": scales}, dense, rows, cols)


bnb4("nf4", "nf4", False, 16, 64)
bnb4("nf4-double", "nf4", True, 96, 192)
bnb4("nf4-across-rows", "nf4", False, 32, 96)
bnb4("fp4", "fp4", False, 16, 64)
bnb4("fp4-double", "fp4", True, 16, 128)
bnb8()
all_compressed()
fp8_blocks()
