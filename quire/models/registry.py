"""The model families: `MODELS[config.family](config, source, ops)` builds a model.

MiMo, Mistral, Qwen2 and Qwen3 are Llamas. Comments state how a family differs from Llama.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from quire.kernels import Kernels
from quire.layers.source import Source
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder
from quire.models.gemma3 import Gemma3
from quire.models.llama import Llama

MODELS: dict[str, Callable[[ModelConfig, Source, Kernels], Decoder]] = {
    "gemma3": Gemma3,
    "llama": Llama,
    "mistral": Llama,  # sliding windows: `ModelConfig.windows`
    "mimo": Llama,  # a Qwen2 with layers for multi-token prediction: `ModelConfig.num_mtp_layers`
    "qwen2": Llama,  # Qwen2 and Qwen2.5. Biases on q, k and v: `ModelConfig.attention_bias`
    "qwen3": partial(Llama, qk_norm=True),  # each head of q and k is normed before rotation
}
