"""What quire's GPU kernels refuse of models with latents. It needs no GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.backend import check_gpu_latent
from quire.engine.draft_heads import check_gpu_head
from quire.errors import UnsupportedModel
from quire.models.config import LatentConfig

pytestmark = pytest.mark.cpu


def test_latents_have_a_limit() -> None:
    check_gpu_latent(LatentConfig(rank=512, rotated_dim=64, key_dim=128, value_dim=128))
    for sizes in ((528, 64), (512, 80)):
        with pytest.raises(UnsupportedModel, match=rf"at most 512 \+ 64 .* have {sizes[0]} \+ {sizes[1]}"):
            check_gpu_latent(LatentConfig(*sizes, key_dim=128, value_dim=128))


def test_no_draft_heads_beside_latents() -> None:
    sizes = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 48, "hidden_size": 64}
    head: Any = SimpleNamespace(kind="eagle3", tap_layers=(0, 1, 2), **sizes)
    loaded: Any = SimpleNamespace(head=SimpleNamespace(config=head))
    latent = LatentConfig(rank=32, rotated_dim=16, key_dim=16, value_dim=16)
    target: Any = SimpleNamespace(config=SimpleNamespace(num_layers=8, latent=latent, windows=(), **sizes))
    with pytest.raises(UnsupportedModel, match="latent attention, with which quire runs no draft head on a GPU"):
        check_gpu_head(Path("head"), loaded, target)
