"""Experts: a mixture of experts. A router chooses some of many small gated MLPs for each token."""

from __future__ import annotations

from typing import Any

from quire.kernels import Kernels
from quire.kernels.routing import ExpertWeights
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.source import Part, Source
from quire.models.config import ExpertsConfig


class Experts:
    """y = sum of weight * down(activation(gate(x)) * up(x)) over the chosen experts, plus the shared expert's output.

    Parts have canonical names, "<name>.experts.<number>.gate_proj.weight" and so on. `weights/experts.py` translates
    them where a format stores all experts in one tensor.
    """

    def __init__(self, source: Source, ops: Kernels, name: str, *, hidden_size: int, config: ExpertsConfig) -> None:
        routing = config.routing
        router = Part(f"{name}.gate", routing.num_experts)
        self.router = Linear(source, [router], hidden_size, bias=config.router_bias)
        correction = Part(f"{name}.gate.e_score_correction_bias", routing.num_experts)
        self.correction = source.vector([correction]) if config.has_correction else None
        self.routing = routing
        self.weights = read_experts(source, name, hidden_size, config)
        self.shared = self.shared_gate = None
        if config.shared_size:
            self.shared = GatedMLP(
                source, ops, f"{name}.{config.shared_name}", hidden_size=hidden_size,
                intermediate_size=config.shared_size,
            )  # fmt: skip
        if config.shared_gate:
            self.shared_gate = Linear(source, [Part(f"{name}.shared_expert_gate", 1)], hidden_size)
        self.ops = ops

    def __call__(self, x: Any) -> Any:
        """x [tokens, hidden_size] -> [tokens, hidden_size]"""
        routes = self.ops.route(self.router(x), self.correction, self.routing)
        shared = None if self.shared is None else self.shared(x)
        shared_gate = None if self.shared_gate is None else self.shared_gate(x)
        return self.ops.experts(x, routes, self.weights, shared, shared_gate)


def read_experts(source: Source, name: str, hidden_size: int, config: ExpertsConfig) -> ExpertWeights:
    size, count = config.intermediate_size, config.routing.num_experts
    experts = [(f"{name}.experts.{index}", (index, count)) for index in range(count)]
    gate_up = [
        Part(f"{each}.{layer}_proj", size, split="rows", expert=expert)
        for each, expert in experts
        for layer in ("gate", "up")
    ]
    down = [Part(f"{each}.down_proj", hidden_size, split="columns", expert=expert) for each, expert in experts]
    inner, outer = Linear(source, gate_up, hidden_size, bias=config.bias), Linear(source, down, size, bias=config.bias)
    return ExpertWeights(
        count,
        inner.weight,
        outer.weight,
        activation=config.activation,
        gate_up_bias=inner.bias,
        down_bias=outer.bias,
        limit=config.limit,
    )
