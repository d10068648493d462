"""Writes a GGUF file with random weights in the shapes of granite-3.1-1b-a400m, for speed against llama.cpp.

    python benchmarks/moe_file.py FILE.gguf [--layers 24]
    quire bench offline FILE.gguf ...; llama-bench -m FILE.gguf ...

Experts and attention are Q4_K, the embedding is Q6_K. Routing of random weights is nearly uniform.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

ARCHITECTURE = "granitemoe"
HIDDEN, EXPERTS, TOP_K, SIZE = 1024, 32, 8, 512
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 64
VOCAB = 49152
KEYS = {
    "context_length": 4096,
    "embedding_length": HIDDEN,
    "feed_forward_length": SIZE,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "rope.dimension_count": HEAD_DIM,
    "expert_count": EXPERTS,
    "expert_used_count": TOP_K,
    "vocab_size": VOCAB,
}
NUMBERS = {
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.scale": 1 / HEAD_DIM,
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "logit_scale": 6.0,
    "rope.freq_base": 10_000.0,
}
Q4_K, Q6_K = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K


def random_blocks(rng: np.random.Generator, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Random codes, with scales that make values of about 1 / sqrt(cols)."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // values, size), dtype=np.uint8)
    scales = {0: 2e-4, 2: 1.5e-3} if kind is Q4_K else {size - 2: 3e-5}
    for at, scale in scales.items():
        blocks[..., at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def matrices(num_layers: int) -> dict[str, tuple[int, ...]]:
    layer = {
        "attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "ffn_gate_exps": (EXPERTS, SIZE, HIDDEN),
        "ffn_up_exps": (EXPERTS, SIZE, HIDDEN),
        "ffn_down_exps": (EXPERTS, HIDDEN, SIZE),
    }
    return {f"blk.{index}.{name}.weight": shape for index in range(num_layers) for name, shape in layer.items()}


def write(path: Path, num_layers: int) -> None:
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    for key, number in (KEYS | {"block_count": num_layers}).items():
        writer.add_uint32(f"{ARCHITECTURE}.{key}", number)
    for key, value in NUMBERS.items():
        writer.add_float32(f"{ARCHITECTURE}.{key}", value)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    writer.add_tensor("token_embd.weight", random_blocks(rng, (VOCAB, HIDDEN), Q6_K), raw_dtype=Q6_K)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for name, shape in matrices(num_layers).items():
        writer.add_tensor(name, random_blocks(rng, shape, Q4_K), raw_dtype=Q4_K)
    for index in range(num_layers):
        router = rng.standard_normal((EXPERTS, HIDDEN), np.float32) * HIDDEN**-0.5
        writer.add_tensor(f"blk.{index}.ffn_gate_inp.weight", router)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{index}.{norm}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    options = parser.parse_args()
    write(options.path, options.layers)
