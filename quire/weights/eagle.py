"""EAGLE heads in files: the published layouts of EAGLE 1, 2 and 3, and quire's own, which `quire train-draft` writes.

`heads.py` has what all heads share. The layout is told by the tensors: EAGLE 3 has a `hidden_norm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quire.errors import UnsupportedModel
from quire.kernels import Kernels
from quire.layers.source import Part, Shape, Source
from quire.models.config import ModelConfig
from quire.models.eagle import Eagle, EagleConfig
from quire.models.rope import rotary_table
from quire.quant.weight import Weight
from quire.weights.fields import Fields, check_heads, default_head_dim
from quire.weights.heads import (
    INTEGERS,
    MAX_HEAD_LAYERS,
    Ids,
    Target,
    build_head,
    count_rows,
    read_draft_ids,
    read_head_config,
    read_layers,
)
from quire.weights.rope import rope_from_json
from quire.weights.safetensors import INDEX, SINGLE, SafetensorsFiles

PICKLED = "pytorch_model.bin"
MAX_POSITIONS = "max_position_embeddings"
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class LoadedEagle:
    """A head and its output.

    draft_ids   token ids of the output's rows; None: all of the vocabulary
    output      a matrix of its own, [draft_ids, hidden_size]; None: rows of the target's head
    """

    head: Eagle
    draft_ids: Ids | None
    output: Weight | None


def load_eagle(directory: Path, target: Target, ops: Kernels, dtype: str = "float32") -> LoadedEagle:
    fields = read_eagle_config(directory, target)
    files = open_files(directory)
    config = read_layer_config(fields, files, target.config)
    rope = rope_from_json(fields, head_dim=config.head_dim, max_len=fields.count(MAX_POSITIONS, target.config.max_len))
    rotary = rotary_table(rope, target.config.max_len, ops.arrays)
    num_outputs = count_rows(files, "lm_head.weight")

    def make(source: Source) -> tuple[Eagle, Weight | None]:
        head = Eagle(config, source, ops, target.model.embedding, rotary)
        output = source.matrix([Part("lm_head.weight", num_outputs)], config.hidden_size) if num_outputs else None
        return head, output

    ids_tensors = {"draft_ids", "d2t"} & files.tensors.keys()
    extra: dict[str, Shape] = {name: (count_rows(files, name),) for name in ids_tensors}
    if "t2d" in files.tensors:
        extra["t2d"] = (target.config.vocab_size,)
    head, output = build_head(files, make, ops, extra, dtype)
    draft_ids = read_output_ids(fields, files, target.config.vocab_size)
    check_output(fields, config, target.config, output, draft_ids)
    return LoadedEagle(head, draft_ids, output)


def open_files(directory: Path) -> SafetensorsFiles:
    has_safetensors = (directory / SINGLE).exists() or (directory / INDEX).exists()
    if not has_safetensors and (directory / PICKLED).exists():
        raise UnsupportedModel(
            f"{directory} has {PICKLED} only. It is a pickle, which can run any code while it is read, so quire does "
            f"not read it. Convert it to {SINGLE}."
        )
    return SafetensorsFiles(directory)


def read_eagle_config(directory: Path, target: Target) -> Fields:
    """The configuration, which must be for this target. Some published ones have the layer's sizes in a section."""
    fields = read_head_config(directory, "eagle", target)
    if fields.has("quire_head"):
        return fields
    if (section := fields.section("transformer_layer_config")) is not None:
        given = {key: value for key, value in fields.values.items() if value is not None}
        fields = Fields({**section.values, **given}, fields.where)
    check_target(fields, target.config)
    check_options(fields)
    return fields


def check_target(fields: Fields, target: ModelConfig) -> None:
    key = "target_hidden_size" if fields.has("target_hidden_size") else "hidden_size"
    for name, size in ((key, target.hidden_size), ("vocab_size", target.vocab_size)):
        if (found := fields.count(name)) != size:
            raise fields.unsupported(
                f"{name} is {found:,}, and the model has {size:,}. Name a head that was trained for this model."
            )


def check_options(fields: Fields) -> None:
    """Refuse variants that would compute something else."""
    if (num_layers := fields.count("num_hidden_layers", 1)) != 1:
        raise fields.unsupported(f"the head has {num_layers} layers; quire runs EAGLE heads of one layer.")
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise fields.unsupported(f"hidden_act {activation!r} is not supported in a head; quire has silu.")
    for name in ("norm_before_fc", "fc_norm", "norm_output", "parallel_drafting"):
        if fields.has(name) and fields.flag(name, False):
            raise fields.unsupported(f"{name} is set, which quire does not support in a head.")
    eagle = fields.section("eagle_config")
    if eagle is not None and not eagle.flag("use_aux_hidden_state", True):
        raise fields.unsupported("use_aux_hidden_state is false, which quire does not support in a head.")


def read_layer_config(fields: Fields, files: SafetensorsFiles, target: ModelConfig) -> EagleConfig:
    has_midlayer = any(name.startswith("midlayer.") for name in files.tensors)
    layer = "midlayer" if has_midlayer else "layers.0"
    is_own = fields.has("quire_head")
    is_eagle3 = is_own or f"{layer}.hidden_norm.weight" in files.tensors
    hidden_size = target.hidden_size if is_own else fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    head_dim = fields.count("head_dim", default_head_dim(hidden_size, num_heads))
    return EagleConfig(
        kind="eagle3" if is_eagle3 else "eagle",
        layer=layer,
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size", most=1 << 20),
        num_heads=num_heads,
        num_kv_heads=check_heads(fields, num_heads, fields.count("num_key_value_heads", num_heads)),
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tap_layers=read_tap_layers(fields, target) if is_eagle3 else (),
        target_hidden_size=target.hidden_size,
        attention_bias=f"{layer}.self_attn.q_proj.bias" in files.tensors,
        join_bias="fc.bias" in files.tensors,
        norm_residual=fields.flag("norm_before_residual", False),
        window=find_window(target.windows),
        own_embedding="embed_tokens.weight" in files.tensors,
    )


def find_window(windows: Sequence[int | None]) -> int | None:
    """The head sees as far as the layer of the target that sees farthest, so it needs no blocks that are freed."""
    widest = [window for window in windows if window is not None]
    return max(widest) if len(widest) == len(windows) else None


def read_tap_layers(fields: Fields, target: ModelConfig) -> tuple[int, ...]:
    """The tapped layers; an index means the state after the layer.

    Published heads count in two ways. Ids in `eagle_config` mean the state after the layer. Those at the top level, and
    the default (2, n / 2, n - 3) of heads that give none, mean the state before it.
    """
    if fields.has("quire_head"):
        return read_layers(fields, "tap_layers", target, 1, MAX_HEAD_LAYERS)
    section = fields.section("eagle_config")
    if section is not None and section.has(AUX_LAYERS):
        return read_layers(section, AUX_LAYERS, target, 3, 3)
    num_layers = target.num_layers
    given = fields.get(AUX_LAYERS) if fields.has(AUX_LAYERS) else [2, num_layers // 2, num_layers - 3]
    if not isinstance(given, list) or len(given) != 3 or any(type(layer) is not int for layer in given):
        raise fields.bad(f"{AUX_LAYERS} is {given!r}, and must be a list of 3 layers")
    if not all(1 <= layer <= num_layers for layer in given):
        raise fields.unsupported(
            f"it reads the states before the layers {given}, and they must be from 1 to {num_layers} in this model. "
            "Name a head that was trained for this model."
        )
    return tuple(layer - 1 for layer in given)


def read_output_ids(fields: Fields, files: SafetensorsFiles, vocab_size: int) -> Ids | None:
    """The token ids of the output's rows, from `draft_ids`, or from `d2t`: id - row."""
    if "draft_ids" in files.tensors:
        return read_draft_ids(files, fields, vocab_size)
    if "d2t" not in files.tensors:
        return None
    offsets = np.array(files.read("d2t", INTEGERS), np.int64)
    ids = offsets + np.arange(len(offsets))
    if not len(ids) or ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) != len(ids):
        raise fields.bad(f"d2t must lead to different token ids from 0 to {vocab_size - 1:,}, at least one")
    if "t2d" in files.tensors:
        is_drafted = np.array(files.read("t2d", ("BOOL",)))
        if not is_drafted[ids].all() or is_drafted.sum() != len(ids):
            raise fields.bad("t2d and d2t name different token ids")
    return ids


def check_output(
    fields: Fields, config: EagleConfig, target: ModelConfig, output: Weight | None, draft_ids: Ids | None
) -> None:
    num_ids = target.vocab_size if draft_ids is None else len(draft_ids)
    if output is not None and output.shape[0] != num_ids:
        raise fields.bad(f"lm_head.weight has {output.shape[0]:,} rows for {num_ids:,} token ids")
    if config.hidden_size != target.hidden_size and (output is None or not config.own_embedding):
        raise fields.unsupported(
            f"hidden_size is {config.hidden_size}, and that of the model is {target.hidden_size}, so the head needs an "
            "embedding and an output matrix of its own."
        )
