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
    "deepseek": Llama,  # V2, V2-Lite and V3: latent attention and experts: `ModelConfig.latent`
    "gemma3": Gemma3,
    "gpt_oss": Llama,  # experts with biases, attention sinks, windows in every other layer
    "granitemoe": Llama,  # experts and multipliers: `ModelConfig.experts`, `embedding_multiplier`
    "llama": Llama,
    "mistral": Llama,  # sliding windows: `ModelConfig.windows`
    "mimo": Llama,  # a Qwen2 with layers for multi-token prediction: `ModelConfig.num_mtp_layers`
    "mixtral": Llama,  # experts
    "olmoe": partial(Llama, qk_norm=True),  # experts, `ModelConfig.wide_qk_norm`
    "qwen2": Llama,  # Qwen2 and Qwen2.5. Biases on q, k and v: `ModelConfig.attention_bias`
    "qwen2_moe": Llama,  # experts, one of which all tokens have
    "qwen3_moe": partial(Llama, qk_norm=True),  # experts
    "qwen3": partial(Llama, qk_norm=True),  # each head of q and k is normed before rotation
}
