"""The ops of mixtures of experts and of latent attention on the C++ kernels, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.cpu.native import multiplies_floats
from quire.kernels.routing import ExpertWeights, Routing
from quire.quant.dense import Dense
from quire.quant.panels import PanelWeight
from tests.tools.native import (
    DENSE,
    QUANTIZED,
    THREADS,
    as_arrays,
    draw,
    each_isa,
    native_of,
    ops_of,
    random_panels,
    rounded_activations,
    weight_of,
)

pytestmark = pytest.mark.cpu

ROUTINGS = {
    "softmax": Routing(7, 3, normalize=False),
    "normalized": Routing(16, 4, factor=0.5),
    "all": Routing(5, 5),
    "sigmoid": Routing(20, 2, "sigmoid", factor=2.5),
    "groups by the best": Routing(24, 6, num_groups=6, top_groups=3, normalize=False),
    "groups by the best two": Routing(64, 8, "sigmoid", num_groups=8, top_groups=4, group_scores=2),
}


@each_isa
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_route(routing: Routing, biased: bool, name: str) -> None:
    logits = 2.0 * draw(37, routing.num_experts)
    logits[3] = logits[3, 0]  # of equals the first are chosen
    bias = draw(routing.num_experts, seed=1) if biased else None
    expected = reference.route(logits, bias, routing)
    ids, weights = ops_of(name).route(logits, bias, routing)
    assert torch.equal(ids, expected[0])
    torch.testing.assert_close(weights, expected[1], atol=1e-6, rtol=1e-5)
    factors = draw(routing.num_experts, seed=2)
    scaled = ops_of(name).route(logits, bias, routing, factors)
    assert torch.equal(scaled[0], ids)
    torch.testing.assert_close(scaled[1], weights * factors[ids], atol=0, rtol=0)
    torch.testing.assert_close(reference.route(logits, bias, routing, factors)[1], scaled[1], atol=1e-6, rtol=1e-5)


def make_experts(
    formats: tuple[str, str], num_experts: int, hidden: int, size: int, name: str, threads: int, **options: Any
) -> tuple[ExpertWeights, ExpertWeights]:
    """In panels, and dense with the same numbers."""
    native = native_of(name, threads)
    panels = (
        weight_of([random_panels(formats[0], num_experts * 2 * size, hidden, 1)], native),
        weight_of([random_panels(formats[1], num_experts * hidden, size, 2)], native),
    )
    dense = [Dense(weight.dense().clone()) for weight in panels]
    arrays = {key: as_arrays(value) for key, value in options.items()}
    return ExpertWeights(num_experts, *panels, **arrays), ExpertWeights(num_experts, *dense, **options)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-4 * float(expected.abs().max()), rtol=1e-4)


@each_isa
@pytest.mark.parametrize("tokens", [1, 2, 5, 13, 70])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_silu"])
def test_dense_experts(tokens: int, activation: Any, name: str) -> None:
    """Few of many experts, with biases, a shared expert and its gate."""
    options = {
        "activation": activation,
        "limit": 0.7,
        "gate_up_bias": draw(11 * 64, seed=4),
        "down_bias": draw(11 * 96, seed=5),
    }
    packed, dense = make_experts(("f32", "f32"), 11, 96, 32, name, 2, **options)
    routes = reference.route(draw(tokens, 11), None, Routing(11, 3))
    x, shared, gate = draw(tokens, 96, seed=6), draw(tokens, 96, seed=7), draw(tokens, 1, seed=8)
    ops = ops_of(name)
    close(ops.experts(x, routes, packed), reference.experts(x, routes, dense))
    close(ops.experts(x, routes, packed, shared), reference.experts(x, routes, dense, shared))
    close(ops.experts(x, routes, packed, shared, gate), reference.experts(x, routes, dense, shared, gate))


@each_isa
def test_float8_experts(name: str) -> None:
    """Products with float8 read floats, and nothing is rounded to int8."""
    packed, dense = make_experts(("fp8-g128", "fp8-g128"), 5, 256, 256, name, 2)
    for tokens in (1, 9, 40):
        routes = reference.route(draw(tokens, 5), None, Routing(5, 2))
        x = draw(tokens, 256, seed=6)
        close(ops_of(name).experts(x, routes, packed), reference.experts(x, routes, dense))


def expected_of_rounded(x: Tensor, routes: tuple[Tensor, Tensor], weights: ExpertWeights) -> Tensor:
    """The reference, in float64, on activations that are rounded to int8 before each product."""
    ids, factors = routes
    total = torch.zeros(x.shape, dtype=torch.float64)
    for token, (chosen, own) in enumerate(zip(ids.tolist(), factors.tolist(), strict=True)):
        for expert, factor in zip(chosen, own, strict=True):
            up = rows(weights.gate_up, expert, weights.num_experts)
            down = rows(weights.down, expert, weights.num_experts)
            inner = reference.silu_mul((rounded_activations(x[token]).double() @ up.T).float())
            total[token] += factor * (rounded_activations(inner).double() @ down.T)
    return total.float()


def rows(weight: Any, expert: int, count: int) -> Tensor:
    return weight.data.view(count, -1, weight.data.shape[1])[expert].double()


def orders_of(experts: int, cols: int, seed: int) -> Any:
    return np.array([np.random.default_rng(seed + each).permutation(cols) for each in range(experts)], np.int32)


@each_isa
@pytest.mark.parametrize("formats", [("f32", "f32"), ("int4-g32", "int4z-g64"), ("f32", "q8_0"), ("q8_0", "f32")])
@pytest.mark.parametrize("ordered", ["both", "gate_up", "down"])
def test_experts_whose_inputs_are_in_orders_of_their_own(formats: tuple[str, str], ordered: str, name: str) -> None:
    """Act-order: column i of an expert's matrices belongs to input order[i]."""
    native = native_of(name, 2)
    gate_up = PanelWeight([random_panels(formats[0], 5 * 2 * 128, 256, 1)], native)
    down = PanelWeight([random_panels(formats[1], 5 * 256, 128, 2)], native)
    gate_up.expert_orders = orders_of(5, 256, 1) if ordered != "down" else None
    down.expert_orders = orders_of(5, 128, 9) if ordered != "gate_up" else None
    packed = ExpertWeights(5, gate_up, down)
    dense = ExpertWeights(5, *(Dense(torch.from_numpy(weight.dense())) for weight in (gate_up, down)))
    limit = 2e-4 if formats == ("f32", "f32") else 0.03
    for tokens in (1, 9, 40):
        routes = reference.route(draw(tokens, 5), None, Routing(5, 2))
        x = draw(tokens, 256, seed=6)
        found, expected = ops_of(name).experts(x, routes, packed), reference.experts(x, routes, dense)
        assert (found - expected).norm() < limit * expected.norm()
        assert torch.equal(found[-1:], ops_of(name).experts(x[-1:], (routes[0][-1:], routes[1][-1:]), packed))


@each_isa
@pytest.mark.parametrize("format", QUANTIZED)
def test_quantized_experts(format: str, name: str) -> None:
    packed, dense = make_experts((format, format), 5, 256, 256, name, 2)
    for tokens in (1, 9, 40):
        routes = reference.route(draw(tokens, 5), None, Routing(5, 2))
        x = draw(tokens, 256, seed=6)
        found = ops_of(name).experts(x, routes, packed)
        expected = expected_of_rounded(x, routes, dense)
        # One code of the inner values may be rounded the other way.
        torch.testing.assert_close(found, expected, atol=0.01 * float(expected.abs().max()), rtol=0)


@each_isa
@pytest.mark.parametrize(
    "formats",
    [("q4_k", "q6_k"), ("q8_0", "bf16"), ("f16", "q4_1"), ("f32", "f32"), ("fp8-g128", "q8_0"), ("q8_0", "fp8-g128")],
)
def test_bits_do_not_depend_on_batch_and_threads(formats: tuple[str, str], name: str) -> None:
    """Experts that no token has chosen, and one that all have."""
    routing = Routing(9, 3)
    logits = draw(90, 9)
    logits[:, 4] += 9.0
    logits[:, 7] -= 9.0
    x, routes = draw(90, 256, seed=6), reference.route(logits, None, routing)
    assert 7 not in routes[0]
    whole = []
    for threads in THREADS:
        packed, _ = make_experts(formats, 9, 256, 256, name, threads)
        ops = ops_of(name, threads)
        whole.append(ops.experts(x, routes, packed).clone())
        for start, stop in ((0, 1), (1, 2), (3, 20), (20, 90)):
            part = ops.experts(x[start:stop], tuple(each[start:stop] for each in routes), packed)
            assert torch.equal(part, whole[0][start:stop])
    assert all(torch.equal(each, whole[0]) for each in whole)


@each_isa
@pytest.mark.parametrize("format", [*DENSE, "fp8-g128", "q8_0", "q4_k"])
@pytest.mark.parametrize("rest", [0, 16])
def test_head_linear(format: str, rest: int, name: str) -> None:
    heads, cols, out = 3, 256, 48
    weight = weight_of([random_panels(format, heads * out, cols, 1)], native_of(name))
    dense = Dense(weight.dense().clone())
    for tokens in (1, 6, 50):
        x = draw(tokens, heads, cols + rest)
        given = (
            x
            if multiplies_floats(format)
            else torch.cat((rounded_activations(x[..., :cols]).float(), x[..., cols:]), -1)
        )
        found = ops_of(name).head_linear(x, weight)
        close(found, reference.head_linear(given, dense))
        assert torch.equal(ops_of(name, 5).head_linear(x[:1], weight), found[:1])


@each_isa
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_latent(interleaved: bool, name: str) -> None:
    tokens, rotated = 9, 16
    q, kv = draw(tokens, 3, 32 + rotated), draw(tokens, 1, 64 + rotated, seed=1)
    angles = draw(40, rotated // 2)
    arguments = (1 + 0.1 * draw(64), 1e-5, torch.arange(3, 3 + tokens), torch.cat((angles.cos(), angles.sin()), 1))
    expected = reference.rope_latent(q, kv, *arguments, interleaved)
    for found, wanted in zip(ops_of(name).rope_latent(q, kv, *arguments, interleaved), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
