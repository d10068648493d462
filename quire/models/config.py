"""ModelConfig: the configuration of a model, in one form for all file formats.

`weights/config.py` makes it from a `config.json` or from GGUF metadata; the models read it. This module uses neither
torch nor files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quire.kernels.routing import ExpertActivation, Routing
from quire.models.structure import Structure

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How RoPE is scaled beyond the context of the first training."""

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: float
    original_max_len: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope; None: derived from `factor`
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    short_divisors: tuple[float, ...] = ()  # longrope, one a frequency: of engines up to the original length
    long_divisors: tuple[float, ...] = ()  # longrope: of engines with a longer context


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. `interleaved` pairs dimensions (2i, 2i + 1); otherwise (i, i + dim / 2) are paired."""

    dim: int
    theta: float = 10_000.0
    interleaved: bool = False
    scaling: RopeScaling | None = None
    divisors: tuple[float, ...] | None = None  # one a frequency (dim / 2): how GGUF files store llama3's scaling


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters for requests that do not set them. The defaults here are for models that name none."""

    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    from_model: bool = False  # the model's files set at least one of them

    def as_params(self) -> dict[str, float]:
        """By the names of SamplingParams."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
        }


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP, in some of the layers."""

    routing: Routing
    intermediate_size: int  # of one expert
    layers: tuple[bool, ...]  # one a layer; the others have a plain MLP
    shared_size: int = 0  # intermediate size of the expert that all tokens have; 0: there is none
    shared_name: str = "shared_expert"
    shared_gate: bool = False  # its output is multiplied by the sigmoid of a product
    router_bias: bool = False
    has_correction: bool = False  # a vector that is added to the scores for the choice
    bias: bool = False  # on the experts' matrices
    activation: ExpertActivation = "silu"
    limit: float = 0.0  # of "clamped_silu"


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of latent attention (MLA), of one head where it is not said."""

    rank: int  # of the latent, which all heads share
    rotated_dim: int  # of queries and keys, behind the rest; all heads share the keys'
    key_dim: int  # of the queries and keys that do not rotate
    value_dim: int
    query_rank: int = 0  # of the latent that queries are projected from; 0: from the hidden state

    @property
    def query_dim(self) -> int:
        return self.key_dim + self.rotated_dim

    @property
    def head_dim(self) -> int:
        """What the cache holds of a token."""
        return self.rank + self.rotated_dim


@dataclass(frozen=True, slots=True)
class Gemma4Config:
    """What Gemma 4 has beside the values that all families share, which are those of layers with a window."""

    global_head_dim: int  # in layers without a window
    global_kv_heads: int
    keys_are_values: bool = False  # in layers without a window
    num_sharing: int = 0  # the last layers read the cache of the last layer of their kind before them
    sharing_size: int = 0  # intermediate size of their MLPs; 0: that of the others
    per_layer_size: int = 0  # of the embeddings that each layer has of its own; 0: there are none
    per_layer_vocab: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one decoder-only transformer."""

    family: str  # a key of models/registry.py
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_len: int
    rope: Rope
    windows: tuple[int | None, ...]  # one a layer: tokens that a token sees (itself included), None for all
    norm_eps: float = 1e-6
    local_rope: Rope | None = None  # of layers with a window, if it differs (Gemma 3)
    tie_embeddings: bool = False  # the output matrix is the embedding
    attention_bias: bool = False  # on q, k and v
    output_bias: bool = False  # on the attention's output projection
    mlp_bias: bool = False
    activation: Activation = "silu"
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    norm_offset: bool = False  # norms multiply by (1 + weight), as Gemma's safetensors are stored
    embedding_multiplier: float = 1.0
    experts: ExpertsConfig | None = None
    gemma4: Gemma4Config | None = None
    latent: LatentConfig | None = None  # then `head_dim` is the latent's, and there is one key head
    attention_sinks: bool = False  # one more term in the softmax of each head
    structure: Structure = field(default_factory=Structure)  # of families that `models/transformer.py` builds
    num_mtp_layers: int = 0  # layers for multi-token prediction, which only draft: `weights/mtp.py`
    eos_token_ids: tuple[int, ...] = ()
    sampling: SamplingDefaults = SamplingDefaults()

    @property
    def head_dims(self) -> set[int]:
        return {self.head_dim} if self.gemma4 is None else {self.head_dim, self.gemma4.global_head_dim}

    def layer_heads(self, layer: int) -> tuple[int, int]:
        """A layer's number of key heads, and the dimensions of one."""
        if self.gemma4 is None or self.windows[layer] is not None:
            return self.num_kv_heads, self.head_dim
        return self.gemma4.global_kv_heads, self.gemma4.global_head_dim

    @property
    def num_stored_layers(self) -> int:
        """The layers that have keys and values of their own. They come first."""
        return self.num_layers - (0 if self.gemma4 is None else self.gemma4.num_sharing)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
