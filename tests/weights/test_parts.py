"""Parts of made-up checkpoints of both kinds: fused, split, interleaved, transposed, sharded and quantized."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.errors import UnsupportedModel, WeightMismatch
from quire.kernels import select_native
from quire.kernels.cpu.native import Native
from quire.layers.source import Part, ShardedSource, Source, fused_parts
from quire.models.registry import MODELS
from quire.quant.dense import Dense
from quire.quant.ggml_types import GGMLType
from quire.quant.gguf_blocks import GGUFBlocks
from quire.quant.weight import Weight
from quire.weights.checkpoint import Checkpoint, StoredPart, Work
from quire.weights.config import read_config
from quire.weights.gguf import GGUFFile
from quire.weights.gguf_checkpoint import GGUFCheckpoint
from quire.weights.loader import count_weights, load_model, open_source, opened, survey, weight_bytes
from quire.weights.random_tensors import RandomTensors
from quire.weights.safetensors import SafetensorsFiles
from quire.weights.safetensors_checkpoint import SafetensorsCheckpoint
from tests.tools.gguf_writer import tensor, write_gguf
from tests.tools.native import native_of
from tests.tools.tiny_models import cpu_ops, tiny_config, tiny_directory, tiny_gguf, tiny_weights, write_directory

pytestmark = pytest.mark.cpu

CPU = "cpu"
COLS, HEAD_DIM = 64, 16
both_stores = pytest.mark.parametrize("native", [None, native_of()], ids=["dense", "panels"])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def safetensors(folder: Path, **tensors: Tensor) -> SafetensorsCheckpoint:
    save_file(
        {name.replace("_at_", "."): each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors"
    )
    return SafetensorsCheckpoint(SafetensorsFiles(folder))


@contextmanager
def gguf(folder: Path, kind: GGMLType = GGMLType.F32, **tensors: Tensor) -> Iterator[GGUFCheckpoint]:
    stored = {name: tensor(each.numpy(), kind if each.dim() == 2 else GGMLType.F32) for name, each in tensors.items()}
    path = write_gguf(folder / "model.gguf", {"general.architecture": "llama"}, stored)
    with GGUFFile(path) as file:
        yield GGUFCheckpoint(file, "llama")


def matrix(
    checkpoint: Checkpoint,
    parts: Sequence[Part],
    cols: int = COLS,
    *,
    rank: int = 0,
    size: int = 1,
    native: Native | None = None,
    packed: bool = False,
) -> Weight:
    with source_of(checkpoint, native, packed=packed) as source:
        return ShardedSource(source, rank, size).matrix(parts, cols)


def vector(checkpoint: Checkpoint, parts: Sequence[Part], rank: int = 0, size: int = 1) -> Tensor:
    with source_of(checkpoint) as source:
        return ShardedSource(source, rank, size).vector(parts)


def source_of(checkpoint: Checkpoint, native: Native | None = None, *, packed: bool = False) -> Any:
    return open_source(checkpoint, "float32", select_native(native) if native else cpu_ops(), packed)


def dense(weight: Weight) -> Tensor:
    """All values of a weight, of panels too."""
    return torch.as_tensor(weight.dense())


@both_stores
def test_several_tensors_are_fused(tmp_path, native) -> None:
    a, b = draw(32, COLS), draw(8, COLS, seed=1)
    weight = matrix(safetensors(tmp_path, a=a, b=b), [Part("a", 32), Part("b", 8)], native=native)
    assert torch.equal(dense(weight), torch.cat((a, b)))


@both_stores
def test_one_tensor_is_split(tmp_path, native) -> None:
    stored = draw(64, COLS)
    checkpoint = safetensors(tmp_path, qkv=stored)
    q, k, v = fused_parts(Part("qkv", 0), [32, 16, 16])
    for parts, rows in ([q], stored[:32]), ([k], stored[32:48]), ([v, q], torch.cat((stored[48:], stored[:32]))):
        assert torch.equal(dense(matrix(checkpoint, parts, native=native)), rows)
    assert torch.equal(dense(matrix(checkpoint, [q, k, v], native=native)), stored)


def interleaved(groups: int, queries: int) -> tuple[Tensor, list[Tensor]]:
    """A query_key_value matrix as Falcon stores it, and q, k and v as its code takes them out."""
    stored = draw(groups * (queries + 2) * HEAD_DIM, COLS)
    heads = stored.view(groups, queries + 2, HEAD_DIM, COLS)
    return stored, [part.reshape(-1, COLS) for part in (heads[:, :-2], heads[:, -2], heads[:, -1])]


def interleaved_parts(groups: int, queries: int) -> list[Part]:
    sizes = [groups * queries * HEAD_DIM, groups * HEAD_DIM, groups * HEAD_DIM]
    return fused_parts(Part("qkv", 0, split="rows", unit=HEAD_DIM), sizes, groups)


@both_stores
@pytest.mark.parametrize(("groups", "queries"), [(4, 1), (2, 3), (1, 5)], ids=["bloom", "falcon", "multi-query"])
def test_heads_that_are_stored_by_groups(tmp_path, native, groups: int, queries: int) -> None:
    stored, expected = interleaved(groups, queries)
    weight = matrix(safetensors(tmp_path, qkv=stored), interleaved_parts(groups, queries), native=native)
    assert torch.equal(dense(weight), torch.cat(expected))


@both_stores
def test_transposed_tensors(tmp_path, native) -> None:
    stored, bias = draw(COLS, 96), draw(96)
    checkpoint = safetensors(tmp_path, c_attn_at_weight=stored, c_attn_at_bias=bias)
    parts = fused_parts(Part("c_attn", 0, transposed=True), [32, 32, 32])
    weights = [part.tensor("weight") for part in parts]
    assert torch.equal(dense(matrix(checkpoint, weights, native=native)), stored.T)
    assert torch.equal(dense(matrix(checkpoint, weights[1:2], native=native)), stored.T[32:64])
    assert torch.equal(
        vector(checkpoint, [part.tensor("bias") for part in reversed(parts)]), bias.view(3, 32).flip(0).flatten()
    )


def test_the_shape_that_a_stored_tensor_must_have(tmp_path) -> None:
    part = fused_parts(Part("c_attn", 0, transposed=True), [32, 16, 16])[1]
    assert safetensors(tmp_path, a=draw(1)).find(part, COLS).tensors == {"c_attn": (COLS, 64)}
    assert safetensors(tmp_path, a=draw(1)).find(part, None).tensors == {"c_attn": (64,)}
    with gguf(tmp_path, a=draw(1)) as checkpoint:
        assert checkpoint.find(part, COLS).tensors == {"c_attn": (64, COLS)}


def test_a_gguf_file_stores_parts_one_below_the_other_whatever_order_others_have(tmp_path) -> None:
    _, (q, k, v) = interleaved(2, 3)
    plain, bias = torch.cat((q, k, v)), torch.arange(2.0 * 5 * HEAD_DIM)
    parts = interleaved_parts(2, 3)
    with gguf(tmp_path, qkv=plain, bias=bias) as checkpoint:
        assert torch.equal(dense(matrix(checkpoint, parts)), plain)
        assert torch.equal(dense(matrix(checkpoint, parts[1:2], rank=1, size=2)), k[HEAD_DIM:])
        biases = fused_parts(Part("bias", 0, split="rows"), [6 * HEAD_DIM, 4 * HEAD_DIM])
        assert torch.equal(vector(checkpoint, biases[1:]), bias[6 * HEAD_DIM :])


# ── shards ────────────────────────────────────────────────────────────────────────────────────────────────────────


def own_heads(q: Tensor, k: Tensor, v: Tensor, rank: int, size: int) -> Tensor:
    """The rows of rank's query heads, and of the key and value heads that they read, one query head at a time."""
    q, k, v = (part.view(-1, HEAD_DIM, COLS) for part in (q, k, v))
    heads = range(rank * len(q) // size, (rank + 1) * len(q) // size)
    shared = sorted({head * len(k) // len(q) for head in heads})
    return torch.cat([part[list(rows)].flatten(0, 1) for part, rows in ((q, heads), (k, shared), (v, shared))])


def separate_parts(kv_heads: int, heads: int) -> list[Part]:
    return [
        Part(name, count * HEAD_DIM, split="rows", unit=HEAD_DIM)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    ]


@both_stores
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_rank_reads_its_heads_and_those_they_read(tmp_path, native, size: int) -> None:
    """8 query heads on 2 key heads: with 4 ranks two share a key head, with 8 four do."""
    q, k, v = draw(8 * HEAD_DIM, COLS), draw(2 * HEAD_DIM, COLS, seed=1), draw(2 * HEAD_DIM, COLS, seed=2)
    checkpoint = safetensors(tmp_path, q=q, k=k, v=v)
    for rank in range(size):
        weight = matrix(checkpoint, separate_parts(2, 8), rank=rank, size=size, native=native)
        assert torch.equal(dense(weight), own_heads(q, k, v, rank, size))


@both_stores
@pytest.mark.parametrize(("groups", "queries"), [(4, 1), (2, 4)], ids=["bloom", "falcon"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_reads_its_heads_out_of_groups(tmp_path, native, size: int, groups: int, queries: int) -> None:
    stored, expected = interleaved(groups, queries)
    checkpoint = safetensors(tmp_path, qkv=stored)
    for rank in range(size):
        weight = matrix(checkpoint, interleaved_parts(groups, queries), rank=rank, size=size, native=native)
        assert torch.equal(dense(weight), own_heads(*expected, rank, size))


def test_a_rank_reads_its_heads_out_of_a_fused_transposed_tensor(tmp_path) -> None:
    stored, bias = draw(COLS, 3 * 4 * HEAD_DIM), draw(3 * 4 * HEAD_DIM)
    checkpoint = safetensors(tmp_path, c_at_weight=stored, c_at_bias=bias)
    parts = fused_parts(Part("c", 0, transposed=True, split="rows", unit=HEAD_DIM), [4 * HEAD_DIM] * 3)
    weights, biases = ([part.tensor(kind) for part in parts] for kind in ("weight", "bias"))
    for rank in range(2):
        rows = own_heads(*stored.T.split(4 * HEAD_DIM), rank, 2)
        assert torch.equal(dense(matrix(checkpoint, weights, rank=rank, size=2)), rows)
        halves = [part.chunk(2)[rank] for part in bias.chunk(3)]
        assert torch.equal(vector(checkpoint, biases, rank, 2), torch.cat(halves))


@both_stores
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_rank_s_gate_and_up_belong_together(tmp_path, native, size: int) -> None:
    gate, up, down = draw(64, COLS), draw(64, COLS, seed=1), draw(COLS, 64, seed=2)
    checkpoint = safetensors(tmp_path, gate=gate, up=up, down=down)
    gate_up = [Part("gate", 64, split="rows"), Part("up", 64, split="rows")]
    for rank in range(size):
        rows = slice(rank * 64 // size, (rank + 1) * 64 // size)
        weight = matrix(checkpoint, gate_up, rank=rank, size=size, native=native)
        assert torch.equal(dense(weight), torch.cat((gate[rows], up[rows])))
        weight = matrix(checkpoint, [Part("down", COLS, split="columns")], 64, rank=rank, size=size, native=native)
        assert torch.equal(dense(weight), down[:, rows])


def test_a_model_s_layers_say_how_they_are_split(tmp_path) -> None:
    """A tiny Qwen2: its biases of q, k and v are split as their matrices are; norms and embedding are whole."""
    config, stored = read_config(tiny_directory(tmp_path, "qwen2")), tiny_weights("qwen2")

    def of_layer(name: str, dim: int, rank: int) -> Tensor:
        return stored[f"model.layers.0.{name}"].chunk(2, dim)[rank]

    for rank in range(2):
        with source_of(SafetensorsCheckpoint(SafetensorsFiles(tmp_path))) as source:
            model = MODELS["qwen2"](config, ShardedSource(source, rank, 2), cpu_ops())
        layer = model.layers[0]
        for kind in ("weight", "bias"):
            own = getattr(layer.attention.qkv, kind)
            expected = torch.cat([of_layer(f"self_attn.{part}_proj.{kind}", 0, rank) for part in "qkv"])
            assert torch.equal(own.dense() if kind == "weight" else own, expected)
        expected = torch.cat([of_layer(f"mlp.{part}_proj.weight", 0, rank) for part in ("gate", "up")])
        assert torch.equal(layer.mlp.gate_up.weight.dense(), expected)
        assert torch.equal(layer.mlp.down.weight.dense(), of_layer("mlp.down_proj.weight", 1, rank))
        assert torch.equal(layer.attention.output.weight.dense(), of_layer("self_attn.o_proj.weight", 1, rank))
        assert torch.equal(model.embedding.weight.dense(), stored["model.embed_tokens.weight"])


def test_heads_that_cannot_be_shared_out_are_refused(tmp_path) -> None:
    checkpoint = safetensors(tmp_path, q=draw(6 * HEAD_DIM, COLS))
    for rows, size in ((6 * HEAD_DIM, 4), (6 * HEAD_DIM, 5), (6 * HEAD_DIM - 8, 2)):
        with pytest.raises(UnsupportedModel, match=rf"q has {rows} rows in units of 16, .* over {size} devices"):
            matrix(checkpoint, [Part("q", rows, split="rows", unit=HEAD_DIM)], rank=0, size=size)


def test_random_shards_put_together_are_the_whole() -> None:
    source = RandomTensors(0, torch.float32, CPU)
    shards: list[Source] = [ShardedSource(source, rank, 2) for rank in range(2)]
    rows, columns = Part("a.weight", 8, split="rows"), Part("a.weight", 8, split="columns")
    whole = source.matrix([rows], 32).dense()
    assert torch.equal(torch.cat([shard.matrix([rows], 32).dense() for shard in shards]), whole)
    assert torch.equal(torch.cat([shard.matrix([columns], 32).dense() for shard in shards], dim=1), whole)
    assert torch.equal(torch.cat([shard.vector([rows]) for shard in shards]), source.vector([rows]))
    assert torch.equal(shards[1].vector([columns]), source.vector([rows]))
    q, k = fused_parts(Part("a.weight", 0), [2, 6], 2)
    assert torch.equal(source.matrix([q, k], 32).dense(), whole[[0, 4, 1, 2, 3, 5, 6, 7]])


# ── quantized parts ───────────────────────────────────────────────────────────────────────────────────────────────


def test_blocks_stay_in_one_piece_and_are_sharded(tmp_path) -> None:
    q, k = draw(64, 128), draw(32, 128, seed=1)
    parts = [Part("q", 64, split="rows"), Part("k", 32, split="rows")]
    columns = [Part("q", 64, split="columns")]
    with gguf(tmp_path, GGMLType.Q8_0, q=q, k=k) as checkpoint:
        whole = matrix(checkpoint, parts, 128, packed=True)
        assert isinstance(whole, GGUFBlocks)
        dense_q, dense_k = matrix(checkpoint, parts, 128).dense().split([64, 32])
        assert torch.equal(dense(whole), torch.cat((dense_q, dense_k)))
        for rank in range(2):
            expected = torch.cat((dense_q.chunk(2)[rank], dense_k.chunk(2)[rank]))
            for packed in (False, True):
                assert torch.equal(dense(matrix(checkpoint, parts, 128, rank=rank, size=2, packed=packed)), expected)
                own = matrix(checkpoint, columns, 128, rank=rank, size=2, packed=packed)
                assert isinstance(own, GGUFBlocks if packed else Dense)
                assert torch.equal(dense(own), dense_q.chunk(2, 1)[rank])


def test_blocks_are_not_cut(tmp_path) -> None:
    columns = [Part("q", 64, split="columns")]
    with gguf(tmp_path, GGMLType.Q8_0, q=draw(64, 128)) as checkpoint:
        expected = matrix(checkpoint, columns, 128).dense().chunk(8, 1)[1]
        assert torch.equal(dense(matrix(checkpoint, columns, 128, rank=1, size=8)), expected)
        with pytest.raises(
            UnsupportedModel, match=r"q is stored in Q8_0 blocks of 32 columns, .* at columns 16 and 32"
        ):
            matrix(checkpoint, columns, 128, rank=1, size=8, packed=True)


def test_panels_of_a_rank_hold_the_file_s_own_blocks(tmp_path) -> None:
    q, k = Part("q", 64, split="rows", unit=16), Part("k", 32, split="rows", unit=16)
    with gguf(tmp_path, GGMLType.Q8_0, q=draw(64, 128), k=draw(32, 128, seed=1)) as checkpoint:
        for parts in [q, k], [Part("q", 64, split="columns")]:
            for rank in range(2):
                own = matrix(checkpoint, parts, 128, rank=rank, size=2, native=native_of())
                assert torch.equal(dense(own), matrix(checkpoint, parts, 128, rank=rank, size=2).dense())


@dataclass(frozen=True)
class Int8Part:
    """A scheme made up for this test: `x.weight` is `x.codes` [rows, cols] int8 and `x.scales` [rows]."""

    files: SafetensorsFiles
    part: Part
    cols: int
    quantized = True
    panel_format = "f32"
    order = None

    @property
    def stem(self) -> str:
        return self.part.name.removesuffix(".weight")

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        shape = self.part.stored_shape(self.cols)
        return {f"{self.stem}.codes": shape, f"{self.stem}.scales": shape[:1]}

    @property
    def nbytes(self) -> int:
        return sum(self.files.tensors[name].nbytes for name in self.tensors)

    def values(self) -> Tensor:
        codes, scales = (torch.from_numpy(self.files.read(name)) for name in self.tensors)
        index = [row for run in self.part.stored_runs(0, self.part.rows) for row in run]
        return codes[index].float() * scales[index, None]

    def fill(self, out: Tensor) -> list[Work]:
        return [lambda: out.copy_(self.values())]

    def pack(self, panels: Any, first: int, native: Native) -> list[Work]:
        values = self.values()
        return [lambda: panels.pack_dense("f32", values.data_ptr(), self.cols, first, self.part.rows)]


class Int8Weight(Dense):
    """Stands in for one that multiplies with the codes."""


class Int8Checkpoint(SafetensorsCheckpoint):
    def find(self, part: Part, cols: int | None) -> StoredPart:
        stem = part.name.removesuffix(".weight")
        return (
            super().find(part, cols)
            if cols is None or f"{stem}.codes" not in self.shapes
            else Int8Part(self.files, part, cols)
        )

    def weight(self, parts: Sequence[Part], cols: int, device: str, dtype: torch.dtype) -> Weight | None:
        found = [self.find(part, cols) for part in parts]
        own = [stored for stored in found if isinstance(stored, Int8Part)]
        return Int8Weight(torch.cat([stored.values() for stored in own])) if len(own) == len(found) else None


@both_stores
def test_a_scheme_stores_a_part_in_several_tensors(tmp_path, native) -> None:
    codes, scales = torch.randint(-128, 128, (48, COLS), dtype=torch.int8), draw(48)
    other = draw(16, COLS, seed=1)
    safetensors(tmp_path, a_at_codes=codes, a_at_scales=scales, b_at_weight=other)
    checkpoint = Int8Checkpoint(SafetensorsFiles(tmp_path))
    parts = fused_parts(Part("a", 0, split="rows"), [32, 16])
    expected = codes.float() * scales[:, None]
    with source_of(checkpoint, native, packed=True) as source:
        weight = source.matrix([part.tensor("weight") for part in parts], COLS)
        second = ShardedSource(source, 1, 2).matrix([parts[0].tensor("weight")], COLS)
        mixed = source.matrix([parts[1].tensor("weight"), Part("b.weight", 16)], COLS)
    assert torch.equal(dense(weight), expected)
    assert isinstance(weight, Int8Weight) == (native is None)
    assert torch.equal(dense(second), expected[16:32])
    assert torch.equal(dense(mixed), torch.cat((expected[32:], other)))
    assert source.used == set(checkpoint.shapes)


@pytest.mark.parametrize("packed", [False, True])
def test_quantized_weights_are_counted_as_they_will_be_held(tmp_path, packed: bool) -> None:
    path = tiny_gguf(tmp_path / "model.gguf", kind=GGMLType.Q4_0)
    loaded = load_model(path, dtype="bfloat16", ops=cpu_ops(), packed=packed)
    with opened(path) as (config, checkpoint):
        num_bytes = weight_bytes(survey(config, checkpoint, cpu_ops()), "bfloat16", packed=packed)
    assert num_bytes == loaded.weight_bytes
    dense = 2 * count_weights(config, cpu_ops())
    assert num_bytes < 0.3 * dense if packed else num_bytes == dense


# ── which tensors were used ───────────────────────────────────────────────────────────────────────────────────────


def test_a_source_says_which_tensors_it_used(tmp_path) -> None:
    checkpoint = safetensors(tmp_path, qkv=draw(48, COLS), norm=draw(8), other=draw(4, 4))
    with source_of(checkpoint) as source:
        source.matrix(fused_parts(Part("qkv", 0), [16, 32])[:1], COLS)
        source.vector([Part("norm", 8)])
    assert source.used == {"qkv", "norm"}


def test_unused_tensors_are_listed_or_refused(tmp_path) -> None:
    """Llama's tiny model is tied: its head is the embedding, and a copy of it in the file is not read."""
    weights = tiny_weights("llama") | {"lm_head.weight": torch.zeros(96, 64), "a.rotary_emb.inv_freq": torch.ones(8)}
    loaded = load_model(
        write_directory(tmp_path / "tied", tiny_config("llama"), weights),
        dtype="float32",
        ops=cpu_ops(),
    )
    assert sorted(loaded.unused) == ["a.rotary_emb.inv_freq", "lm_head.weight"]
    assert loaded.model.head.weight is loaded.model.embedding.weight
    assert torch.equal(loaded.model.head.weight.dense(), weights["model.embed_tokens.weight"])
    assert loaded.weight_bytes == 4 * sum(each.numel() for each in tiny_weights("llama").values())
    folder = write_directory(tmp_path / "more", tiny_config("llama"), weights | {"more": torch.ones(8)})
    with pytest.raises(WeightMismatch, match=r"1 unexpected \(more \[8\]\)"):
        load_model(folder, dtype="float32", ops=cpu_ops())
