"""Quantized files that are truncated, contradictory or hostile: an error with a name, before memory is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import BadModelFile, ModelError, UnsupportedModel, WeightMismatch
from quire.kernels import Kernels, select_native
from quire.weights.loader import load_model, opened, survey
from quire.weights.schemes.read import read_scheme
from tests.tools.native import native_of
from tests.tools.tiny_models import cpu_ops
from tests.weights.schemes.packed import quantized_model

pytestmark = pytest.mark.cpu

UP = "model.layers.1.mlp.up_proj"
Tensors = dict[str, torch.Tensor]


def no_memory(*_: Any, **__: Any) -> Any:
    raise AssertionError("memory was taken before the files were checked")


def damaged(tmp_path: Path, method: str, change: Callable[[Tensors], Any], **section: Any) -> Path:
    """The model with its tensors changed, and its `quantization_config`."""
    path, _ = quantized_model(tmp_path, method)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= section
    (path / "config.json").write_text(json.dumps(config))
    return path


def refused(path: Path, error: type[ModelError], words: str) -> None:
    """By the survey, which reads headers and descriptions only."""
    with opened(path) as (config, checkpoint), pytest.raises(error, match=words):
        survey(config, checkpoint, cpu_ops())


def replace(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: value(tensors[name]).contiguous()})


def remove(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def untouched(tensors: Tensors) -> None:
    pass


@pytest.mark.parametrize(
    ("method", "companion"),
    [
        ("gptq 4 sym", "scales"),
        ("gptq 4 sym", "qzeros"),
        ("gptq 4 sym", "qweight"),
        ("awq", "qzeros"),
        ("squeezellm", "lookup_table"),
        ("fp8 tensor", "weight_scale"),
        ("fp8 block", "weight_scale_inv"),
        ("modelopt", "weight_scale"),
        ("w8a8", "weight_scale"),
        ("eetq", "weight_scales"),
        ("eetq", "weight"),
    ],
)
def test_a_companion_that_is_missing(tmp_path: Path, method: str, companion: str) -> None:
    path = damaged(tmp_path, method, remove(f"{UP}.{companion}"))
    refused(path, WeightMismatch, rf"1 missing \({UP}.{companion} \[")


@pytest.mark.parametrize(
    ("method", "companion"),
    [
        ("gptq 4 sym", "scales"),
        ("gptq 3", "qweight"),
        ("gptq 4 sym", "g_idx"),
        ("awq", "qzeros"),
        ("fp8 block", "weight_scale_inv"),
        ("eetq", "weight"),
    ],
)
def test_a_companion_of_another_shape(tmp_path: Path, method: str, companion: str) -> None:
    path = damaged(tmp_path, method, replace(f"{UP}.{companion}", lambda tensor: tensor[:-1]))
    refused(path, WeightMismatch, rf"{UP}.{companion} is \[\d+(, \d+)?\] instead of")


@pytest.mark.parametrize(
    ("method", "companion", "kind"),
    [
        ("gptq 4 sym", "qweight", torch.int64),
        ("gptq 4 sym", "scales", torch.int16),
        ("awq", "qweight", torch.float32),
        ("fp8 tensor", "weight", torch.float8_e5m2),
        ("w8a8", "weight", torch.uint8),
        ("eetq", "weight_scales", torch.int32),
        ("squeezellm", "lookup_table", torch.int32),
    ],
)
def test_a_companion_of_another_type(tmp_path: Path, method: str, companion: str, kind: torch.dtype) -> None:
    path = damaged(tmp_path, method, replace(f"{UP}.{companion}", lambda tensor: tensor.float().to(kind)))
    refused(path, BadModelFile, rf"up_proj: {companion} is of type")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index: index + 100, "g_idx names group 101, and there are 2 groups"),
        (lambda index: index - 1, "g_idx names group -1"),
        (lambda index: torch.zeros_like(index), "g_idx does not have 32 inputs for each of 2 groups"),
    ],
)
def test_an_order_of_inputs_that_is_none(tmp_path: Path, change: Any, words: str) -> None:
    refused(damaged(tmp_path, "gptq 4 order", replace(f"{UP}.g_idx", change)), BadModelFile, words)


@pytest.mark.parametrize(
    ("method", "section", "words"),
    [
        ("gptq 4 sym", {"group_size": 48}, "groups of 48 do not divide the 64 inputs"),
        ("awq", {"group_size": 7}, "groups of 7 do not divide the 64 inputs"),
    ],
)
def test_groups_that_do_not_divide(tmp_path: Path, method: str, section: Any, words: str) -> None:
    refused(damaged(tmp_path, method, untouched, **section), BadModelFile, words)


def test_eetq_of_outputs_that_are_no_whole_tiles(tmp_path: Path) -> None:
    path, _ = quantized_model(tmp_path, "eetq")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    refused(path, BadModelFile, "96 outputs and 64 inputs are no whole tiles of 64")


def test_a_configuration_that_describes_other_shapes(tmp_path: Path) -> None:
    refused(damaged(tmp_path, "gptq 4 sym", untouched, bits=8), WeightMismatch, "of the wrong shape")
    refused(damaged(tmp_path / "b", "fp8 block", untouched, weight_block_size=[16, 16]), WeightMismatch, "wrong shape")


def test_nothing_is_allocated_from_a_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration describes a matrix of many GiB that the files do not have."""
    path = damaged(tmp_path, "gptq 4 sym", untouched)
    config = json.loads((path / "config.json").read_text()) | {"intermediate_size": 1 << 30}
    (path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(torch, "empty", no_memory)
    with pytest.raises(WeightMismatch, match="wrong shape"):
        load_model(path, dtype="float32", ops=cpu_ops())


@pytest.mark.parametrize("backend", ["torch", "native", "packed"])
@pytest.mark.parametrize("method", ["gptq 4 sym", "fp8 channel", "w8a8", "squeezellm"])
def test_values_that_are_not_numbers(tmp_path: Path, method: str, backend: str) -> None:
    kind = {"gptq 4 sym": "scales", "squeezellm": "lookup_table"}.get(method, "weight_scale")

    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        tensor[-1, -1] = float("nan")
        return tensor

    path = damaged(tmp_path, method, replace(f"{UP}.{kind}", spoil))
    ops: Kernels = select_native(native_of()) if backend == "native" else cpu_ops()
    with pytest.raises(BadModelFile, match=rf"{UP}: a (scale|table has a value that) is not a finite number"):
        load_model(path, dtype="float32", ops=ops, packed=backend == "packed")


def test_float8_that_is_no_number(tmp_path: Path) -> None:
    path = damaged(tmp_path, "fp8 tensor", replace(f"{UP}.weight", lambda t: (t.view(torch.uint8) | 127).view(t.dtype)))
    with pytest.raises(BadModelFile, match=f"{UP}: a float8 value is not a number"):
        load_model(path, dtype="float32", ops=select_native(native_of()))


def test_biases_of_zeros_stay_unread_and_others_are_refused(tmp_path: Path) -> None:
    path = damaged(tmp_path, "gptq 4 sym", lambda tensors: tensors.update({f"{UP}.bias": torch.zeros(96)}))
    assert load_model(path, dtype="float32", ops=cpu_ops()).unused == (f"{UP}.bias",)
    path = damaged(tmp_path, "gptq 4 sym", lambda tensors: tensors.update({f"{UP}.bias": torch.ones(96)}))
    refused(path, WeightMismatch, "1 unexpected")


def test_a_sparse_part_is_refused(tmp_path: Path) -> None:
    path = damaged(tmp_path, "squeezellm", lambda tensors: tensors.update({f"{UP}.vals": torch.ones(3)}))
    refused(path, UnsupportedModel, r"sparse part \(vals\)")


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    path = damaged(tmp_path, "awq", untouched)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BadModelFile, match="not a usable safetensors file"), opened(path):
        pass


STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (b"[1, 2]", "no JSON object"),
        (b"\xff\xff", "no JSON object"),
        (b'{"shape": [1, 1], "quant_type": "nf4", "blocksize": 64}', r"shape \[1, 1\] instead of \[16, 64\]"),
        (b'{"shape": [16, 64], "quant_type": "fp4", "blocksize": 64}', "type 'fp4' instead of 'nf4'"),
        (b'{"shape": [16, 64], "quant_type": "nf4", "blocksize": 0}', "blocksize is 0"),
        (b'{"shape": [16, 64], "quant_type": "nf4", "blocksize": 96}', "blocks of 96 do not divide the 1024 values"),
        (b'{"shape": [16, 64], "quant_type": "nf4", "blocksize": 64, "nested_blocksize": -5}', "nested_blocksize"),
        (b'{"shape": [16, 64], "quant_type": "nf4", "blocksize": 64, "nested_offset": "x"}', "nested_offset"),
        (b'{"shape": [16, 64], "quant_type": "nf4", "blocksize": 64, "nested_offset": NaN}', "nested_offset"),
        (b'{"shape": [16, 64], "quant_type": "nf4", "blocksize": 64, "nested_offset": 1e300}', "nested_offset"),
        (
            b'{"shape": [16, 64], "quant_type": "nf4", "blocksize": 64, "nested_offset": 1%s}' % (b"0" * 400),
            "nested_offset",
        ),
    ],
)
def test_states_of_bitsandbytes_that_lie(tmp_path: Path, state: bytes, words: str) -> None:
    from tests.weights.schemes.test_fixtures import FIXTURES
    from tests.weights.schemes.test_fixtures import opened as open_fixture

    checkpoint, part, cols, _ = open_fixture(next(path for path in FIXTURES if path.stem == "nf4"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"model.layers.0.mlp.up_proj.{STATE}"] = torch.from_numpy(np.frombuffer(state, np.uint8).copy())
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = type(checkpoint)(type(checkpoint.files)(tmp_path), scheme=checkpoint.scheme)
    with pytest.raises(BadModelFile, match=words):
        checkpoint.find(part, cols)


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}}
CT = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": GROUP}}


def ct(**weights: Any) -> dict[str, Any]:
    return {**CT, "config_groups": {"a": {**GROUP, "weights": {**GROUP["weights"], **weights}}}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({}, "quant_method is missing"),
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported; quire reads gptq"),
        ({"quant_method": "eetq", "weights": "int4"}, "EETQ with weights 'int4'"),
        ({"quant_method": 4}, "must be a string"),
        ({"quant_method": "gptq"}, "bits is missing"),
        ({"quant_method": "gptq", "bits": 5}, "5-bit GPTQ is not supported; quire reads 2, 3, 4 and 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -7}, "group_size is -7"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin' is not supported"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:(": {}}}, "no regular expression"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:a": 3}}, "must have an object"),
        ({"quant_method": "awq", "bits": 3}, "3-bit AWQ"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "without zero_point"),
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf3"}, "'nf3' is not supported"),
        ({"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}, "quant_storage other than uint8"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        ({"quant_method": "squeezellm", "wbits": 3}, "3-bit SqueezeLLM"),
        ({"quant_method": "compressed-tensors"}, "config_groups is missing"),
        (CT | {"format": "marlin-24"}, "format 'marlin-24' is not supported"),
        (CT | {"quantization_status": "initialized"}, "not compressed"),
        (CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (CT | {"ignore": ["re:("]}, "no regular expression"),
        (CT | {"ignore": "lm_head"}, "must be a list of strings"),
        (CT | {"config_groups": {"a": {"targets": ["Linear"]}}}, "without weights"),
        (ct(num_bits=5), "5-bit int weights"),
        (ct(group_size=0), "group_size is 0"),
        (ct(strategy="token"), "strategy 'token'"),
        (ct(strategy="block"), "block_structure"),
    ],
)
def test_configurations_that_quire_cannot_honour(section: dict[str, Any], words: str) -> None:
    with pytest.raises((BadModelFile, UnsupportedModel), match=words):
        read_scheme({"quantization_config": section}, "here/config.json")
