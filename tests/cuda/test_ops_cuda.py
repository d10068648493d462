"""Each op in Triton against the reference, on fresh random numbers, odd sizes among them."""

from __future__ import annotations

import pytest
import torch

from tests.cuda.gpu import DEVICE, DTYPES, assert_near  # skips this module where there is no GPU

from quire.kernels import reference  # isort: skip
from quire.kernels.cuda import ops
from quire.kernels.cuda.launch.upload import Upload
from quire.kernels.cuda.sampling.argmax import Argmax
from quire.kernels.cuda.sampling.last_tokens import fill_last_tokens
from quire.kernels.paging import LayerCache

pytestmark = pytest.mark.cuda


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 96), (17, 576), (5, 4096), (2, 5120), (0, 64)])
def test_rms_norm(rows, size, dtype):
    x, residual, weight = draw(rows, size, dtype=dtype), draw(rows, size, dtype=dtype), draw(size, dtype=dtype)
    if not rows:
        assert ops.rms_norm(x, weight, 1e-5).shape == (0, size)
        return
    assert_near(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)
    expected = reference.rms_norm(x, weight, 1e-5, residual)
    got = ops.rms_norm(x, weight, 1e-5, residual.clone())
    for mine, wanted in zip(got, expected, strict=True):
        assert_near(mine, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_in_a_wider_tensor(dtype):
    qkv, weight = draw(7, 12, 64, dtype=dtype), draw(64, dtype=dtype)
    heads = qkv[:, 2:9]
    assert_near(ops.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 96), (17, 577), (5, 4096), (2, 5120)])
def test_layer_norm(rows, size, has_bias, dtype):
    x, residual, weight = draw(rows, size, dtype=dtype) + 2, draw(rows, size, dtype=dtype), draw(size, dtype=dtype)
    bias = draw(size, dtype=dtype) if has_bias else None
    assert_near(ops.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5), dtype)
    expected = reference.layer_norm(x, weight, bias, 1e-5, residual)
    got = ops.layer_norm(x, weight, bias, 1e-5, residual.clone())
    for mine, wanted in zip(got, expected, strict=True):
        assert_near(mine, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu"])
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 8), (3, 700), (33, 1536)])
def test_activate(rows, size, activation, dtype):
    x = 3 * draw(rows, size, dtype=dtype)
    assert_near(ops.activate(x, activation), reference.activate(x, activation), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 8), (3, 700), (33, 1536)])
def test_gates(rows, size, dtype):
    x = draw(rows, 2 * size, dtype=dtype)
    assert_near(ops.silu_mul(x), reference.silu_mul(x), dtype)
    assert_near(ops.gelu_mul(x), reference.gelu_mul(x), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "turned"), [(4, 2, 32, 32), (9, 3, 64, 64), (6, 1, 80, 32), (32, 8, 128, 128)]
)
def test_rope_store(heads, kv_heads, dim, turned, interleaved, dtype):
    tokens, block = 11, 4
    qkv = draw(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    q, k, v = qkv.split_with_sizes([heads, kv_heads, kv_heads], dim=1)
    positions, table = torch.randint(0, 50, (tokens,), device=DEVICE), draw(50, turned)
    slots = torch.randperm(8 * block, device=DEVICE)[:tokens]
    slots[3] = -1
    kept = slots >= 0
    plain = LayerCache(*(torch.zeros(8, block, kv_heads, dim, dtype=dtype, device=DEVICE) for _ in "kv"), 0, block)
    both = torch.zeros(8, 2, kv_heads, block, dim, dtype=dtype, device=DEVICE)  # a block may hold more than keys
    own = LayerCache(both[:, 0], both[:, 1], 0, block)
    expected_q, expected_k = reference.rope(q, k, positions, table, interleaved)
    reference.store_kv(expected_k[kept], v[kept], plain, slots[kept])
    got_q, got_k = ops.fused.rope_store(q, k, v, positions, table, interleaved, own, slots)
    assert_near(got_q, expected_q, dtype)
    assert_near(got_k[kept], expected_k[kept], dtype)
    assert_near(own.k.transpose(1, 2), plain.k, dtype)
    assert torch.equal(own.v.transpose(1, 2), plain.v)


def test_what_fp8_cannot_say_is_stored_as_its_largest():
    qkv = draw(3, 6, 32, dtype=torch.bfloat16) * 1000
    q, k, v = qkv.split_with_sizes([2, 2, 2], dim=1)
    one = torch.cat((torch.ones(1, 16), torch.zeros(1, 16)), dim=1).to(DEVICE)  # turns by nothing
    positions, slots = torch.zeros(3, dtype=torch.int64, device=DEVICE), torch.tensor([1, 4, 6], device=DEVICE)
    for store in ("turned", "plain"):
        cache = LayerCache(*(torch.zeros(2, 2, 4, 32, device=DEVICE).to(torch.float8_e4m3fn) for _ in "kv"), 0, 4)
        if store == "turned":
            ops.fused.rope_store(q, k, v, positions, one, False, cache, slots)
        else:
            ops.store_kv(k, v, cache, slots)
        for kept, new in ((cache.k, k), (cache.v, v)):
            stored = kept.float()[slots // 4, :, slots % 4]
            assert torch.equal(stored, new.float().clamp(-448, 448).to(torch.float8_e4m3fn).float())
            assert stored.abs().max() == 448


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (77, 300), (4096, 4096), (3, 14336), (4100, 64)])
def test_linear(rows, outputs, inputs, dtype):
    x, weight = draw(rows, inputs, dtype=dtype), draw(outputs, inputs, dtype=dtype) / inputs**0.5
    expected = x.double() @ weight.double().T
    assert_near(ops.linear(x, weight), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 33, 64, 65])
@pytest.mark.parametrize(("size", "inputs"), [(70, 300), (1024, 512)])
def test_gated_linear(rows, size, inputs, dtype):
    x, weight = draw(rows, inputs, dtype=dtype), draw(2 * size, inputs, dtype=dtype) / inputs**0.5
    products = (x.double() @ weight.double().T).to(dtype)
    assert_near(ops.fused.gated_linear(x, weight, "silu"), reference.silu_mul(products), dtype)
    assert_near(ops.fused.gated_linear(x, weight, "gelu_tanh"), reference.gelu_mul(products), dtype)


@pytest.mark.parametrize("size", [5, 4096, 20_011, 128_256])
def test_best(size):
    find = Argmax(8, DEVICE)
    tokens, max_logits = torch.full((8,), -7, device=DEVICE), torch.zeros(8, device=DEVICE)
    entries = torch.tensor([3, 0, 9, 1, 4], dtype=torch.int32, device=DEVICE)
    last = torch.full((12,), -7, device=DEVICE)
    for dtype in DTYPES:
        logits = draw(5, size, dtype=dtype)
        logits[2, size // 2] = logits[2].max()  # the first of equals is taken
        find(logits, entries, tokens, max_logits, last)
        assert last[entries.long()].equal(tokens[:5])
        assert (last == -7).sum() == 7
        assert tokens[:5].tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]
        assert torch.equal(max_logits[:5], logits.float().max(dim=1).values)
        assert tokens[5:].tolist() == [-7] * 3
    logits[1, size - 1] = float("nan")
    find(logits, entries, tokens, max_logits, last)
    assert not max_logits[1].isfinite()
    assert max_logits[0].isfinite()


def test_last_tokens_are_filled_in():
    tokens = torch.tensor([10, 11, 12, 13, 14, 15], device=DEVICE)
    starts = torch.tensor([0, 1, 3, 4, 6], dtype=torch.int32, device=DEVICE)
    entries = torch.tensor([-1, 2, -1, 0], dtype=torch.int32, device=DEVICE)
    fill_last_tokens(tokens, starts, entries, torch.tensor([7, 8, 9], device=DEVICE), 4)
    assert tokens.tolist() == [10, 9, 12, 13, 7, 15]


def test_numbers_are_delivered_from_the_host_together():
    letters = Upload(4)
    sources = [
        torch.arange(5000, dtype=torch.int64), torch.arange(30 * 700, dtype=torch.int32).view(30, 700),
        torch.randn(9, 4, dtype=torch.float64),
    ]  # fmt: skip
    sources = [source.pin_memory() for source in sources]
    targets = [torch.zeros(source.shape, dtype=source.dtype, device=DEVICE) for source in sources]
    letters.add(sources[0], targets[0], 7, 4000)
    letters.add(sources[1], targets[1], 3, 20, 517)
    letters.send()
    letters.add(sources[2], targets[2], 0, 7)
    letters.send()
    expected = [torch.zeros_like(source) for source in sources]
    expected[0][7:4000] = sources[0][7:4000]
    expected[1][3:20, :517] = sources[1][3:20, :517]
    expected[2][:7] = sources[2][:7]
    for target, wanted in zip(targets, expected, strict=True):
        assert torch.equal(target.cpu(), wanted)
    letters.clear()
    sources[0][:4] = 77  # what the host writes after a delivery is seen by the next
    letters.add(sources[0], targets[0], 0, 4)
    letters.send()
    assert targets[0][:8].tolist() == [77, 77, 77, 77, 0, 0, 0, 7]
