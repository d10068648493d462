"""Plan: the scheme and the output for a model and a target. What a format cannot hold is refused here, before work."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import InvalidParams, UnsupportedModel
from quire.quant.ggml_types import GGMLType
from quire.quantize.compressed import Float8, NormalFloat, PackedInts
from quire.quantize.gguf_metadata import made_metadata, rope_tensors
from quire.quantize.gguf_writer import entry
from quire.quantize.group_schemes import AWQ, GPTQ
from quire.quantize.hf_config import TORCH_TYPES, copied_config, copied_files, made_config, made_files
from quire.quantize.input_model import InputModel, layer_of
from quire.quantize.mixes import FILE_TYPE_KEY, MIXES, type_of
from quire.quantize.outputs import DirectoryOutput, GGUFOutput, Output, Rows, directory_name
from quire.quantize.schemes import Blocks, Half, Scheme
from quire.quantize.statistics import Needs
from quire.quantize.target import Target
from quire.quantize.tensors import Tensor
from quire.quantize.units import Unit
from quire.weights.experts import gguf_part
from quire.weights.gguf_checkpoint import GGUFCheckpoint
from quire.weights.names import gguf_name, text_name
from quire.weights.safetensors_checkpoint import SafetensorsCheckpoint

GROUP_SIZES = (128, 64, 32)
GGUF_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}
NOT_COPIED = ("general.alignment", "split.count", "split.no", "split.tensors.count")


@dataclass(frozen=True, slots=True)
class Plan:
    target: Target
    scheme: Scheme
    output: Output
    group: int | None


def make_plan(model: InputModel, path: Path, target: Target, group: int | None, *, feedback: bool) -> Plan:
    if group is not None and not target.has_groups:
        raise InvalidParams(
            f"group_size is {group}, and {target.name} has no groups to choose. Leave it out.", "group_size"
        )
    size = choose_group(model, target, group) if target.has_groups else None
    scheme = make_scheme(model, target, size, feedback)
    for unit in quantized_units(model, target):
        scheme.check(unit.key, *unit.shape)
    output = gguf_output(model, path, target) if target.is_gguf else directory_output(model, path, scheme)
    return Plan(target, scheme, output, size)


def quantized_units(model: InputModel, target: Target) -> list[Unit]:
    """All in GGUF files, those of layers in directories, and no routers."""
    units = [unit for unit in model.all_units(by_head=target.is_gguf) if not unit.is_router]
    return [unit for unit in units if target.is_gguf or layer_of(unit.name) is not None]


def choose_group(model: InputModel, target: Target, wanted: int | None) -> int:
    """The largest group size that divides the columns of all layers' matrices."""
    if wanted is not None:
        if wanted not in GROUP_SIZES:
            raise InvalidParams(f"group_size is {wanted}; give {', '.join(map(str, GROUP_SIZES))}.", "group_size")
        return wanted
    cols = [unit.shape[1] for unit in quantized_units(model, target)]
    for size in GROUP_SIZES:
        if all(each % size == 0 for each in cols):
            return size
    raise UnsupportedModel(
        f"The model has matrices of {min(cols):,} to {max(cols):,} columns, and groups of {GROUP_SIZES[-1]} do not "
        "divide all of them. Choose int8 or fp8, which have no groups."
    )


def make_scheme(model: InputModel, target: Target, group: int | None, feedback: bool) -> Scheme:
    native = model.native
    if target.is_gguf:
        needs: Needs = "nothing" if not target.calibrates else "moments" if feedback else "squares"
        return Blocks(native, gguf_types(model, target), needs)
    if target.kind == "gptq":
        assert group is not None
        return GPTQ(native, target.bits, group, symmetric=target.bits >= 4)
    if target.kind == "awq":
        assert group is not None
        return AWQ(native, group)
    if target.kind == "fp8":
        return Float8()
    if target.kind == "f16":
        return Half()
    if target.kind == "nf4":
        return NormalFloat(TORCH_TYPES[dense_type(model)])
    return PackedInts(native, 4 if target.kind == "int4" else 8, group)


def gguf_types(model: InputModel, target: Target) -> dict[str, GGMLType]:
    mix, config = MIXES[target.mix], model.config
    return {
        unit.key: type_of(
            mix, unit.name, layer_of(unit.name), model.num_layers, unit.shape[1], tied=config.tie_embeddings
        )
        for unit in quantized_units(model, target)
    }


def dense_type(model: InputModel) -> str:
    """The type of tensors that stay dense: that of the source's embedding, or float16 for a GGUF file."""
    if isinstance(model.checkpoint, SafetensorsCheckpoint):
        stored = model.checkpoint.files.tensors
        family = model.config.family
        kinds = [stored[name].dtype for name in stored if text_name(name, family) == "model.embed_tokens.weight"]
        return kinds[0] if kinds and kinds[0] in TORCH_TYPES else "F32"
    return "F16"


def directory_output(model: InputModel, path: Path, scheme: Scheme) -> DirectoryOutput:
    config = model.config
    if path.is_dir():
        document, files = copied_config(path), copied_files(path)
        rows = Rows(config.head_dim, None)
    else:
        tokenizer, files = made_files(path, config)
        document = made_config(config, tokenizer)
        rows = Rows.between(config, interleaved=False)
    for unit in model.all_units(by_head=False):
        directory_name(unit.part, config.family)  # refuses what a directory has no place for
    quantized = with_dense(scheme.config(), config.family, model.all_units(by_head=False))
    offset = 1.0 if config.norm_offset or config.family == "gemma3" else 0.0
    return DirectoryOutput(config.family, rows, dense_type(model), document | quantized, files, offset)


def with_dense(section: dict[str, Any], family: str, units: Sequence[Unit]) -> dict[str, Any]:
    """The quantization_config, with the names of the routers where readers of the format look for what is dense."""
    if not section:
        return {}
    names = [directory_name(unit.part, family).removesuffix(".weight") for unit in units if unit.is_router]
    if names:
        method = section["quant_method"]
        if method == "compressed-tensors":
            section = section | {"ignore": [*section["ignore"], *names]}
        elif method == "gptq":
            section = section | {"dynamic": {f"-:^{re.escape(name)}$": {} for name in names}}
        elif method == "awq":
            section = section | {"modules_to_not_convert": names}
        else:
            section = section | {"llm_int8_skip_modules": ["lm_head", *names]}
    return {"quantization_config": section}


def gguf_output(model: InputModel, path: Path, target: Target) -> GGUFOutput:
    config, mix = model.config, MIXES[target.mix]
    check_names(model)
    architecture = GGUF_ARCHITECTURES.get(config.family)
    more: dict[str, Tensor] = {}
    if isinstance(model.checkpoint, GGUFCheckpoint):
        file = model.checkpoint.file
        metadata = {key: file.raw_metadata(key) for key in file.metadata if key not in NOT_COPIED}
        used = {name for found in stored_parts(model) for name in found}
        for name, info in file.tensors.items():
            if name not in used and not (config.tie_embeddings and name == "output.weight"):
                more[name] = Tensor(info.type.name, info.shape, np.array(file.raw(name)))
        rows = Rows(config.head_dim, None)
    else:
        if architecture is None:
            raise UnsupportedModel(
                f"quire cannot write the metadata of a {config.family} model into a GGUF file. Choose a format of a "
                f"directory; GGUF files can be made of {', '.join(GGUF_ARCHITECTURES)}."
            )
        metadata, more = made_metadata(config, path, architecture), rope_tensors(config.rope)
        rows = Rows.between(config, interleaved=architecture == "llama")
    metadata |= {FILE_TYPE_KEY: entry(mix.number), "general.quantization_version": entry(2)}
    return GGUFOutput(f"model-{target.mix}.gguf", config.family, rows, metadata, more)


def check_names(model: InputModel) -> None:
    """A name that has no counterpart in GGUF files would be unreadable there."""
    parts = [unit.part for unit in model.all_units(by_head=True)] + model.source.vector_parts
    for name in [gguf_part(part, 0)[0].name for part in parts]:
        if not name.startswith("blk.") and gguf_name(name, model.config.family) == name:
            raise UnsupportedModel(
                f"{name} has no name in GGUF files that quire knows. Choose a format of a directory."
            )


def stored_parts(model: InputModel) -> list[dict[str, Any]]:
    parts: list[tuple[Any, int | None]] = [
        (part, matrix.cols) for matrix in model.source.matrices for part in matrix.parts
    ]
    parts += [(part, None) for part in model.source.vector_parts]
    return [model.checkpoint.find(part, cols).tensors for part, cols in parts]
