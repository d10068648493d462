"""Decode speed of quantized safetensors on the C++ kernels, beside GGUF Q4_1, in the default model's shapes.

    python benchmarks/formats.py [FORMAT ...] [--batches 1 8 32] [--tokens 96]

The default model is Q4_1 with a Q8_0 head. The others have random codes, and a plain head that `--quantize int8` makes
Q8_0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from quire.config import DEFAULT_MODEL, EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.client import start_engine
from quire.kernels.isa import prepare
from quire.quant.code_format import NF4
from quire.store.models import resolve

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 30, 576, 1536, 9, 3, 64, 49152
MATRICES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
CONFIG = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 2048, "tie_word_embeddings": True, "rope_theta": 100000.0,
}  # fmt: skip
GROUP = 64  # 576 inputs have no groups of 128
RNG = np.random.default_rng(0)

Tensors = dict[str, Any]


def words(*shape: int) -> Any:
    return RNG.integers(-(2**31), 2**31, shape, dtype=np.int32)


def gptq(rows: int, cols: int, *, symmetric: bool, order: bool = False) -> Tensors:
    groups = cols // GROUP
    zeros = np.full((groups, rows // 8), 0x77777777, np.int32)
    index = np.arange(cols, dtype=np.int32) // GROUP
    return {
        "qweight": words(cols // 8, rows),
        "qzeros": zeros if symmetric else zeros & 0x33333333,
        "scales": np.full((groups, rows), 0.005, np.float16),
        "g_idx": RNG.permutation(index) if order else index,
    }


def awq(rows: int, cols: int) -> Tensors:
    groups = cols // GROUP
    return {
        "qweight": words(cols, rows // 8),
        "qzeros": words(groups, rows // 8),
        "scales": np.full((groups, rows), 0.005, np.float16),
    }


def nf4(rows: int, cols: int) -> Tensors:
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [rows, cols], "dtype": "float32"}
    return {
        "weight": RNG.integers(0, 256, (rows * cols // 2, 1), dtype=np.uint8),
        "weight.absmax": np.full(rows * cols // 64, 0.05, np.float32),
        "weight.quant_map": np.array(NF4, np.float32),
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }


def mxfp4(rows: int, cols: int) -> Tensors:
    return {
        "weight_packed": RNG.integers(0, 256, (rows, cols // 2), dtype=np.uint8),
        "weight_scale": np.full((rows, cols // 32), 120, np.uint8),
    }


def int8(rows: int, cols: int) -> Tensors:
    return {
        "weight": RNG.integers(-127, 128, (rows, cols), dtype=np.int8),
        "weight_scale": np.full((rows, 1), 4e-4, np.float32),
    }


def compressed(stored_as: str, **weights: Any) -> dict[str, Any]:
    groups = {"all": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": stored_as, "ignore": ["lm_head"], "config_groups": groups}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
FORMATS: dict[str, Any] = {
    "gptq": (lambda rows, cols: gptq(rows, cols, symmetric=True), GPTQ),
    "gptq-zeros": (lambda rows, cols: gptq(rows, cols, symmetric=False), GPTQ),
    "gptq-order": (lambda rows, cols: gptq(rows, cols, symmetric=True, order=True), GPTQ | {"desc_act": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP}),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "mxfp4": (mxfp4, compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)),
    "w8a8": (int8, compressed("int-quantized", num_bits=8, type="int", strategy="channel")),
}


def write(folder: Path, name: str) -> Path:
    make, section = FORMATS[name]
    tensors: Tensors = {"model.embed_tokens.weight": 0.05 * RNG.standard_normal((VOCAB, HIDDEN), np.float32)}
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
        for matrix, (rows, cols) in MATRICES.items():
            for kind, values in make(rows, cols).items():
                tensors[f"model.layers.{layer}.{matrix}.{kind}"] = np.ascontiguousarray(values)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": section}))
    return folder


def decode_rates(path: Path, batches: list[int], num_tokens: int, **options: Any) -> list[float]:
    """Tokens a second of each batch: the median step of the middle of the answers."""
    engine = start_engine(
        EngineConfig(kernels="native", prefix_cache=False, num_blocks=2048, speculate="off", **options), path
    )
    rates = []
    for batch in batches:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        prompt = list(range(100, 116))
        for number in range(batch):
            engine.add(Request(f"{batch}-{number}", prompt, params, max_tokens=num_tokens))
        durations = []
        while engine.has_work:
            start = time.perf_counter()
            engine.step()
            durations.append(time.perf_counter() - start)
        rates.append(batch / statistics.median(durations[8:-4]))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=96)
    given = parser.parse_args()
    print(f"{prepare().model}, {prepare().cores} cores")
    base = decode_rates(resolve(DEFAULT_MODEL).path, given.batches, given.tokens)
    print(f"{'format':12}" + "".join(f"{'batch ' + str(batch):>18}" for batch in given.batches))
    print(f"{'Q4_1':12}" + "".join(f"{rate:11.0f} tok/s " for rate in base))
    with tempfile.TemporaryDirectory() as folder:
        for name in given.formats:
            path = write(Path(folder) / name, name)
            rates = decode_rates(path, given.batches, given.tokens, quantize="int8")
            again = zip(rates, base, strict=True)
            print(f"{name:12}" + "".join(f"{rate:11.0f} {100 * rate / other:4.0f}% " for rate, other in again))


if __name__ == "__main__":
    main()
