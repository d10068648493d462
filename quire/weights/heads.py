"""Draft heads in files: a directory with `config.json` and safetensors. `engine/heads.py` runs what is loaded here.

quire's own heads have `"quire_head": 1` and name the target that they were trained for by a digest. Heads in published
layouts have none: their sizes and vocabulary are checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.errors import BadModelFile, UnsupportedModel
from quire.kernels import Kernels
from quire.layers.source import Part, Shape, Source
from quire.models.block_head import BlockHead, BlockHeadConfig
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder
from quire.models.medusa import Medusa, MedusaConfig
from quire.weights.fields import Fields, read_json
from quire.weights.loader import open_source
from quire.weights.names import may_stay_unread
from quire.weights.safetensors import SINGLE, SafetensorsFiles
from quire.weights.safetensors_checkpoint import DensePart, SafetensorsCheckpoint
from quire.weights.survey import Survey, check

MAX_DEPTH = 32  # drafts of a head
MAX_HEAD_LAYERS = 8
MAX_RANK = 4096
MEDUSA_FILE = "medusa_lm_head.safetensors"  # of published Medusa heads
DIGEST_STRIDE = 1000  # rows of the embedding from one that is part of the digest to the next
INTEGERS = ("I64", "I32")
METHODS = {"exit": "self"}  # kinds of heads that have another name in `speculate`

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a head drafts for."""

    model: Decoder
    config: ModelConfig


@dataclass(frozen=True, slots=True)
class Bigram:
    """Two vectors for each id of the draft vocabulary, [ids, rank]. Their product is added to the logit of `after`, if
    `before` is the token before it."""

    before: Floats
    after: Floats


@dataclass(frozen=True, slots=True)
class LoadedBlockHead:
    head: BlockHead
    slots: Floats  # [depth, hidden_size]
    draft_ids: Ids
    bigram: Bigram | None


@dataclass(frozen=True, slots=True)
class LoadedMedusa:
    heads: Medusa
    draft_ids: Ids | None  # None: the heads have output matrices of the whole vocabulary


def load_block_head(directory: Path, target: Target, ops: Kernels) -> LoadedBlockHead:
    fields = read_head_config(directory, "block", target)
    files = SafetensorsFiles(directory)
    config = read_block_config(fields, target.config)
    num_ids = count_rows(files, "draft_ids")
    rank = read_rank(fields, files)
    extra: dict[str, Shape] = {
        "draft_ids": (num_ids,),
        "slots.weight": (config.depth, target.config.hidden_size),
    }
    if rank:
        extra |= {"bigram_in.weight": (num_ids, rank), "bigram_out.weight": (num_ids, rank)}
    head = build_head(files, lambda source: BlockHead(config, source, ops, target.model), ops, extra)
    bigram = Bigram(read_matrix(files, "bigram_in.weight"), read_matrix(files, "bigram_out.weight")) if rank else None
    draft_ids = read_draft_ids(files, fields, target.config.vocab_size)
    return LoadedBlockHead(head, read_matrix(files, "slots.weight"), draft_ids, bigram)


def load_medusa(directory: Path, target: Target, ops: Kernels) -> LoadedMedusa:
    """A Medusa of quire's own layout or of the published one."""
    fields = read_head_config(directory, "medusa", target)
    if not fields.has("quire_head"):
        check_sizes(fields, target.config)
    published = not (directory / SINGLE).exists() and (directory / MEDUSA_FILE).exists()
    files = SafetensorsFiles(directory, MEDUSA_FILE if published else SINGLE)
    has_ids = "draft_ids" in files.tensors
    config = MedusaConfig(
        fields.count("medusa_num_heads", fields.get("depth"), most=MAX_DEPTH),
        fields.count("medusa_num_layers", 1, most=MAX_HEAD_LAYERS),
        has_own_outputs=not has_ids,
    )
    extra: dict[str, Shape] = {"draft_ids": (count_rows(files, "draft_ids"),)} if has_ids else {}
    heads = build_head(files, lambda source: Medusa(config, source, ops, target.model), ops, extra)
    return LoadedMedusa(heads, read_draft_ids(files, fields, target.config.vocab_size) if has_ids else None)


def read_head_config(directory: Path, kind: str, target: Target) -> Fields:
    """The configuration of a head of that kind. It must be made for this target, if it is one of quire's own."""
    path = directory / "config.json"
    fields = Fields(read_json(path), str(path))
    if not fields.has("quire_head"):
        if kind == "block":
            raise fields.bad("quire_head is missing, so this is no head that quire train-draft has made")
        return fields
    if (version := fields.count("quire_head")) != 1:
        raise fields.unsupported(f"quire_head is {version}; this quire reads version 1. Update quire.")
    if (found := fields.text("kind")) != kind:
        given, wanted = (METHODS.get(each, each) for each in (kind, found))
        raise fields.unsupported(f"it is a head of kind {found!r}; give it as {wanted}:DIR instead of {given}:DIR.")
    described = fields.section("target")
    if described is None:
        raise fields.bad("target is missing")
    check_sizes(described, target.config)
    digest, own = described.text("digest"), target_digest(target.model)
    if digest != own:
        raise UnsupportedModel(
            f"{directory} was trained for another model: its target has the digest {digest}, this model has {own}. "
            "Name a head of this model, in this format and quantization, or train one with quire train-draft."
        )
    return fields


def check_sizes(fields: Fields, config: ModelConfig) -> None:
    """Sizes of the target that the file gives must be those of the model."""
    for key, names in {
        "hidden_size": ("hidden_size",),
        "vocab_size": ("vocab_size",),
        "num_layers": ("num_layers", "num_hidden_layers"),
    }.items():
        for name in names:
            size = getattr(config, key)
            if fields.has(name) and fields.count(name) != size:
                raise fields.unsupported(
                    f"{name} is {fields.count(name):,}, and the model has {size:,}. Name a head of this model."
                )


def target_digest(model: Decoder) -> str:
    """Identifies the weights of a model: sha256 over its sizes, its last norm, and some rows of its embedding.

    Numbers are rounded to bfloat16, so a model has the same digest in float32 on a CPU and in bfloat16 on a GPU.
    """
    vocab_size, hidden_size = model.embedding.weight.shape
    attention = model.layers[0].attention
    sizes = {
        "head_dim": attention.head_dim,
        "hidden_size": hidden_size,
        "num_heads": attention.heads[0],
        "num_kv_heads": attention.heads[1],
        "num_layers": len(model.layers),
        "vocab_size": vocab_size,
    }
    digest = hashlib.sha256(json.dumps(sizes, sort_keys=True).encode())
    index = model.head.ops.arrays.put(range(0, vocab_size, DIGEST_STRIDE), "int64")
    for values in (model.norm.weight, model.embedding.weight.rows(index)):
        digest.update(round_to_bfloat16(as_floats(values)).tobytes())
    return digest.hexdigest()


def round_to_bfloat16(values: Floats) -> NDArray[np.uint16]:
    """To the nearest, halves to even, as torch rounds. The upper half of each float32."""
    bits, half = np.ascontiguousarray(values).view(np.uint32), np.uint32(16)
    is_odd = (bits >> half) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + is_odd) >> half).astype(np.uint16)


def as_floats(values: Any) -> Floats:
    """A numpy array or a torch tensor as float32 on the host."""
    return np.asarray(values if isinstance(values, np.ndarray) else values.detach().float().cpu(), np.float32)


def read_block_config(fields: Fields, target: ModelConfig) -> BlockHeadConfig:
    tap_layers = read_layers(fields, "tap_layers", target, 2, 2)
    if list(tap_layers) != sorted(set(tap_layers)):
        raise fields.bad(f"tap_layers is {list(tap_layers)}, and must be ascending")
    kv_layers = read_layers(fields, "kv_layers", target, 1, 2)
    for layer in kv_layers:
        if target.windows[layer] == 1:
            raise fields.unsupported(f"layer {layer} of the model has a window of 1 token, so a head cannot read it.")
    return BlockHeadConfig(
        depth=fields.count("depth", most=MAX_DEPTH),
        tap_layers=tap_layers,
        kv_layers=kv_layers,
        intermediate_size=fields.count("intermediate_size", most=1 << 20),
        norm_eps=fields.number("rms_norm_eps"),
    )


def read_layers(fields: Fields, key: str, target: ModelConfig, least: int, most: int) -> tuple[int, ...]:
    layers = fields.get(key)
    is_list = isinstance(layers, list) and least <= len(layers) <= most
    if not is_list or any(type(layer) is not int or not 0 <= layer < target.num_layers for layer in layers):
        wanted = f"{least}" if least == most else f"{least} to {most}"
        raise fields.bad(
            f"{key} is {layers!r}, and must be a list of {wanted} layers from 0 to {target.num_layers - 1}"
        )
    return tuple(layers)


def read_rank(fields: Fields, files: SafetensorsFiles) -> int:
    """The rank of the bigram matrices. Without them it is 0."""
    stored = files.tensors.get("bigram_in.weight")
    rank = stored.shape[-1] if stored is not None and len(stored.shape) == 2 else 0
    return fields.count("bigram_rank", rank, least=0, most=MAX_RANK)


def count_rows(files: SafetensorsFiles, name: str) -> int:
    stored = files.tensors.get(name)
    return stored.shape[0] if stored is not None and stored.shape else 0


def read_draft_ids(files: SafetensorsFiles, fields: Fields, vocab_size: int) -> Ids:
    ids = np.array(files.read("draft_ids", INTEGERS), np.int64)
    if not len(ids) or ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) != len(ids):
        raise fields.bad(f"draft_ids must be different token ids from 0 to {vocab_size - 1:,}, at least one")
    return ids


def read_matrix(files: SafetensorsFiles, name: str) -> Floats:
    rows, cols = files.tensors[name].shape
    values = DensePart(files, name, Part(name, rows), cols).unpack_floats()
    if not np.isfinite(values).all():
        raise BadModelFile(f"{name} in {files.directory} has values that are not finite numbers. Train the head again.")
    return values


def build_head(
    files: SafetensorsFiles,
    make: Callable[[Source], T],
    ops: Kernels,
    extra: Mapping[str, Shape],
    dtype: str = "float32",
    prefix: str = "",
) -> T:
    """Check the tensors that `make` declares, and `extra`, then make the head.

    Its tensors are those whose names begin with `prefix`. Matrices for quire's own CPU kernels are in int8, others in
    `dtype`.
    """
    declared = Survey()
    make(declared)
    checkpoint = SafetensorsCheckpoint(files)
    expected = dict(extra)
    for part, cols in declared.declared:
        expected.update(checkpoint.find(part, cols).tensors)
    available = {name: shape for name, shape in checkpoint.shapes.items() if name.startswith(prefix)}
    ignored = {name for name in available if may_stay_unread(name, tied=False)} if not prefix else ()
    check(expected, available, ignored)
    try:
        with open_source(checkpoint, dtype, ops, quantize="int8" if ops.native is not None else None) as source:
            return make(source)
    except ValueError as error:
        raise BadModelFile(
            f"The head in {files.directory} cannot be quantized to int8: {error} Train the head again."
        ) from None
