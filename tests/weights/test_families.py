"""Checkpoints of the families of `models/transformer.py`: names in both directions, and what is refused with a name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import BadModelFile, InvalidParams, UnsupportedModel, WeightMismatch
from quire.kernels import select_torch
from quire.weights.config import config_from_gguf, read_config
from quire.weights.family_names import HUGGING_FACE, canonical_name, file_name
from quire.weights.json_classics import alibi_slopes
from quire.weights.json_config import config_from_json
from quire.weights.loader import load_model, opened
from tests.tools.family_cases import CASES, save

pytestmark = pytest.mark.cpu

FIRST = ["bloom", "falcon-40b", "falcon-7b", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "mpt", "opt", "phi"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    saved: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in saved:
            saved[name] = save(name, tmp_path_factory.mktemp("model"))
        return saved[name]

    return directory


def changed(path: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a directory with other tensors."""
    (target / "config.json").write_bytes((path / "config.json").read_bytes())
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def load(path: Path) -> Any:
    return load_model(path, dtype="float32", ops=select_torch("cpu"))


@pytest.mark.parametrize("name", FIRST)
def test_names_translate_back(directories: Callable[[str], Path], name: str) -> None:
    path = directories(name)
    family = read_config(path).family
    assert family in HUGGING_FACE
    for stored in load_file(path / "model.safetensors"):
        assert file_name(canonical_name(stored, family), family) == stored


@pytest.mark.parametrize("name", ["gpt2", "bloom", "falcon-7b", "opt"])
def test_files_of_the_bare_model_lack_the_prefix(tmp_path: Path, directories: Callable[[str], Path], name: str) -> None:
    prefix = "model." if name == "opt" else "transformer."

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.removeprefix(prefix)] = tensors.pop(key)

    assert not load(changed(directories(name), tmp_path, strip)).unused


def test_masks_of_old_files_are_not_read(tmp_path: Path, directories: Callable[[str], Path]) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
        tensors["transformer.h.1.attn.masked_bias"] = torch.tensor(-1e4)

    assert len(load(changed(directories("gpt2"), tmp_path, add)).unused) == 2


TENSORS = {
    "gpt2": "transformer.h.1.attn.c_attn.weight",
    "opt": "model.decoder.embed_positions.weight",
    "gpt_neox": "gpt_neox.layers.0.attention.query_key_value.bias",
    "phi": "lm_head.bias",
    "bloom": "transformer.word_embeddings_layernorm.bias",
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_missing_tensor(tmp_path: Path, directories: Callable[[str], Path], name: str) -> None:
    path = changed(directories(name), tmp_path, lambda tensors: [tensors.pop(TENSORS[name])][:0])
    with pytest.raises(WeightMismatch, match=f"1 missing .{TENSORS[name]}"):
        load(path)


@pytest.mark.parametrize("name", TENSORS)
def test_a_misshapen_tensor(tmp_path: Path, directories: Callable[[str], Path], name: str) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors[TENSORS[name]] = tensors[TENSORS[name]][1:].contiguous()

    with pytest.raises(WeightMismatch, match=f"1 of the wrong shape .{TENSORS[name]}"):
        load(changed(directories(name), tmp_path, cut))


@pytest.mark.parametrize("name", TENSORS)
def test_an_extra_tensor(tmp_path: Path, directories: Callable[[str], Path], name: str) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["transformer.h.0.attn.rotary.weight"] = torch.ones(3)

    with pytest.raises(WeightMismatch, match=r"1 unexpected .transformer.h.0.attn.rotary.weight"):
        load(changed(directories(name), tmp_path, add))


def refused(path: Path, **options: Any) -> None:
    config_from_json(json.loads((path / "config.json").read_text()) | options)


REFUSED = [
    ("gpt2", {"activation_function": "quick_gelu"}, "activation_function 'quick_gelu' is not supported"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is set"),
    ("gpt_neox", {"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
    ("gpt_neox", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm is set"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before is false"),
    ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim is not hidden_size"),
    ("mpt", {"attn_config": {"clip_qkv": 6.0}}, "clip_qkv is set"),
    ("mpt", {"attn_config": {"alibi": False}}, "MPT with alibi and no_bias only"),
    ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type 'multiquery_attention'"),
    ("phi", {"qk_layernorm": True}, "qk_layernorm is set"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm is set"),
    ("phi3", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is set"),
    ("mpt", {"norm_type": "rmsnorm"}, "norm_type 'rmsnorm' is not supported"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_what_quire_lacks(directories: Callable[[str], Path], name: str, options: dict[str, Any], message: str) -> None:
    refused(directories(name))
    with pytest.raises(UnsupportedModel, match=message):
        refused(directories(name), **options)


def default_config(model_type: str) -> dict[str, Any]:
    """What transformers writes of a family whose keys all have their defaults."""
    from transformers import CONFIG_MAPPING

    config: dict[str, Any] = CONFIG_MAPPING[model_type]().to_dict()
    return config | {"num_experts_per_tok": 4} if model_type == "deepseek_v2" else config


DEFAULTS = [
    ("deepseek_v2", ["n_shared_experts", "q_lora_rank"]),
    ("deepseek_v3", ["first_k_dense_replace", "n_group", "n_shared_experts", "q_lora_rank", "routed_scaling_factor"]),
    ("gemma2", ["attn_logit_softcapping", "final_logit_softcapping", "hidden_activation", "sliding_window"]),
    ("glm4", ["rms_norm_eps"]),
    ("gpt_oss", ["rms_norm_eps"]),
    ("gptj", ["rotary_dim"]),
    ("mistral", ["sliding_window"]),
    ("mixtral", ["rms_norm_eps", "rope_parameters"]),
    ("olmoe", ["rms_norm_eps"]),
    ("phi3", ["rms_norm_eps"]),
    ("starcoder2", ["hidden_act"]),
]


@pytest.mark.parametrize(("model_type", "keys"), DEFAULTS)
def test_a_missing_key_is_the_default_of_transformers(model_type: str, keys: list[str]) -> None:
    config = default_config(model_type)
    for key in keys:
        left_out = {name: value for name, value in config.items() if name != key}
        assert config_from_json(left_out) == config_from_json(config), key


def test_a_null_is_no_soft_cap_of_gemma2() -> None:
    nulls = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    config = config_from_json(default_config("gemma2") | nulls)
    assert config.attention_softcap is None
    assert config.logit_softcap is None


def test_rope_values_beside_rope_parameters() -> None:
    """transformers moves them into the section that lacks them."""
    outer = {"rope_theta": 12345.0, "partial_rotary_factor": 0.5}
    parameters: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config = default_config("glm4")
    merged = config | {"rope_parameters": parameters | outer}
    assert config_from_json(config | outer | {"rope_parameters": parameters}).rope == config_from_json(merged).rope
    length = {"original_max_position_embeddings": 64}
    rope = config_from_json(merged | length).rope
    assert rope == config_from_json(config | {"rope_parameters": parameters | outer | length}).rope


def test_ministral3_ends_early_with_the_old_form_of_rope_too() -> None:
    config = default_config("ministral3")
    assert (
        config_from_json(config | {"rope_parameters": None, "rope_scaling": config["rope_parameters"]}).max_len
        == 16_384
    )


def test_longrope_needs_a_number_for_each_frequency(directories: Callable[[str], Path]) -> None:
    rope = {**CASES["phi3-long"].options["rope_parameters"], "short_factor": [1.0]}
    with pytest.raises(BadModelFile, match="short_factor must be a list of 6 numbers"):
        refused(directories("phi3"), rope_parameters=rope)


def test_no_rope_layers_are_checked(directories: Callable[[str], Path]) -> None:
    with pytest.raises(BadModelFile, match="no_rope_layers must be a list of a 0 or a 1 for each of 4 layers"):
        refused(directories("smollm3"), no_rope_layers=[1, 0])


def test_ministral3_ends_where_queries_would_be_scaled(directories: Callable[[str], Path]) -> None:
    path = directories("ministral3")
    config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 4096}
    assert config_from_json(config).max_len == 64
    with pytest.raises(InvalidParams, match="64 tokens"):
        load_model(path, dtype="float32", ops=select_torch("cpu"), max_len=100)


def test_gguf_files_of_mpt_with_clamped_keys() -> None:
    metadata = {"general.architecture": "mpt", "mpt.attention.clamp_kqv": 6.0}
    with pytest.raises(UnsupportedModel, match=r"attention.clamp_kqv is set"):
        config_from_gguf(metadata, {})


def test_slopes() -> None:
    assert alibi_slopes(4) == (0.25, 0.0625, 0.015625, 0.00390625)
    assert alibi_slopes(6) == (*alibi_slopes(4), 0.5, 0.125)
    assert alibi_slopes(2, 4.0) == (0.25, 0.0625)


def test_a_longer_context_takes_the_long_factors(directories: Callable[[str], Path]) -> None:
    path = directories("phi3-long")
    with opened(path) as (config, _):
        assert config.rope.scaling is not None
        assert config.rope.scaling.original_max_len == 32
    tables = [
        load_model(path, dtype="float32", ops=select_torch("cpu"), max_len=length).model.layers[0].attention.rotary
        for length in (32, 33)
    ]
    assert not torch.allclose(tables[0].table, tables[1].table[:32])
