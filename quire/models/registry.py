"""The model families: `MODELS[config.family](config, source, ops)` builds a model.

MiMo, Mistral, Qwen2 and Qwen3 are Llamas. Comments state how a family differs from Llama.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.kernels import Kernels
from quire.layers.source import Source
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder
from quire.models.gemma3 import Gemma3
from quire.models.gemma4 import Gemma4
from quire.models.llama import Llama
from quire.models.transformer import Transformer

MODELS: dict[str, Callable[[ModelConfig, Source, Kernels], Decoder]] = {
    "bloom": Transformer,  # ALiBi, a norm of the embeddings
    "cohere": Transformer,  # Command R: attention and MLP in parallel, LayerNorms without bias
    "cohere2": Transformer,  # Command R7B: as Cohere, with windows, and global layers that do not rotate
    "deepseek": Llama,  # V2, V2-Lite and V3: latent attention and experts: `ModelConfig.latent`
    "falcon": Transformer,  # 7B: one key head, attention and MLP in parallel. RW models: ALiBi
    "falcon_40b": Transformer,  # as Falcon, with grouped key heads and two norms a layer
    "gemma2": Transformer,  # norms before and after, soft caps
    "gemma3": Gemma3,
    "gemma4": Gemma4,  # head sizes by layer, keys that are values, caches that layers share, experts beside the MLP
    "glm": Transformer,  # half of a head rotates
    "glm4": Transformer,  # as GLM, with norms before and after
    "gpt2": Transformer,  # learned positions, transposed matrices, LayerNorms, an MLP without a gate
    "gpt_bigcode": Transformer,  # StarCoder: as GPT-2 with one key head
    "gpt_neox": Transformer,  # and Pythia: attention and MLP in parallel, a quarter of a head rotates
    "gpt_oss": Llama,  # experts with biases, attention sinks, windows in every other layer
    "granitemoe": Llama,  # experts, and multipliers as Granite
    "gptj": Transformer,  # attention and MLP in parallel, neighbours rotate, a bias on the output matrix
    "granite": Transformer,  # multipliers of embeddings, residuals, scores and logits
    "llama": Llama,
    "mistral": Llama,  # sliding windows: `ModelConfig.windows`
    "ministral": Transformer,  # windows in some layers
    "mpt": Transformer,  # ALiBi, no biases
    "olmo2": Transformer,  # norms after attention and MLP, whole queries and keys are normed
    "olmo3": Transformer,  # as OLMo 2, with windows
    "opt": Transformer,  # learned positions from row 2 on, ReLU
    "phi": Transformer,  # Phi-1 and 2: attention and MLP in parallel, a bias on the output matrix
    "phi3": Transformer,  # and Phi-4: fused matrices, LongRoPE
    "seed_oss": Transformer,  # a Llama with biases on q, k and v
    "smollm3": Transformer,  # every fourth layer does not rotate
    "starcoder2": Transformer,  # LayerNorms, an MLP without a gate
    "mimo": Llama,  # a Qwen2 with layers for multi-token prediction: `ModelConfig.num_mtp_layers`
    "mixtral": Llama,  # experts
    "olmoe": Llama,  # experts; whole queries and keys are normed
    "qwen2": Llama,  # Qwen2 and Qwen2.5. Biases on q, k and v: `ModelConfig.attention_bias`
    "qwen2_moe": Llama,  # experts, one of which all tokens have
    "qwen3_moe": Llama,  # experts
    "qwen3": Llama,  # each head of q and k is normed before rotation
}
