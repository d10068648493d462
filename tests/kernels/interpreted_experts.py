"""A script: mixtures of experts, attention sinks and latent attention on the GPU's ops by Triton's interpreter, beside
the reference and transformers. `test_interpreted.py` runs it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from quire.kernels import Kernels, reference, select_torch
from quire.kernels.cuda.attention.dispatch import attention
from quire.kernels.cuda.attention.whole_prompts import attend_to_prompts
from quire.kernels.cuda.experts.experts import experts
from quire.kernels.cuda.experts.route import route
from quire.kernels.cuda.latent import head_linear
from quire.kernels.paging import LayerCache
from quire.kernels.routing import ExpertWeights, Routing
from quire.models.config import ModelConfig
from quire.quant.dense import Dense
from quire.quant.mxfp4_codes import Mxfp4Codes
from quire.weights.loader import load_model
from tests.kernels import simulated_gpu
from tests.models.pair import draw_tokens, run
from tests.models.test_experts import mxfp4_directory
from tests.tools.expert_models import expected_logits, save, transformers_model
from tests.tools.paged import PagedCache
from tests.tools.trees import draw_paths

TOKENS = draw_tokens(33)
STEPS = [[(0, 8), (1, 1)], [(1, 12), (0, 1)], [(0, 1), (1, 1)], [(1, 19), (0, 20)], [(0, 3)]]
ROUTINGS = (
    Routing(8, 3),
    Routing(5, 2, normalize=False, factor=1.5),
    Routing(160, 6, num_groups=8, top_groups=3),
    Routing(256, 8, "sigmoid", num_groups=8, top_groups=4, group_scores=2, factor=2.5),
    Routing(7, 7),
)


def check_route(routing: Routing, tokens: int) -> None:
    logits = torch.randn(tokens, routing.num_experts)
    bias = torch.randn(routing.num_experts) if routing.scoring == "sigmoid" else None
    for values in (logits, logits.round()):  # many equals
        (ids, weights), expected = route(values, bias, routing), reference.route(values, bias, routing)
        assert torch.equal(ids.long(), expected[0]), routing
        torch.testing.assert_close(weights, expected[1])


def check_route_of_nan() -> None:
    """Ids are valid and distinct, and the weights say that something is wrong."""
    logits = torch.randn(3, 8)
    logits[1] = float("nan")
    ids, weights = route(logits, None, Routing(8, 3))
    assert ids[1].tolist() == [0, 1, 2]
    assert weights[1].isnan().all()
    assert weights[[0, 2]].isfinite().all()


def pack(weight: Tensor) -> Mxfp4Codes:
    """Random codes in a matrix of that shape."""
    rows, cols = weight.shape
    packed = Mxfp4Codes(rows, cols, "cpu", weight.dtype)
    packed.put(0, torch.randint(0, 16, (rows, cols)).byte(), torch.randint(122, 126, (rows, -(-cols // 32))).byte())
    return packed


def make_experts(
    count: int, hidden: int, size: int, activation: Any, *, bias: bool, packed: bool = False
) -> ExpertWeights:
    gate_up: Any
    down: Any
    gate_up, down = Dense(0.2 * torch.randn(count * 2 * size, hidden)), Dense(0.2 * torch.randn(count * hidden, size))
    if packed:
        gate_up, down = pack(gate_up.data), pack(down.data)
    biases = (torch.randn(count * 2 * size), torch.randn(count * hidden)) if bias else (None, None)
    return ExpertWeights(count, gate_up, down, activation, *biases, limit=1.5)


def check_experts(weights: ExpertWeights, top_k: int, tokens: int) -> None:
    """One token, few that find their pairs, and many that are sorted; some experts have no token."""
    routing, x = Routing(weights.num_experts, top_k), torch.randn(tokens, weights.hidden_size)
    logits = torch.randn(tokens, weights.num_experts) + torch.arange(weights.num_experts)
    routes = reference.route(logits, None, routing)
    shared = torch.randn(tokens, weights.hidden_size) if tokens % 2 else None
    gate = torch.randn(tokens, 1) if tokens % 3 == 0 and shared is not None else None
    expected = reference.experts(x, routes, weights, shared, gate)
    ours = routes[0].int(), routes[1]
    torch.testing.assert_close(experts(x, ours, weights, shared, gate), expected, atol=1e-4, rtol=1e-4)
    exact = experts(x, ours, weights, shared, gate, exact=True)
    torch.testing.assert_close(exact, expected, atol=1e-4, rtol=1e-4)
    last = tokens - 1
    alone = [None if each is None else each[last:] for each in (shared, gate)]
    row = experts(x[last:], (ours[0][last:], ours[1][last:]), weights, *alone, exact=True)
    assert torch.equal(row[0], exact[last]), tokens


def check_latents(heads: int, rank: int, counts: list[int], *, exact: bool = False, trees: bool = False) -> None:
    torch.manual_seed(0)
    rotated, contexts = 16, [row * 61 % 200 for row in range(len(counts))]
    paged = PagedCache(kv_heads=1, head_dim=rank + rotated, block_size=16, num_blocks=400, seed=1)
    plain = LayerCache(paged.layers[0].k, paged.layers[0].k[..., :rank], 0, 16)
    before = [(row, context) for row, context in enumerate(contexts) if context]
    paths = draw_paths(counts, 1) if trees else None
    for rows in (before, list(enumerate(counts))):
        paging = paged.step(rows, None if rows is before else paths)
        kv = torch.randn(sum(count for _, count in rows), 1, rank + rotated)
        reference.store_latent(kv, rank, plain, paging.slot_mapping[0])
    q = torch.randn(sum(counts), heads, rank + rotated)
    expected = reference.attention(q, plain, paging, scale=0.1)
    k = plain.k.transpose(1, 2).contiguous()
    got = attention(q, LayerCache(k, k[..., :rank], 0, 16), paging, scale=0.1, exact=exact)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def check_whole_prompts() -> None:
    """Two prompts, un-absorbed; not with cached tokens, nor if one prompt is short."""
    heads, rank, rotated = 3, 48, 16
    paged = PagedCache(kv_heads=1, head_dim=rank + rotated, block_size=16, num_blocks=400)
    cache = LayerCache(paged.layers[0].k, paged.layers[0].k[..., :rank], 0, 16)
    absorb, values = Dense(torch.randn(heads * rank, 32) / 8), Dense(torch.randn(heads * 24, rank) / 8)
    for rows, is_taken in (([(0, 512), (1, 700)], True), ([(0, 512), (2, 600)], False), ([(3, 512), (4, 9)], False)):
        paging, tokens = paged.step(rows), sum(count for _, count in rows)
        kv, q = torch.randn(tokens, 1, rank + rotated), torch.randn(tokens, heads, 32 + rotated)
        reference.store_latent(kv, rank, cache, paging.slot_mapping[0])
        got = attend_to_prompts(q, kv[:, 0], absorb, values, paging, 0.1)
        assert (got is not None) == is_taken
        if got is not None:
            attended = reference.attention(reference.head_linear(q, absorb), cache, paging, scale=0.1)
            expected = reference.head_linear(attended, values)
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def check_head_linear(tokens: int, heads: int, cols: int, out: int, rest: int) -> None:
    x, weight = torch.randn(tokens, heads, cols + rest), Dense(torch.randn(heads * out, cols))
    torch.testing.assert_close(head_linear(x, weight), reference.head_linear(x, weight), atol=1e-4, rtol=1e-4)


def check_sinks(counts: list[int], group: int, window: int | None, *, exact: bool, trees: bool) -> None:
    torch.manual_seed(0)
    paged = PagedCache(kv_heads=2, head_dim=32, windows=[window], block_size=16, num_blocks=400, seed=1)
    plain, before = paged.layers[0], [(row, 1 + row * 61 % 200) for row in range(len(counts))]
    paths = draw_paths(counts, 1) if trees else None
    for rows in (before, list(enumerate(counts))):
        paging = paged.step(rows, None if rows is before else paths)
        k, v = (torch.randn(sum(count for _, count in rows), 2, 32) for _ in "kv")
        reference.store_kv(k, v, plain, paging.slot_mapping[0])
    q, sinks = torch.randn(sum(counts), 2 * group, 32), 3 * torch.randn(2 * group)
    options: dict[str, Any] = {"scale": 0.2, "window": window, "sinks": sinks}
    expected = reference.attention(q, plain, paging, **options)
    own = LayerCache(*(x.transpose(1, 2).nan_to_num(0.0).contiguous() for x in (plain.k, plain.v)), 0, 16)
    torch.testing.assert_close(attention(q, own, paging, **options, exact=exact), expected, atol=1e-4, rtol=1e-4)


class GpuLayout:
    """A model on caches in the GPU's layout."""

    def __init__(self, model: Any, config: ModelConfig) -> None:
        self.model, self.rank = model, config.latent.rank if config.latent else None
        self.head = model.head
        self._layers: list[LayerCache] = []

    def __call__(self, tokens: Tensor, positions: Tensor, paging: Any, kv: Any) -> Any:
        if not self._layers:
            for layer in kv:
                k, v = (torch.zeros_like(x.transpose(1, 2).contiguous()) for x in (layer.k, layer.v))
                own = LayerCache(k, v if self.rank is None else k[..., : self.rank], layer.group, layer.block_size)
                self._layers.append(own)
        return self.model(tokens, positions, paging, self._layers)


def gpu_ops(*, exact: bool) -> Kernels:
    return replace(select_torch("cuda", exact=exact), arrays=select_torch("cpu").arrays)


def check_family(name: str, *, exact: bool, mxfp4: bool = False) -> None:
    model = transformers_model(name)
    with TemporaryDirectory() as folder:
        path = mxfp4_directory(model, Path(folder))[0] if mxfp4 else save(model, Path(folder))
        loaded = load_model(path, dtype="float32", ops=gpu_ops(exact=exact))
    expected = expected_logits(model, TOKENS)
    mixture: Any = loaded.model.layers[-1]
    assert isinstance(mixture.mlp.weights.down, Mxfp4Codes) == mxfp4
    ours: Any = GpuLayout(loaded.model, loaded.config)
    with torch.inference_mode():
        logits = run(ours, loaded.config, dict.fromkeys((0, 1), TOKENS), STEPS)
    for part in logits.values():
        torch.testing.assert_close(part, expected, atol=1e-3, rtol=0)


if __name__ == "__main__":
    simulated_gpu.install()
    torch.manual_seed(0)
    for each in ROUTINGS:
        check_route(each, 1)
        check_route(each, 5)
    check_route_of_nan()
    for weights_, top in (
        (make_experts(5, 64, 32, "silu", bias=False), 2),
        (make_experts(8, 80, 48, "clamped_silu", bias=True), 3),
        (make_experts(9, 192, 160, "clamped_silu", bias=True, packed=True), 4),
        (make_experts(70, 64, 96, "gelu_tanh", bias=False), 6),
    ):
        for count in (1, 2, 5, 33, 70, 129):
            check_experts(weights_, top, count)
    for num_heads, latent_rank in ((16, 64), (4, 48), (71, 32)):
        for is_exact in (False, True):
            check_latents(num_heads, latent_rank, [1] * 6, exact=is_exact)
            check_latents(num_heads, latent_rank, [1, 1, 20, 40], exact=is_exact)
        check_latents(num_heads, latent_rank, [3, 1, 7, 4])
        check_latents(num_heads, latent_rank, [3, 1, 7, 4], trees=True)
        check_latents(num_heads, latent_rank, [3, 1, 7, 4], trees=True, exact=True)
    check_whole_prompts()
    for sizes in ((1, 16, 32, 64, 16), (5, 4, 48, 32, 0), (70, 2, 20, 70, 3)):
        check_head_linear(*sizes)
    for query_heads in (1, 8, 11):
        for sees in (None, 7):
            for is_exact in (False, True):
                check_sinks([1] * 5, query_heads, sees, exact=is_exact, trees=False)
                check_sinks([3, 1, 30], query_heads, sees, exact=is_exact, trees=False)
                check_sinks([3, 1, 7], query_heads, sees, exact=is_exact, trees=True)
    for family in ("mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3"):
        check_family(family, exact=False)
    check_family("gpt_oss", exact=False, mxfp4=True)
    for family in ("gpt_oss", "deepseek_v3"):
        check_family(family, exact=True)
