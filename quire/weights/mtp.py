"""MTP: the layer for multi-token prediction in a model's own checkpoint, as a draft head. MiMo has one."""

from __future__ import annotations

from pathlib import Path

from quire.errors import InvalidParams
from quire.kernels import Kernels
from quire.layers.source import Source
from quire.models.eagle import Eagle, EagleConfig
from quire.weights.eagle import LoadedEagle, find_window
from quire.weights.heads import Target, build_head
from quire.weights.safetensors import SafetensorsFiles

LAYER = "model.mtp_layers.0"


def load_mtp(path: Path, target: Target, ops: Kernels, dtype: str = "float32") -> LoadedEagle:
    """`path` is the model's."""
    model = target.config
    if model.num_mtp_layers != 1 or not path.is_dir():
        found = "is a GGUF file" if not path.is_dir() else f"has {model.num_mtp_layers or 'none'} of them"
        raise InvalidParams(
            "speculate has mtp, which needs a model with one layer for multi-token prediction, in safetensors (MiMo), "
            f"and {path.name} {found}; leave it out.",
            "speculate",
        )
    rotary = target.model.layers[0].attention.rotary
    assert rotary is not None
    config = EagleConfig(
        kind="mtp",
        layer=LAYER,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        norm_eps=model.norm_eps,
        attention_bias=model.attention_bias,
        window=find_window(model.windows),
    )

    def make(source: Source) -> Eagle:
        return Eagle(config, source, ops, target.model.embedding, rotary)

    return LoadedEagle(build_head(SafetensorsFiles(path), make, ops, {}, dtype, f"{LAYER}."), None, None)
