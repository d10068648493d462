"""Gumbel noise of chosen ids, in numpy: the noise with which `sample` chooses a token (`sampling.py`).

Draft heads use it for their few best candidates, as the op `gumbel`, which takes numpy arrays on every backend.
`reference_sampling.gumbel` computes it for a whole vocabulary.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WORD = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)  # of Philox4x32-10, as in philox.py
KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
ROUNDS = 10
NUM_WORDS, LANES = 4, 16  # which word of which counter an id has: see `philox.token_words`

Words = NDArray[np.uint64]
Ids = NDArray[np.int64]


def gumbel(seeds: Ids, lengths: Ids, ids: Ids) -> NDArray[np.float32]:
    """seeds [n], lengths [n], ids [n, m] -> [n, m]: the noise of each id, for a token after `length` others."""
    words = token_words(seeds.astype(np.uint64)[:, None], lengths.astype(np.uint64)[:, None], ids.astype(np.uint64))
    uniform = words.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    uniform = np.minimum(uniform, np.float32(1 - 2.0**-24)).astype(np.float64)
    noise: NDArray[np.float32] = (-np.log(-np.log1p(-uniform))).astype(np.float32)
    return noise


def token_words(seeds: Words, lengths: Words, ids: Words) -> Words:
    block, within = np.divmod(ids, np.uint64(NUM_WORDS * LANES))
    word, lane = np.divmod(within, np.uint64(LANES))
    counter = block * np.uint64(LANES) + lane
    c0, c1, c2, c3 = np.broadcast_arrays(lengths & WORD, lengths >> HALF, counter, np.uint64(0))
    k0, k1 = seeds & WORD, seeds >> HALF
    for _ in range(ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> HALF) ^ c1 ^ k0, second & WORD, (first >> HALF) ^ c3 ^ k1, first & WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    chosen: Words = np.choose(word.astype(np.int64), [c0, c1, c2, c3])
    return chosen
