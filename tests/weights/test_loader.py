"""From files to a model: both formats answer alike, and files that do not fit are refused before they are read."""

import json

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.errors import BadModelFile, InvalidParams, ModelNotFound, UnsupportedModel, WeightMismatch
from quire.kernels.paging import LayerCache, Paging
from quire.layers.source import Part
from quire.quant.dense import Dense, Stacked
from quire.quant.ggml_types import GGMLType
from quire.quant.gguf_blocks import GGUFBlocks
from quire.weights import gguf_checkpoint, safetensors_checkpoint
from quire.weights.config import read_config
from quire.weights.loader import load_model
from quire.weights.safetensors import SafetensorsFiles
from tests.tools.gguf_writer import Tensor, tensor, write_gguf
from tests.tools.tiny_models import (
    FAMILIES,
    cpu_ops,
    gguf_arrays,
    gguf_metadata,
    tiny_config,
    tiny_directory,
    tiny_gguf,
    tiny_weights,
    write_directory,
)

pytestmark = pytest.mark.cpu

CPU = "cpu"
TOKENS = torch.arange(12) * 7 % 96


def load(path, **options):
    return load_model(path, **{"dtype": "float32", "ops": cpu_ops()} | options).model


def logits(model, config, tokens=TOKENS):
    """All tokens in one step of one request, in a cache of one block."""
    n = len(tokens)
    paging = Paging(
        query_starts=torch.tensor([0, n], dtype=torch.int32),
        seq_lens=torch.tensor([n], dtype=torch.int32),
        block_tables=[torch.zeros(1, 1, dtype=torch.int32)],
        slot_mapping=[torch.arange(n)],
        block_size=16,
        host_query_starts=[0, n],
        host_seq_lens=[n],
    )
    shape = (1, 16, config.num_kv_heads, config.head_dim)
    kv = [LayerCache(torch.zeros(shape), torch.zeros(shape), 0, 16) for _ in range(config.num_layers)]
    return model.head(model(tokens, torch.arange(n), paging, kv))


def gguf_tensors(family="llama"):
    return {name: tensor(array) for name, array in gguf_arrays(family, tiny_weights(family)).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_both_formats_give_the_same_model(tmp_path, family):
    directory, file = tiny_directory(tmp_path / "hf", family), tiny_gguf(tmp_path / "model.gguf", family)
    answers = [logits(load(path), read_config(path)) for path in (directory, file)]
    assert answers[0].std() > 0.1
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_safetensors_agree_with_transformers(tmp_path, family):
    transformers = pytest.importorskip("transformers")
    directory = tiny_directory(tmp_path, family)
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits(load(directory), read_config(directory)), expected, rtol=1e-4, atol=1e-4)


class HostCopies(TorchDispatchMode):
    """The largest tensor that an op has made on the host, and on the device, in bytes; views make nothing."""

    def __init__(self):
        super().__init__()
        self.host = self.device = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.clone, torch.ops.aten.contiguous):
            self.host = max(self.host, result.nbytes if result.device.type == CPU else 0)
            self.device = max(self.device, result.nbytes if result.is_meta else 0)
        return result


def stored(path):
    return safetensors_checkpoint.SafetensorsCheckpoint(SafetensorsFiles(path))


def fill(source, name, out):
    for work in source.find(Part(name, len(out)), out.shape[1]).fill(out):
        work()


def test_plain_tensors_go_to_a_device_in_pieces_and_are_cast_there(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_checkpoint, "COPY_BYTES", 1024)
    source, name = stored(tiny_directory(tmp_path)), "model.embed_tokens.weight"
    whole = torch.from_numpy(source.files.read(name))
    with HostCopies() as copies:
        fill(source, name, torch.empty(whole.shape, dtype=torch.bfloat16, device="meta"))
    assert copies.host == 0
    assert 512 < copies.device <= 1024 < whole.nbytes
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(whole.shape, dtype=dtype)
        fill(source, name, out)
        assert torch.equal(out, whole.to(dtype))


def test_shards_are_joined(tmp_path):
    whole, shards = tiny_directory(tmp_path / "one"), tiny_directory(tmp_path / "three", shards=3)
    config = read_config(whole)
    assert torch.equal(logits(load(whole), config), logits(load(shards), config))


def test_packed_matrices_stay_packed_and_answer_as_dense_ones(tmp_path):
    path = tiny_gguf(tmp_path / "model.gguf", "qwen2", GGMLType.Q8_0)
    dense, packed = load(path), load(path, packed=True)
    assert isinstance(dense.layers[0].attention.qkv.weight, Dense)
    assert isinstance(packed.layers[0].attention.qkv.weight, GGUFBlocks)
    assert packed.layers[0].attention.qkv.weight.nbytes * 3 < dense.layers[0].attention.qkv.weight.nbytes
    config = read_config(path)
    torch.testing.assert_close(logits(packed, config), logits(dense, config), rtol=1e-4, atol=1e-4)


def test_packed_matrices_of_mixed_types_are_stacked(tmp_path):
    arrays = gguf_arrays("llama", tiny_weights("llama"))
    kinds = {"attn_q": GGMLType.Q8_0, "attn_k": GGMLType.Q4_0, "attn_v": GGMLType.F32}
    tensors = {name: tensor(array, kinds.get(name.split(".")[-2], GGMLType.F32)) for name, array in arrays.items()}
    path = write_gguf(tmp_path / "model.gguf", gguf_metadata("llama"), tensors)
    weight = load(path, packed=True).layers[0].attention.qkv.weight
    assert isinstance(weight, Stacked)
    assert [type(part) for part in weight.parts] == [GGUFBlocks, GGUFBlocks, Dense]
    dense = load(path).layers[0].attention.qkv.weight
    assert torch.equal(weight.dense(), dense.dense())


def test_tied_embeddings_are_held_once(tmp_path):
    model = load(tiny_gguf(tmp_path / "model.gguf"))
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("kind", [GGMLType.F32, GGMLType.Q8_0])
def test_weights_come_in_the_dtype_asked_for(tmp_path, kind):
    model = load(tiny_gguf(tmp_path / "model.gguf", kind=kind), dtype="bfloat16")
    exact = load(tmp_path / "model.gguf")
    assert torch.equal(model.embedding.weight.dense(), exact.embedding.weight.dense().bfloat16().float())
    assert model.embedding.weight.data.dtype == torch.bfloat16


@pytest.mark.parametrize("packed", [False, True])
def test_progress_ends_at_the_total(tmp_path, packed):
    path, calls = tiny_gguf(tmp_path / "model.gguf", kind=GGMLType.Q8_0), []
    load(path, packed=packed, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1]
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


@pytest.mark.parametrize("packed", [False, True])
def test_slices_on_many_threads_make_the_same_weights(tmp_path, monkeypatch, packed):
    path = tiny_gguf(tmp_path / "model.gguf", kind=GGMLType.Q8_0)
    expected = load(path, packed=packed).embedding.weight.dense()
    monkeypatch.setattr(gguf_checkpoint, "SLICE_BYTES", 500)
    torch.set_num_threads(3)
    sliced = load(path, packed=packed).embedding.weight.dense()
    assert torch.get_num_threads() == 3
    assert torch.equal(sliced, expected)


def test_bytes_of_weights_are_counted(tmp_path):
    path = tiny_gguf(tmp_path / "model.gguf")
    loaded = load_model(path, dtype="float32", ops=cpu_ops())
    assert loaded.weight_bytes == 4 * sum(weight.numel() for weight in tiny_weights("llama").values())
    assert loaded.config == read_config(path)


def test_max_len_shortens_the_tables(tmp_path):
    path = tiny_gguf(tmp_path / "model.gguf")
    assert len(load(path, max_len=40).layers[0].attention.rotary.table) == 40
    assert len(load(path).layers[0].attention.rotary.table) == 128
    with pytest.raises(InvalidParams, match="made for 128 tokens"):
        load(path, max_len=4000)


def test_missing_left_over_and_reshaped_tensors_are_told_together(tmp_path):
    tensors = gguf_tensors()
    del tensors["blk.1.attn_v.weight"]
    tensors["blk.0.attn_gate.weight"] = tensor(np.zeros((2, 2), np.float32))
    tensors["output_norm.weight"] = tensor(np.zeros(63, np.float32))
    path = write_gguf(tmp_path / "model.gguf", gguf_metadata("llama"), tensors)
    with pytest.raises(WeightMismatch) as error:
        load(path)
    message = str(error.value)
    assert "1 missing (blk.1.attn_v.weight [32, 64])" in message
    assert "1 unexpected (blk.0.attn_gate.weight [2, 2])" in message
    assert "1 of the wrong shape (output_norm.weight is [63] instead of [64])" in message


def test_many_missing_tensors_are_counted(tmp_path):
    kept = {name: item for name, item in gguf_tensors().items() if ".1." not in name}
    with pytest.raises(WeightMismatch, match=r"9 missing \(.* and 4 more\)"):
        load(write_gguf(tmp_path / "model.gguf", gguf_metadata("llama"), kept))


def test_tensors_that_may_stay_unread(tmp_path):
    tensors = gguf_tensors() | {"rope_freqs.weight": tensor(np.ones(8, np.float32))}
    path = write_gguf(tmp_path / "model.gguf", gguf_metadata("llama"), tensors)
    plain = tiny_gguf(tmp_path / "plain.gguf")
    config = read_config(path)
    assert config.rope.divisors == (1.0,) * 8
    assert torch.equal(logits(load(path), config), logits(load(plain), config))
    weights = tiny_weights("llama")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    weights["lm_head.weight"] = torch.zeros(96, 64)
    load(write_directory(tmp_path / "hf", tiny_config("llama"), weights))


def test_rope_divisors_slow_the_rotation(tmp_path):
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(
        tmp_path / "model.gguf", gguf_metadata("llama"), gguf_tensors() | {"rope_freqs.weight": tensor(divisors)}
    )
    table, plain = (load(p).layers[0].attention.rotary.table for p in (path, tiny_gguf(tmp_path / "plain.gguf")))
    torch.testing.assert_close(
        torch.atan2(table[1, 8:], table[1, :8]) * torch.from_numpy(divisors), torch.atan2(plain[1, 8:], plain[1, :8])
    )


def test_unsupported_tensor_type_is_named(tmp_path):
    tensors = gguf_tensors()
    shape = tensors["blk.0.attn_q.weight"].shape
    tensors["blk.0.attn_q.weight"] = Tensor(GGMLType.Q8_1, shape, bytes(shape[0] * GGMLType.Q8_1.row_bytes(shape[1])))
    path = write_gguf(tmp_path / "model.gguf", gguf_metadata("llama"), tensors)
    for packed in (False, True):
        with pytest.raises(UnsupportedModel, match="Q8_1"):
            load(path, packed=packed)


def test_multimodal_prefixes_are_stripped(tmp_path):
    config, weights = tiny_config("gemma3"), tiny_weights("gemma3")
    plain = write_directory(tmp_path / "plain", config, weights)
    wrapped = {"language_model." + name: weight for name, weight in weights.items()}
    wrapped["vision_tower.layer.weight"] = torch.zeros(2, 2)
    outer = {"model_type": "gemma3", "text_config": config, "eos_token_id": [1, 106]}
    multimodal = write_directory(tmp_path / "multimodal", outer, wrapped)
    assert read_config(multimodal).eos_token_ids == (1, 106)
    assert torch.equal(logits(load(plain), read_config(plain)), logits(load(multimodal), read_config(multimodal)))


def test_generation_config_says_what_ends_an_answer(tmp_path):
    directory = tiny_directory(tmp_path)
    assert read_config(directory).eos_token_ids == (2,)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert read_config(directory).eos_token_ids == (2, 5)


def test_directory_without_config(tmp_path):
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        read_config(tmp_path)


def test_directory_without_weights(tmp_path):
    (tiny_directory(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"model\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1' + "0" * 5000 + "}", "[" * 100_000, "\xff"])
def test_broken_config_json(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(BadModelFile, match=r"config\.json"):
        read_config(tmp_path)


def test_a_header_of_odd_length(tmp_path):
    """The format does not ask for padding, so a tensor may begin at any byte."""
    file = tiny_directory(tmp_path) / "model.safetensors"
    expected = {name: SafetensorsFiles(tmp_path).read(name).copy() for name in SafetensorsFiles(tmp_path).tensors}
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].rstrip()
    for num_spaces in range(1, 5):
        padded = header + b" " * num_spaces
        file.write_bytes(len(padded).to_bytes(8, "little") + padded + data[8 + size :])
        files = SafetensorsFiles(tmp_path)
        for name, values in expected.items():
            read = files.read(name)
            assert read.flags.aligned
            assert np.array_equal(read, values)


def test_truncated_safetensors(tmp_path):
    file = tiny_directory(tmp_path) / "model.safetensors"
    for size in (0, 4, 100, file.stat().st_size - 1):
        file.write_bytes(file.read_bytes()[:size] if size else b"")
        with pytest.raises(BadModelFile, match=r"model\.safetensors"):
            load(tmp_path)
        tiny_directory(tmp_path)


def test_integer_tensors_are_refused(tmp_path):
    weights = tiny_weights("llama")
    weights["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight.*I8"):
        load(write_directory(tmp_path, tiny_config("llama"), weights))


def test_missing_shard_is_named(tmp_path):
    shard = tiny_directory(tmp_path, shards=3) / "model-00002-of-00003.safetensors"
    shard.unlink()
    with pytest.raises(BadModelFile, match=shard.name):
        load(tmp_path)


def test_shard_without_its_tensors(tmp_path):
    directory = tiny_directory(tmp_path, shards=2)
    (directory / "model-00002-of-00002.safetensors").write_bytes(
        (directory / "model-00001-of-00002.safetensors").read_bytes()
    )
    with pytest.raises(BadModelFile, match="lacks"):
        load(directory)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 7, None])
def test_index_that_points_elsewhere(tmp_path, shard):
    directory = tiny_directory(tmp_path / "model", shards=2)
    tiny_directory(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    with pytest.raises(BadModelFile, match="plain file name"):
        load(directory)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}])
def test_index_without_a_map(tmp_path, index):
    (tiny_directory(tmp_path, shards=2) / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadModelFile, match="weight_map"):
        load(tmp_path)
