"""Eagle: a draft head of one layer that continues the target's hidden states. EAGLE 1, 2 and 3, and MTP layers.

The row of position i gets the features of token i and the embedding of token i + 1, and guesses token i + 2. Its keys
and values are in a cache of its own, and its output is the feature of the next, drafted token. `engine/eagle.py` runs
it, `weights/eagle.py` loads it, and `quire train-draft` makes one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from quire.kernels import Kernels
from quire.kernels.cache_spec import KVCacheSpec
from quire.kernels.paging import LayerCache
from quire.layers.attention import Attention
from quire.layers.embedding import Embedding
from quire.layers.linear import JoinedLinear, Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryTable
from quire.layers.source import Part, Source


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Sizes of the layer and how it is wired.

    kind            "eagle3": q, k and v are projected from both inputs, the features are fused from `tap_layers`
                    "eagle": EAGLE 1 and 2. Both inputs are projected to one. The features are the final hidden states
                    "mtp": as "eagle", with norms of both inputs, of the attention's input and of the output
    layer           name of the layer in the file
    tap_layers      layers of the target whose hidden states are fused, ascending; an index means the state after it
    norm_residual   eagle3: the residual is the normed feature instead of the feature
    """

    kind: Literal["eagle", "eagle3", "mtp"]
    layer: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tap_layers: tuple[int, ...] = ()
    target_hidden_size: int | None = None  # None: hidden_size
    attention_bias: bool = False  # on q, k and v
    join_bias: bool = False  # eagle: on the projection of both inputs
    norm_residual: bool = False
    window: int | None = None  # tokens that a row sees, itself included
    own_embedding: bool = False  # the file has an embedding of its own

    @property
    def num_features(self) -> int:
        """The width of a token's features before `fuse`."""
        size = self.target_hidden_size or self.hidden_size
        return size * (len(self.tap_layers) or 1)


class Eagle:
    """The matrices of the head, without that of the output: see `LoadedEagle`."""

    def __init__(
        self,
        config: EagleConfig,
        source: Source,
        ops: Kernels,
        embedding: Embedding,
        rotary: RotaryTable,
    ) -> None:
        """`embedding` is the target's."""
        self.config = config
        self.ops = ops
        vocab_size = embedding.weight.shape[0]
        self.embedding = embedding
        if config.own_embedding:
            self.embedding = Embedding(source, "embed_tokens", vocab_size=vocab_size, hidden_size=config.hidden_size)
        self.fusion = (
            Linear(source, [Part("fc", config.hidden_size)], config.num_features) if config.tap_layers else None
        )
        self.token_norm, self.feature_norm, self.input_norm, self.norm = self._build_norms(source)
        self.join = self._build_join(source)
        self.attention = Attention(
            source,
            ops,
            f"{config.layer}.self_attn",
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            rotary=rotary,
            window=config.window,
            bias=config.attention_bias,
            joined=config.kind == "eagle3",
        )
        self.mlp_norm = self._build_norm(source, f"{config.layer}.post_attention_layernorm")
        self.mlp = GatedMLP(
            source,
            ops,
            f"{config.layer}.mlp",
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
        )

    @property
    def cache_spec(self) -> KVCacheSpec:
        return self.attention.cache_spec

    def fuse(self, features: Any) -> Any:
        """The target's states of tokens, [n, num_features] -> [n, hidden_size]."""
        return features if self.fusion is None else self.fusion(features)

    def __call__(self, tokens: Any, features: Any, positions: Any, paging: Any, cache: LayerCache) -> tuple[Any, Any]:
        """tokens [n] int64: the tokens after those of `features` [n, hidden_size], which may be overwritten.

        positions [n] are those of the features. Returns the input of the output matrix, and the features of the next
        tokens, [n, hidden_size] each.
        """
        x, residual = self._enter(self.embedding(tokens), features)
        x, residual = self.mlp_norm.add(self.attention(x, positions, paging, cache), residual)
        x = self.mlp(x)
        if self.norm is None:
            x = self.ops.add(x, residual)
            return x, x
        x, residual = self.norm.add(x, residual)
        return x, x if self.config.kind == "mtp" else residual

    def store(self, tokens: Any, features: Any, positions: Any, slots: Any, cache: LayerCache) -> None:
        """Store the keys and values of tokens, which later tokens read, and compute nothing else. slots [n] int64"""
        x, _ = self._enter(self.embedding(tokens), features)
        self.attention.store(x, positions, slots, cache)

    def _enter(self, x: Any, features: Any) -> tuple[Any, Any]:
        """The attention's input and the residual."""
        if self.token_norm is not None:
            x = self.token_norm(x)
        normed = features if self.feature_norm is None else self.feature_norm(features)
        if self.join is None:
            return (x, normed), normed if self.config.norm_residual else features
        pair = (normed, x) if self.config.kind == "mtp" else (x, normed)
        x = self.join(pair)
        return (x if self.input_norm is None else self.input_norm(x)), x

    def _build_norm(self, source: Source, name: str) -> RMSNorm:
        return RMSNorm(source, self.ops, name, size=self.config.hidden_size, eps=self.config.norm_eps)

    def _build_norms(self, source: Source) -> tuple[RMSNorm | None, ...]:
        """Of the embedding, the features, the attention's input and the output."""
        kind, layer = self.config.kind, self.config.layer
        names: dict[str, tuple[str | None, ...]] = {
            "eagle": (None, None, None, None),
            "eagle3": (f"{layer}.input_layernorm", f"{layer}.hidden_norm", None, "norm"),
            "mtp": tuple(f"{layer}.{name}_layernorm" for name in ("token", "hidden", "input", "final")),
        }
        return tuple(None if name is None else self._build_norm(source, name) for name in names[kind])

    def _build_join(self, source: Source) -> JoinedLinear | None:
        """The projection of both inputs to one."""
        config = self.config
        if config.kind == "eagle3":
            return None
        part = Part("fc" if config.kind == "eagle" else f"{config.layer}.input_proj", config.hidden_size)
        return JoinedLinear(source, self.ops, [part], config.hidden_size, bias=config.join_bias)
