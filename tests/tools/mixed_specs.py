"""Declarations of layers that keep different things, as models and their draft models may make them."""

from __future__ import annotations

from quire.kernels.cache_spec import CacheSpec, KVCacheSpec, StateSpec

LATENT = KVCacheSpec(1, 576, value_dim=512, is_latent=True)
LARGE, SMALL = KVCacheSpec(8, 128), KVCacheSpec(2, 64)
WINDOW = KVCacheSpec(8, 128, window=512)
CROSS = KVCacheSpec(8, 128, is_cross=True)

MIXED_SPECS: dict[str, list[CacheSpec]] = {
    "latents beside heads": [LATENT, LARGE, LATENT, LARGE, LATENT],
    "a draft model of two small layers": [LARGE] * 3 + [SMALL] * 2,
    "a draft model of another type": [LARGE] * 3 + [KVCacheSpec(2, 64, dtype="float32")] * 2,
    "keys wider than values": [KVCacheSpec(4, 192, value_dim=128)] * 3,
    "windows of one shape": [WINDOW, WINDOW, LARGE] * 2,
    "windows of another shape": [WINDOW, WINDOW, SMALL] * 4,
    "windows of two sizes and a draft model": [WINDOW, KVCacheSpec(8, 128, window=7), LARGE] * 3 + [SMALL],
    "latents and windows": [WINDOW, WINDOW, LATENT] * 5,
    "cross-attention": [LARGE, CROSS] * 3,
    "cross-attention of another shape": [LARGE, KVCacheSpec(2, 64, is_cross=True)] * 3,
    "states": [LARGE] + [StateSpec((4, 64, 128), "float32")] * 6,
    "all kinds": [LATENT, WINDOW, StateSpec((3, 7), "float32"), CROSS, SMALL],
}  # fmt: skip
