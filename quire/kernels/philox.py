"""Philox4x32-10: random numbers as a function of (key, counter), without state.

Words are int64 tensors with values below 2**32, so that every device gives the same bits. `sampling.py` calls it.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
NUM_WORDS = 4  # of a counter and of an output
LANES = 16  # consecutive ids take the same word of consecutive counters, so vector kernels need no shuffles


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """A counter of four words and a key of two -> four words. A word is an int64 tensor of values < 2**32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def token_words(seed: Tensor, length: Tensor, vocab_size: int) -> Tensor:
    """seed [], length [] int64 -> [vocab_size] int64 < 2**32: a random word for each token id.

    The seed's 64 bits are the key. The counter is the length (two words), a number that depends on the id, and zero.
    64 ids share 16 counters: word w of counter 16 * block + lane is that of id 64 * block + 16 * w + lane. So an id's
    word does not depend on the size of the vocabulary.
    """
    blocks = -(-vocab_size // (NUM_WORDS * LANES))
    numbers = torch.arange(blocks * LANES, device=seed.device)
    counter = (length & WORD, (length >> 32) & WORD, numbers, torch.zeros_like(numbers))
    words = philox(counter, (seed & WORD, (seed >> 32) & WORD))
    return torch.stack([word.view(blocks, LANES) for word in words], dim=1).flatten()[:vocab_size]


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low word of the 64-bit product. int64 wraps where uint64 does not; the bits are the same."""
    product = word * factor
    return (product >> 32) & WORD, product & WORD
