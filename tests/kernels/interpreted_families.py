"""A script: models of `models/transformer.py` on the GPU's ops by Triton's interpreter, against transformers: ALiBi,
partial and paired rotation, 71 query heads on one key head, whole norms, parallel blocks, windows, soft caps.
`test_interpreted.py` runs it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from triton.runtime import interpreter

from quire.kernels import Fused, Kernels, select_torch
from quire.kernels.cuda.activation import activate, gelu_mul, silu_mul
from quire.kernels.cuda.attention.dispatch import attention, rope_attention
from quire.kernels.cuda.gemm.skinny import gated_linear
from quire.kernels.cuda.latent import rope_store_latent
from quire.kernels.cuda.norm import layer_norm, rms_norm
from quire.kernels.cuda.rope import rope_store, store_kv
from quire.kernels.paging import LayerCache
from quire.weights.loader import load_model
from tests.kernels.interpreted import patch_index
from tests.models.test_families import TOKENS, layout, run
from tests.tools.family_cases import expected_logits, save
from tests.tools.paged import PagedCache

STEPS = [[(0, 12), (1, 3)], [(0, 1), (1, 1)]]
FAMILIES = ("bloom", "cohere2", "falcon-7b", "gemma2", "glm4", "gpt2", "olmo2", "phi")


def gpu_ops() -> Kernels:
    names = [activate, attention, gelu_mul, layer_norm, rms_norm, silu_mul, store_kv]
    fused = Fused(rope_store, rope_attention, gated_linear, rope_store_latent)
    return replace(select_torch("cpu"), **{op.__name__: op for op in names}, fused=fused)  # type: ignore[arg-type]


def check(name: str) -> None:
    with TemporaryDirectory() as folder:
        loaded = load_model(save(name, Path(folder)), dtype="float32", ops=gpu_ops())
    paged = PagedCache(**layout(loaded.config))
    paged.layers = [
        LayerCache(
            torch.zeros_like(layer.k.transpose(1, 2).contiguous()),  # a GPU's cache is finite everywhere
            torch.zeros_like(layer.v.transpose(1, 2).contiguous()),
            layer.group,
            layer.block_size,
        )
        for layer in paged.layers
    ]
    with torch.inference_mode():
        for sequence, hidden in run(loaded.model, paged, STEPS).items():
            expected = expected_logits(name, TOKENS[sequence, : len(hidden)])
            torch.testing.assert_close(loaded.model.head(hidden), expected, atol=1e-3, rtol=0)


if __name__ == "__main__":
    interpreter._patch_lang_tensor = patch_index
    for family in FAMILIES:
        check(family)
