"""Philox4x32-10 against the known answers that Random123 publishes, and against one on Python integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.philox import philox, token_words

pytestmark = pytest.mark.cpu

# counter (4 words), key (2 words), result (4 words)
KNOWN_ANSWERS = [
    "00000000 00000000 00000000 00000000  00000000 00000000  6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff ffffffff ffffffff ffffffff  ffffffff ffffffff  408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344  a4093822 299f31d0  d16cfe09 94fdcceb 5001e420 24126ea1",
]
INT64 = st.integers(-(2**63), 2**63 - 1)


def on_integers(counter: list[int], key: list[int]) -> list[int]:
    for step in range(10):
        k0, k1 = ((start + step * add) % 2**32 for start, add in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [(second >> 32) ^ counter[1] ^ k0, second % 2**32, (first >> 32) ^ counter[3] ^ k1, first % 2**32]
    return counter


@pytest.mark.parametrize("line", KNOWN_ANSWERS)
def test_known_answers(line: str) -> None:
    words = [int(word, 16) for word in line.split()]
    c0, c1, c2, c3, k0, k1 = (torch.tensor([word]) for word in words[:6])
    assert [int(word) for word in philox((c0, c1, c2, c3), (k0, k1))] == words[6:]
    assert on_integers(words[:4], words[4:6]) == words[6:]


@given(seed=INT64, length=INT64, token=st.integers(0, 5000))
def test_the_word_of_an_id_is_one_of_its_counter(seed: int, length: int, token: int) -> None:
    block, word, lane = token // 64, token % 64 // 16, token % 16
    counter = [length % 2**32, length % 2**64 >> 32, 16 * block + lane, 0]
    expected = on_integers(counter, [seed % 2**32, seed % 2**64 >> 32])[word]
    words = token_words(torch.tensor(seed), torch.tensor(length), token + 1)
    assert len(words) == token + 1
    assert words[token] == expected


def test_words_do_not_depend_on_the_size_of_the_vocabulary() -> None:
    seed, length = torch.tensor(7), torch.tensor(11)
    whole = token_words(seed, length, 1000)
    assert len(set(whole.tolist())) == 1000
    for size in (1, 15, 16, 17, 63, 64, 65, 999):
        assert torch.equal(token_words(seed, length, size), whole[:size])


def test_words_are_uniform() -> None:
    words = token_words(torch.tensor(5), torch.tensor(3), 20_000).double() / 2**32
    counts = torch.histc(words, bins=20, min=0, max=1)
    chi_squared = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi_squared < 43.8  # 19 degrees of freedom, one in a thousand; the words are fixed
