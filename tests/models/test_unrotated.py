"""What the layers need for models without rotary positions: LayerNorm, plain activations, sums, ALiBi, fused weights.

A GPT-2 and a BLOOM, written here from quire's layers and ops and loaded from files with the weights of transformers'
models, give the same logits as those, by every CPU backend, and recorded the same bits as op by op.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.kernels import Fused, Kernels, select_torch
from quire.kernels.paging import Ends, LayerCache, Paging
from quire.kernels.torch_arrays import TorchArrays
from quire.layers.attention import Attention
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.source import Part, Source, fused_parts
from quire.weights.loader import open_source
from quire.weights.safetensors import SafetensorsFiles
from quire.weights.safetensors_checkpoint import SafetensorsCheckpoint
from tests.tools.native import (
    NativePagedCache,
    RecordedOnTensors,
    TensorSource,
    kernels_of,
    ops_of,
    tensor_kernels_of,
)
from tests.tools.paged import PagedCache

pytestmark = pytest.mark.cpu

SIZE, HEADS, HEAD_DIM, LAYERS, VOCAB, MAX_LEN = 64, 4, 16, 2, 97, 48
STEPS = [[(0, 5), (1, 1)], [(1, 13), (0, 1)], [(0, 1), (1, 1)], [(1, 3), (0, 9)]]
TOKENS = torch.randint(0, VOCAB, (2, 18), generator=torch.Generator().manual_seed(3))


class LayerNorm:
    def __init__(self, source: Source, ops: Kernels, name: str) -> None:
        self.weight, self.bias = (source.vector([Part(f"{name}.{kind}", SIZE)]) for kind in ("weight", "bias"))
        self.ops = ops

    def __call__(self, x: Any, residual: Any = None) -> Any:
        return self.ops.layer_norm(x, self.weight, self.bias, 1e-5, residual)


class Layer:
    """x = x + attention(norm(x)); x = x + mlp(norm(x)), under GPT-2's names or BLOOM's."""

    def __init__(self, source: Source, ops: Kernels, index: int, family: str, activation: str) -> None:
        root = f"transformer.h.{index}"
        if family == "gpt2":
            slopes, groups = None, 1
            names = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
        else:
            slopes, groups = ops.arrays.put(2.0 ** -np.arange(2.0, 9.0, 2.0), "float32"), HEADS
            names = (
                "input_layernorm", "self_attention.query_key_value", "self_attention.dense",
                "post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
            )  # fmt: skip
        norm, qkv, output, mlp_norm, up, down = (f"{root}.{name}" for name in names)
        transposed = family == "gpt2"
        self.norm, self.mlp_norm = LayerNorm(source, ops, norm), LayerNorm(source, ops, mlp_norm)
        self.attention = Attention(
            source,
            ops,
            root,
            hidden_size=SIZE,
            num_heads=HEADS,
            num_kv_heads=HEADS,
            head_dim=HEAD_DIM,
            scale=HEAD_DIM**-0.5,
            rotary=None,
            slopes=slopes,
            bias=True,
            output_bias=True,
            qkv=fused_parts(Part(qkv, 0, transposed=transposed), [SIZE] * 3, groups),
            output=Part(output, SIZE, transposed=transposed),
        )
        self.up = Linear(source, [Part(up, 4 * SIZE, transposed=transposed)], SIZE, bias=True)
        self.down = Linear(source, [Part(down, SIZE, transposed=transposed)], 4 * SIZE, bias=True)
        self.activation, self.ops = activation, ops

    def __call__(
        self, x: Any, positions: Tensor, paging: Paging, cache: LayerCache, ends: Ends | None = None
    ) -> Tensor:
        attended = self.attention(self.norm(x), positions, paging, cache, ends)
        if ends is not None:
            x = x[ends.tokens]
        normed, x = self.mlp_norm(attended, x)
        return self.ops.add(self.down(self.ops.activate(self.up(normed), self.activation)), x)


class Model:
    def __init__(self, source: Source, ops: Kernels, family: str, activation: str) -> None:
        self.ops, self.family = ops, family
        names = {"gpt2": ("wte", "ln_f"), "bloom": ("word_embeddings", "ln_f")}[family]
        self.embedding = Embedding(source, f"transformer.{names[0]}", vocab_size=VOCAB, hidden_size=SIZE)
        if family == "gpt2":
            self.positions = Embedding(source, "transformer.wpe", vocab_size=MAX_LEN, hidden_size=SIZE)
        else:
            self.norm = LayerNorm(source, ops, "transformer.word_embeddings_layernorm")
        self.layers = [Layer(source, ops, index, family, activation) for index in range(LAYERS)]
        self.last_norm = LayerNorm(source, ops, f"transformer.{names[1]}")

    def __call__(self, tokens: Tensor, positions: Tensor, paging: Paging, kv: Any, ends: Ends | None = None) -> Any:
        x = self.embedding(tokens)
        x = x + self.positions(positions) if self.family == "gpt2" else self.norm(x)
        for index, (layer, cache) in enumerate(zip(self.layers, kv, strict=True)):
            x = layer(x, positions, paging, cache, ends if index == LAYERS - 1 else None)
        return self.last_norm(x)

    def head(self, hidden: Tensor) -> Tensor:
        return self.embedding.weight.matmul(hidden)


def theirs(family: str, activation: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCAB, n_positions=MAX_LEN, n_embd=SIZE, n_layer=LAYERS, n_head=HEADS,
            activation_function={"gelu_tanh": "gelu_new"}.get(activation, activation),
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=SIZE, n_layer=LAYERS, n_head=HEADS)
        model = transformers.BloomForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.2)
    return model.eval()


CASES = pytest.mark.parametrize(
    ("family", "activation"),
    [("gpt2", "gelu_tanh"), ("gpt2", "gelu"), ("gpt2", "relu"), ("gpt2", "silu"), ("bloom", "gelu_tanh")],
)


def build(folder: Path, reference: Any, ops: Kernels, family: str, activation: str) -> Model:
    tensors = {name: each for name, each in reference.state_dict().items() if name != "lm_head.weight"}
    save_file({name: each.clone() for name, each in tensors.items()}, folder / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(SafetensorsFiles(folder))
    with open_source(checkpoint, "float32", ops) as source:
        on_tensors = ops.native is not None and isinstance(ops.arrays, TorchArrays)
        model = Model(TensorSource(source) if on_tensors else source, ops, family, activation)
    assert source.used == set(checkpoint.shapes)
    return model


def run(model: Any, cache: PagedCache) -> list[Tensor]:
    """The hidden states of each row of each step."""
    found = []
    for rows in STEPS:
        paging, positions = cache.step(rows), cache.positions(rows)
        starts = [(sequence, cache.lengths[sequence] - count, count) for sequence, count in rows]
        tokens = torch.cat([TOKENS[sequence, start : start + count] for sequence, start, count in starts])
        found += model(tokens, positions, paging, cache.layers).clone().split([count for _, count in rows])
    return found


def logits_of(model: Any, found: list[Tensor], sequence: int) -> Tensor:
    order = [row for step in STEPS for row, _ in step]
    return model.head(torch.cat([hidden for row, hidden in zip(order, found, strict=True) if row == sequence]))


def assert_agrees(reference: Any, model: Any, found: list[Tensor]) -> None:
    for sequence in range(2):
        ours = logits_of(model, found, sequence)
        with torch.no_grad():
            expected = reference(TOKENS[sequence : sequence + 1, : len(ours)]).logits[0]
        assert expected.std() > 0.1
        torch.testing.assert_close(ours, expected, atol=2e-4, rtol=2e-4)


def paged(groups: int = LAYERS) -> PagedCache:
    return PagedCache(kv_heads=HEADS, head_dim=HEAD_DIM, groups=[0] * groups, windows=[None])


@CASES
def test_torch_agrees_with_transformers(tmp_path, family: str, activation: str) -> None:
    reference = theirs(family, activation)
    model = build(tmp_path, reference, select_torch("cpu"), family, activation)
    with torch.inference_mode():
        assert_agrees(reference, model, run(model, paged()))


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_ops_that_rotate_are_not_called(tmp_path, family: str) -> None:
    """Where a backend has them: they would rotate, and take no slopes."""

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError

    reference = theirs(family, "gelu_tanh")
    model = build(tmp_path, reference, replace(select_torch("cpu"), fused=Fused(fail, fail, fail)), family, "gelu_tanh")
    with torch.inference_mode():
        assert_agrees(reference, model, run(model, paged()))


@CASES
def test_our_own_kernels_agree_and_a_recorded_model_gives_the_same_bits(tmp_path, family: str, activation: str) -> None:
    reference, ops = theirs(family, activation), kernels_of()
    model = build(tmp_path, reference, ops, family, activation)
    caches = [
        NativePagedCache(
            ops_of(), "float32", kv_heads=HEADS, head_dim=HEAD_DIM, groups=[0] * LAYERS, windows=[None], block_size=4
        )
        for _ in range(2)
    ]
    found = run(RecordedOnTensors(ops, model, caches[0], 32), caches[0])
    on_tensors = build(tmp_path, reference, tensor_kernels_of(), family, activation)
    assert_agrees(reference, on_tensors, found)
    for recorded, at_once in zip(found, run(on_tensors, caches[1]), strict=True):
        assert torch.equal(recorded, at_once)


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_a_last_layer_for_some_tokens_only(tmp_path, family: str) -> None:
    model = build(tmp_path, theirs(family, "gelu_tanh"), select_torch("cpu"), family, "gelu_tanh")
    with torch.inference_mode():
        cache = paged()
        whole = model(TOKENS[0, :7], torch.arange(7), cache.step([(0, 7)]), cache.layers)
        cache = paged()
        paging = cache.step([(0, 7)])
        last = torch.tensor([6])
        own = Paging(
            torch.tensor([0, 1], dtype=torch.int32), paging.seq_lens, paging.block_tables, [], paging.block_size,
            [0, 1], paging.host_seq_lens,
        )  # fmt: skip
        some = model(TOKENS[0, :7], torch.arange(7), paging, cache.layers, Ends(last, own))
    torch.testing.assert_close(some, whole[6:], atol=1e-5, rtol=1e-5)
