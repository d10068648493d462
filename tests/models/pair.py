"""Pair: a tiny random transformers model and quire's with the same weights, and a run of the latter in steps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire.kernels import select_torch
from quire.models.config import ModelConfig
from quire.models.registry import MODELS
from quire.weights.json_config import config_from_json
from tests.tools.paged import PagedCache
from tests.tools.state_dict_source import StateDictSource

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@dataclass
class Case:
    """The names of a configuration and a model in transformers, and what differs from SIZES."""

    config: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)


class Pair:
    def __init__(self, case: Case) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            import transformers

        torch.manual_seed(0)
        config = getattr(transformers, case.config)(**(SIZES | case.options))
        config._attn_implementation = "eager"
        self.theirs = getattr(transformers, case.model)(config).eval()
        for name, parameter in self.theirs.named_parameters():
            one = name.endswith("norm.weight") and case.config != "Gemma3TextConfig"
            parameter.data.normal_(float(one), 0.2)
        self.source = StateDictSource(self.theirs.state_dict())
        self.config = config_from_json(config.to_dict() | {"architectures": [case.model]})
        self.ours = MODELS[self.config.family](self.config, self.source, select_torch("cpu"))

    def expected(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.theirs(tokens[None], use_cache=False).logits[0].float()
        return logits


Steps = Sequence[Sequence[tuple[int, int]]]


def run(
    model: Any, config: ModelConfig, tokens: dict[int, Tensor], steps: Steps, dtype: torch.dtype = torch.float32
) -> dict[int, Tensor]:
    """Logits of each sequence's tokens, computed in steps of (sequence, count) rows."""
    windows = sorted(set(config.windows), key=lambda window: window or 0)
    groups = [windows.index(window) for window in config.windows]
    cache = PagedCache(
        kv_heads=config.num_kv_heads, head_dim=config.head_dim, groups=groups, windows=windows, dtype=dtype
    )
    if config.latent is not None:
        for layer in cache.layers:
            layer.v = layer.k[..., : config.latent.rank]
    done = dict.fromkeys(tokens, 0)
    logits: dict[int, list[Tensor]] = {sequence: [] for sequence in tokens}
    for rows in steps:
        paging = cache.step(rows)
        ids = torch.cat([tokens[sequence][done[sequence] :][:count] for sequence, count in rows])
        out = model.head(model(ids, cache.positions(rows), paging, cache.layers))
        for (sequence, count), part in zip(rows, out.split([count for _, count in rows]), strict=True):
            logits[sequence].append(part)
            done[sequence] += count
    return {sequence: torch.cat(parts) for sequence, parts in logits.items()}


def draw_tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed))
