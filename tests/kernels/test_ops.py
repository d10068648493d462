"""Norm, rotation, cache writes and activations, of the reference and of the CPU, against formulas in float64."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels import Kernels, reference, select_torch
from quire.kernels.cpu import ops as cpu
from quire.kernels.paging import LayerCache, Paging

pytestmark = pytest.mark.cpu

BACKENDS = pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SHAPES = pytest.mark.parametrize("shape", [(1, 1), (1, 24), (7, 24), (2, 3, 5)])


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Within one rounding of the dtype, and a little more in float32 where sums have an order."""
    eps = max(torch.finfo(out.dtype).eps, 1e-6)
    torch.testing.assert_close(out.double(), expected, atol=2 * eps, rtol=2 * eps)


def naive_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    rows = [row / math.sqrt(sum(float(a) ** 2 for a in row) / len(row) + eps) for row in x.reshape(-1, x.shape[-1])]
    return torch.stack(rows).view_as(x) * weight.double()


@BACKENDS
@DTYPES
@SHAPES
def test_rms_norm(ops, dtype, shape) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1])
    kept = x.clone()
    close(ops.rms_norm(x, weight, 1e-3), naive_norm(x, weight, 1e-3))
    assert torch.equal(x, kept)


@BACKENDS
@DTYPES
def test_rms_norm_adds_a_residual(ops, dtype) -> None:
    x, residual, weight = torch.randn(5, 12).to(dtype), torch.randn(5, 12).to(dtype), torch.randn(12).to(dtype)
    total = x + residual
    normed, out = ops.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(out, total)
    close(normed, naive_norm(total, weight, 1e-6))


def test_rms_norm_of_a_view() -> None:
    qkv, weight = torch.randn(4, 9, 8), torch.randn(8)
    close(cpu.rms_norm(qkv[:, 2:5], weight, 1e-6), naive_norm(qkv[:, 2:5], weight, 1e-6))


def naive_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    x = x.double()
    centered = x - x.mean(-1, keepdim=True)
    normed = centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return normed if bias is None else normed + bias.double()


@BACKENDS
@DTYPES
@SHAPES
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm(ops, dtype, shape, has_bias) -> None:
    x, weight = (3 + torch.randn(shape)).to(dtype), torch.randn(shape[-1])
    bias, kept = torch.randn(shape[-1]) if has_bias else None, x.clone()
    out, expected = ops.layer_norm(x, weight, bias, 1e-3), naive_layer_norm(x, weight, bias, 1e-3)
    assert out.dtype == dtype
    eps = max(torch.finfo(dtype).eps, 4e-6)
    torch.testing.assert_close(out.double(), expected, atol=2 * eps, rtol=2 * eps)
    assert torch.equal(x, kept)


@BACKENDS
@DTYPES
def test_layer_norm_adds_a_residual(ops, dtype) -> None:
    x, residual, (weight, bias) = torch.randn(5, 12).to(dtype), torch.randn(5, 12).to(dtype), torch.randn(2, 12)
    total = x + residual
    normed, out = ops.layer_norm(x, weight, bias, 1e-6, residual)
    assert torch.equal(out, total)
    eps = max(torch.finfo(dtype).eps, 4e-6)
    torch.testing.assert_close(normed.double(), naive_layer_norm(total, weight, bias, 1e-6), atol=2 * eps, rtol=2 * eps)


PLAIN_ACTIVATIONS = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: torch.where(x < 0, 0.0, x),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


@DTYPES
@pytest.mark.parametrize("activation", PLAIN_ACTIVATIONS)
def test_activate(dtype, activation: str) -> None:
    x = (3 * torch.randn(7, 33)).to(dtype)
    out = reference.activate(x, activation)
    assert out.dtype == dtype
    close(out, PLAIN_ACTIVATIONS[activation](x.double()))


def test_unknown_activations_are_refused() -> None:
    with pytest.raises(KeyError):
        reference.activate(torch.ones(2), "gelu_new")


@DTYPES
def test_add(dtype) -> None:
    x, y = torch.randn(2, 5, 12).to(dtype)
    assert torch.equal(reference.add(x, y), (x.double() + y.double()).to(dtype))


@BACKENDS
@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [8, 4, 2])
def test_rope(ops, dtype, interleaved: bool, dim: int) -> None:
    q, k = torch.randn(5, 9, 8).to(dtype).split([6, 3], dim=1)
    positions = torch.tensor([3, 0, 30, 7, 7])
    frequencies = 10.0 ** -torch.arange(dim // 2)
    angles = torch.outer(torch.arange(32.0), frequencies)
    out = ops.rope(q, k, positions, torch.cat((angles.cos(), angles.sin()), -1), interleaved)
    for x, turned in zip((q, k), out, strict=True):
        expected = x.double()
        for i, frequency in enumerate(frequencies.tolist()):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
            for token, position in enumerate(positions.tolist()):
                turn = torch.polar(
                    torch.ones(x.shape[1]).double(), torch.full((x.shape[1],), position * frequency).double()
                )
                pair = torch.complex(x[token, :, a].double(), x[token, :, b].double()) * turn
                expected[token, :, a], expected[token, :, b] = pair.real, pair.imag
        assert turned.dtype == dtype
        eps = max(torch.finfo(dtype).eps, 5e-6)
        torch.testing.assert_close(turned.double(), expected, atol=2 * eps, rtol=2 * eps)


@BACKENDS
@DTYPES
def test_store_kv(ops, dtype) -> None:
    cache = LayerCache(torch.zeros(4, 3, 2, 5, dtype=dtype), torch.zeros(4, 3, 2, 5, dtype=dtype), 0, 3)
    qkv = torch.randn(4, 6, 5)
    k, v = qkv[:, 2:4], qkv[:, 4:]
    slots = torch.tensor([7, 0, 11, 4])
    ops.store_kv(k, v, cache, slots)
    for kept, new in ((cache.k, k), (cache.v, v)):
        expected = torch.zeros(12, 2, 5, dtype=dtype)
        for token, slot in enumerate(slots.tolist()):
            expected[slot] = new[token].to(dtype)
        assert torch.equal(kept.view(12, 2, 5), expected)


@BACKENDS
def test_store_kv_writes_into_blocks_that_hold_more(ops) -> None:
    both = torch.zeros(2, 2, 3, 1, 4)
    cache = LayerCache(both[:, 0], both[:, 1], 0, 3)
    ops.store_kv(torch.ones(1, 1, 4), 2 * torch.ones(1, 1, 4), cache, torch.tensor([4]))
    assert both[1, 0, 1].eq(1).all()
    assert both[1, 1, 1].eq(2).all()
    assert both.sum() == 12


@BACKENDS
@DTYPES
@settings(max_examples=20, deadline=None)
@given(tokens=st.integers(1, 9), size=st.integers(1, 40), seed=st.integers(0, 99))
def test_activations(ops, dtype, tokens: int, size: int, seed: int) -> None:
    gate_up = (3 * torch.randn(tokens, 2 * size, generator=torch.Generator().manual_seed(seed))).to(dtype)
    gate, up = gate_up[:, :size].double(), gate_up[:, size:].double()
    close(ops.silu_mul(gate_up), gate / (1 + torch.exp(-gate)) * up)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    close(ops.gelu_mul(gate_up), 0.5 * gate * (1 + torch.tanh(inner)) * up)
    assert ops.silu_mul(gate_up).is_contiguous()


def test_select_takes_the_backend_first_and_the_reference_for_the_rest() -> None:
    ops = select_torch("cpu")
    assert ops.attention is cpu.attention
    assert ops.sample is reference.sample
    assert ops.device == "cpu"
    assert select_torch("meta").attention is reference.attention


def test_kernels_are_the_ops_of_the_reference() -> None:
    names = {name for name in Kernels.__slots__ if name not in ("device", "fused", "native", "exact", "ranks")}
    assert names == set(reference.__all__)


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, quire.kernels; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@BACKENDS
def test_a_latent_is_both_keys_and_values(ops) -> None:
    """MLA with its projections absorbed: all heads read one latent, whose first columns are the values."""
    torch.manual_seed(0)
    latents = torch.randn(3, 4, 1, 12)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    paging = Paging(torch.tensor([0, 2]), torch.tensor([10]), [table], [], 4, [0, 2], [10])
    q = torch.randn(2, 5, 12)
    got = ops.attention(q, LayerCache(latents, latents[..., :8], 0, 4), paging, scale=0.3)
    k = latents[[2, 0, 1]].flatten(0, 2)[:10]
    scores = torch.einsum("nhd,md->hnm", q, k) * 0.3
    scores[:, 0, 9] = float("-inf")
    expected = torch.einsum("hnm,md->nhd", scores.softmax(-1), k[:, :8])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@BACKENDS
def test_a_token_with_slot_minus_one_is_not_stored(ops: Kernels) -> None:
    cache = LayerCache(torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 4), 0, 2)
    k, v = torch.randn(3, 1, 4), torch.randn(3, 1, 4)
    ops.store_kv(k, v, cache, torch.tensor([3, -1, 0]))
    for kept, new in ((cache.k, k), (cache.v, v)):
        expected = torch.zeros(6, 1, 4)
        expected[3], expected[0] = new[0], new[2]
        assert torch.equal(kept.flatten(0, 1), expected)
