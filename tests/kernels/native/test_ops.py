"""Norm, rotation, gates, cache writes and sampling: C++ kernels against the reference, on every instruction set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.core.params import SamplingParams
from quire.engine.sampling_state import settings_of
from quire.kernels import reference
from quire.kernels.cache_spec import KVCacheSpec
from quire.kernels.paging import LayerCache
from quire.kernels.sampling import IN_PROMPT
from tests.tools.native import THREADS, draw, each_cache_type, each_isa, kept, ops_of

pytestmark = pytest.mark.cpu

few = settings(max_examples=25, deadline=None)
sizes = st.integers(1, 100)
tokens = st.integers(0, 9)
seeds = st.integers(0, 99)
thread_counts = st.sampled_from(THREADS)


def close(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)


@each_isa
@few
@given(tokens=tokens, size=sizes, seed=seeds, threads=thread_counts)
def test_norm(name: str, tokens: int, size: int, seed: int, threads: int) -> None:
    x, weight = draw(tokens, size, seed=seed), draw(size, seed=seed + 1)
    before = x.clone()
    close(ops_of(name, threads).rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(x, before)


@each_isa
@few
@given(tokens=tokens, heads=st.integers(1, 5), size=sizes, seed=seeds, threads=thread_counts)
def test_norm_of_each_head(name: str, tokens: int, heads: int, size: int, seed: int, threads: int) -> None:
    x, weight = draw(tokens, heads + 2, size, seed=seed)[:, 1:-1], draw(size, seed=seed + 1)
    close(ops_of(name, threads).rms_norm(x, weight, 1e-3), reference.rms_norm(x, weight, 1e-3))


@each_isa
@few
@given(tokens=tokens, size=sizes, seed=seeds, threads=thread_counts)
def test_norm_of_a_sum(name: str, tokens: int, size: int, seed: int, threads: int) -> None:
    (x, residual), weight = draw(2, tokens, size, seed=seed), draw(size, seed=seed + 1)
    normed, total = ops_of(name, threads).rms_norm(x, weight, 1e-5, residual)
    expected, expected_total = reference.rms_norm(x, weight, 1e-5, residual)
    close(normed, expected)
    assert torch.equal(total, expected_total)


@each_isa
@pytest.mark.parametrize("has_bias", [False, True])
@few
@given(tokens=tokens, size=sizes, seed=seeds, threads=thread_counts)
def test_layer_norm(name: str, has_bias: bool, tokens: int, size: int, seed: int, threads: int) -> None:
    """The deviation of one value is nothing, and so are the numbers that it is divided by: `eps` is not."""
    (x, residual), (weight, shift) = draw(2, tokens, size, seed=seed), draw(2, size, seed=seed + 1)
    x, bias, ops = x + 1, shift if has_bias else None, ops_of(name, threads)
    before = x.clone()
    expected = reference.layer_norm(x, weight, bias, 1e-2)
    torch.testing.assert_close(ops.layer_norm(x, weight, bias, 1e-2), expected, atol=1e-5, rtol=1e-5)
    normed, total = ops.layer_norm(x, weight, bias, 1e-2, residual)
    expected, expected_total = reference.layer_norm(x, weight, bias, 1e-2, residual)
    torch.testing.assert_close(normed, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(total, expected_total)
    assert torch.equal(x, before)


@each_isa
@few
@given(tokens=tokens, size=sizes, seed=seeds, threads=thread_counts)
def test_add(name: str, tokens: int, size: int, seed: int, threads: int) -> None:
    ops, (x, y) = ops_of(name, threads), draw(2, tokens, size, seed=seed)
    assert torch.equal(ops.add(x, y), x + y)
    assert torch.equal(ops.add(x, y, 0.3), (x + y) * 0.3)
    assert torch.equal(ops.multiply(x, y), x * y)


@each_isa
def test_values_of_a_tape_are_added_and_kept_as_long_as_they_are_used(name: str) -> None:
    ops, (x, y) = ops_of(name), draw(2, 7, 33)

    def record(a, b):
        total = a + b
        first = ops.activate(total, "relu")
        second = ops.add(first, total)
        return second + first, total

    out, total = ops._at_once(record, (x, y))
    assert torch.equal(total, x + y)
    assert torch.equal(out, (torch.relu(x + y) + (x + y)) + torch.relu(x + y))


@each_isa
def test_a_tape_adds_values_of_one_shape_only(name: str) -> None:
    with pytest.raises(AssertionError):
        ops_of(name).add(draw(3, 8), draw(3, 9))


@each_isa
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu"])
@few
@given(tokens=tokens, size=sizes, seed=seeds, threads=thread_counts)
def test_activate(name: str, activation: str, tokens: int, size: int, seed: int, threads: int) -> None:
    ops, x = ops_of(name, threads), 4 * draw(tokens, size, seed=seed)
    torch.testing.assert_close(ops.activate(x, activation), reference.activate(x, activation), atol=2e-6, rtol=4e-6)


@each_isa
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu"])
def test_activate_far_out(name: str, activation: str) -> None:
    x = torch.tensor([[-1e4, -200.0, -30.0, -6.0, -1e-30, 0.0, 1e-30, 6.0, 30.0, 200.0, 1e4, float("nan")]])
    out, expected = ops_of(name).activate(x, activation), reference.activate(x, activation)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6, equal_nan=True)


def rotary_table(dim: int) -> Tensor:
    angles = torch.outer(torch.arange(50.0), 10.0 ** -torch.arange(dim // 2))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@each_isa
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@few
@given(
    tokens=tokens,
    heads=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    dims=st.sampled_from([(16, 16), (16, 4), (32, 30), (48, 24), (80, 2), (128, 128), (256, 64)]),
    seed=seeds,
    threads=thread_counts,
)
def test_rope(name, interleaved, tokens, heads, kv_heads, dims, seed, threads) -> None:
    head_dim, dim = dims
    q, k = draw(tokens, heads + kv_heads, head_dim, seed=seed).split([heads, kv_heads], dim=1)
    positions = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(seed))
    before = q.clone()
    turned = ops_of(name, threads).rope(q, k, positions, rotary_table(dim), interleaved)
    for out, expected in zip(turned, reference.rope(q, k, positions, rotary_table(dim), interleaved), strict=True):
        close(out, expected)
    assert torch.equal(q, before)


@each_isa
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
def test_rope_of_one_buffer_is_that_of_two(name: str, interleaved: bool) -> None:
    """A model's q and k lie side by side and are turned in one go; v behind them is left alone."""
    ops, qkv, table = ops_of(name), draw(7, 6, 32), rotary_table(24)
    positions = torch.arange(7)

    def turn(value):
        q, k, v = value.split_with_sizes([3, 1, 2], dim=1)
        return *ops.rope(q, k, None, table, interleaved), v

    q, k, v = ops._at_once(turn, (qkv,), positions=positions)
    apart = ops.rope(qkv[:, :3].clone(), qkv[:, 3:4].clone(), positions, table, interleaved)
    assert torch.equal(q, apart[0])
    assert torch.equal(k, apart[1])
    assert torch.equal(v, qkv[:, 4:])


@each_isa
@few
@given(tokens=tokens, size=sizes, seed=seeds, threads=thread_counts)
def test_gates(name: str, tokens: int, size: int, seed: int, threads: int) -> None:
    ops, x = ops_of(name, threads), 4 * draw(tokens, 2 * size, seed=seed)
    torch.testing.assert_close(ops.silu_mul(x), reference.silu_mul(x), atol=4e-6, rtol=4e-6)
    torch.testing.assert_close(ops.gelu_mul(x), reference.gelu_mul(x), atol=4e-6, rtol=4e-6)


@each_isa
def test_gates_far_out(name: str) -> None:
    gate = torch.tensor([-1e4, -200.0, -90.0, -30.0, -1e-30, 0.0, 1e-30, 30.0, 90.0, 200.0, 1e4])
    x = torch.cat((gate, torch.ones_like(gate)))[None]
    for own, plain in ((ops_of(name).silu_mul, reference.silu_mul), (ops_of(name).gelu_mul, reference.gelu_mul)):
        torch.testing.assert_close(own(x), plain(x), atol=1e-12, rtol=4e-6)


@each_isa
def test_gates_of_what_is_not_a_number(name: str) -> None:
    x = torch.cat((torch.tensor([float("nan"), 1.0]), torch.ones(2)))[None]
    for gate in (ops_of(name).silu_mul, ops_of(name).gelu_mul):
        assert gate(x).isnan().tolist() == [[True, False]]


class Layout:
    """The caches as `csrc/attention.h` describes them, read back in plain torch."""

    def __init__(self, ops: Any, kind: str, blocks: int, block_size: int, kv_heads: int, head_dim: int) -> None:
        k, v, dtype = ops.cache_shapes(KVCacheSpec(kv_heads, head_dim), kind, block_size)
        assert v is not None
        self.lanes, self.head_dim = -(-block_size // 16) * 16, head_dim
        self.cache = LayerCache(
            torch.zeros(blocks, *k, dtype=getattr(torch, dtype)),
            torch.zeros(blocks, *v, dtype=getattr(torch, dtype)),
            0,
            block_size,
        )

    def keys(self) -> Tensor:
        """[blocks, lanes, kv_heads, head_dim] float32"""
        codes, scales = self.split(self.cache.k, self.head_dim * self.lanes)
        return (codes.unflatten(-1, (self.head_dim, self.lanes)) * scales.unsqueeze(-2)).permute(0, 3, 1, 2)

    def values(self) -> Tensor:
        """[blocks, block_size, kv_heads, head_dim] float32"""
        size = self.cache.block_size
        codes, scales = self.split(self.cache.v, self.head_dim * size)
        return (codes.unflatten(-1, (size, self.head_dim)) * scales[..., :size, None]).permute(0, 2, 1, 3)

    def split(self, cache: Tensor, size: int) -> tuple[Tensor, Tensor]:
        if cache.itemsize > 1:
            assert cache.shape[-1] == size
            return cache.float(), torch.ones(*cache.shape[:-1], self.lanes)
        assert cache.shape[-1] == size + 4 * self.lanes
        codes, scales = cache[..., :size].float(), cache[..., size:].contiguous().view(torch.float32)
        return codes, scales / 256 if cache.dtype == torch.float8_e4m3fn else scales


@each_isa
@each_cache_type
@pytest.mark.parametrize(("block_size", "kv_heads", "head_dim"), [(1, 1, 16), (3, 2, 48), (16, 3, 64), (40, 1, 256)])
@pytest.mark.parametrize("threads", THREADS)
def test_store_kv(name: str, kind: str, block_size: int, kv_heads: int, head_dim: int, threads: int) -> None:
    ops = ops_of(name, threads)
    layout = Layout(ops, kind, 5, block_size, kv_heads, head_dim)
    slots = torch.randperm(5 * block_size, generator=torch.Generator().manual_seed(1))[: 2 * block_size + 1]
    k, v = draw(2, len(slots), kv_heads + 1, head_dim)[:, :, 1:].unbind()
    v = v * 1e-3
    v[-1] = 0.0
    ops.store_kv(k, v, layout.cache, slots)
    for found, new in ((layout.keys(), k), (layout.values(), v)):
        expected = torch.zeros(5, found.shape[1], kv_heads, head_dim)
        expected[slots // block_size, slots % block_size] = kept(new, kind)
        assert torch.equal(found, expected)


@each_isa
@each_cache_type
def test_store_kv_of_no_token(name: str, kind: str) -> None:
    layout = Layout(ops_of(name), kind, 1, 4, 1, 16)
    ops_of(name).store_kv(torch.zeros(0, 1, 16), torch.zeros(0, 1, 16), layout.cache, torch.zeros(0, dtype=torch.int64))
    assert not layout.keys().any()


@each_isa
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_codes_show_what_is_not_finite(name: str, bad: float, kind: str) -> None:
    layout = Layout(ops_of(name), kind, 1, 4, 2, 16)
    k = torch.ones(1, 2, 16)
    k[0, 1, 5] = bad
    ops_of(name).store_kv(k, k, layout.cache, torch.tensor([2]))
    for found in (layout.keys(), layout.values()):
        assert found[0, 2, 1].isnan().all()
        assert found[0, 2, 0].eq(1).all()


def choose(name: str, x: Tensor, params: Sequence[SamplingParams], seed: int = 0, threads: int = 2) -> Any:
    """Tokens and largest logits of the C++ kernels, and of the reference."""
    wanted = torch.tensor([settings_of(each) for each in params], dtype=torch.float64).view(-1, 4)
    numbers, lengths = torch.arange(len(params)) * 7919 + seed, torch.arange(len(params)) * 3 + 1
    arguments = x, wanted, numbers, lengths
    return ops_of(name, threads).sample(*arguments), reference.sample(*arguments)


@each_isa
@few
@given(rows=st.integers(0, 7), cols=sizes, seed=seeds, threads=thread_counts)
def test_greedy_takes_the_first_of_equals(name: str, rows: int, cols: int, seed: int, threads: int) -> None:
    """Few different numbers, so that the largest is there more than once."""
    x = torch.randint(-3, 1, (rows, cols), generator=torch.Generator().manual_seed(seed)).float()
    (index, value), _ = choose(name, x, [SamplingParams(temperature=0.0)] * rows, threads=threads)
    for row in range(rows):
        assert value[row] == x[row].max()
        assert index[row] == x[row].tolist().index(x[row].max())


@each_isa
def test_rows_without_a_choice_say_so(name: str) -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.full((6, 37), -inf)
    x[1, 36] = -1e38
    x[2, :] = 7.0
    x[2, 20], x[2, 30] = nan, nan
    x[3, 5], x[3, 9] = inf, inf
    x[4, 3], x[4, 36] = 2.0, nan
    x[5, 0] = nan
    for params in (SamplingParams(temperature=0.0), SamplingParams(top_p=0.9, top_k=3), SamplingParams()):
        (index, value), _ = choose(name, x, [params] * 6)
        assert index.tolist() == [0, 36, 20, 5, 36, 0]
        torch.testing.assert_close(value, torch.tensor([-inf, -1e38, nan, inf, nan, nan]), equal_nan=True)


@each_isa
def test_sampling_of_a_wide_view(name: str) -> None:
    x = draw(5, 1000)[:, 100:900]
    (index, value), _ = choose(name, x, [SamplingParams(temperature=0.0)] * 5)
    assert torch.equal(index, x.argmax(-1))
    assert torch.equal(value, x.max(-1).values)


CHOICES = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 0.3, 0.7, 1.0, 2.5, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 7, 50, 5000]),
    top_p=st.sampled_from([1.0, 1.0, 0.10337, 0.50713, 0.90931, 0.99071]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
)


@each_isa
@few
@given(
    params=st.lists(CHOICES, min_size=1, max_size=5), cols=st.sampled_from([1, 5, 16, 63, 64, 65, 300, 4097, 10_000]),
    seed=seeds, threads=thread_counts, scale=st.sampled_from([0.3, 3.0, 30.0]), is_coarse=st.booleans(),
    is_banned=st.booleans(),
)  # fmt: skip
def test_sampling_is_that_of_the_reference(
    name: str, params: list[SamplingParams], cols: int, seed: int, threads: int, scale: float, is_coarse: bool,
    is_banned: bool,
) -> None:  # fmt: skip
    x = scale * torch.randn(len(params), cols, generator=torch.Generator().manual_seed(seed))
    if is_coarse:
        x = x.round()  # many are equal, at cuts too
    if is_banned:
        x[:, cols // 3 :] = -torch.inf
    (tokens, largest), (expected, expected_largest) = choose(name, x, params, seed, threads)
    assert torch.equal(largest, expected_largest)
    chosen = largest.isfinite()
    assert torch.equal(tokens[chosen], expected[chosen])


@each_isa
def test_each_id_has_the_noise_of_the_reference(name: str) -> None:
    """Where all logits are equal the noise decides alone."""
    x = torch.zeros(300, 5000)
    (tokens, _), (expected, _) = choose(name, x, [SamplingParams()] * 300)
    assert torch.equal(tokens, expected)
    assert len(set(tokens.tolist())) > 250


@each_isa
@pytest.mark.parametrize("size", [1, 9, 300])
def test_penalties(name: str, size: int) -> None:
    torch.manual_seed(size)
    logits = 3 * torch.randn(4, size)
    counts = torch.randint(-3, 3, (5, size), dtype=torch.int32).clamp(min=0)
    counts += (torch.rand(5, size) < 0.2).int() * IN_PROMPT
    index = torch.tensor([[2, 4, size - 1, 0], [0, 1, 0, 0], [3, 0, -1, -1]])
    penalties = torch.tensor([[1.3, 0.4, 0.1], [0.5, 0.0, 1.0], [1.0, -0.7, 0.0]])
    expected, unchanged = logits.clone(), counts.clone()
    reference.penalize(expected, counts, index, penalties)
    ops_of(name).penalize(logits, counts, index, penalties)
    assert torch.equal(logits, expected)
    assert torch.equal(counts, unchanged)
