"""Where files store the experts of a mixture. Layers declare one part for each matrix of each expert.

A canonical name is "model.layers.0.mlp.experts.3.gate_proj.weight". Checkpoints call `safetensors_part` or
`gguf_part`; parts that are not of an expert are returned unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import replace

from quire.layers.source import Part

EXPERT = re.compile(r"(model\.layers\.(\d+)\.mlp\.)experts\.\d+\.(gate|up|down)_proj\.(weight|bias)")

HEADS = re.compile(r"model\.layers\.(\d+)\.self_attn\.kv_b_proj\.weight")


def is_head(part: Part) -> bool:
    """Whether it is the keys or the values of a head in latent attention."""
    return HEADS.fullmatch(part.name) is not None


MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


def safetensors_part(part: Part, family: str) -> Part:
    match = EXPERT.fullmatch(part.name)
    if match is None or part.expert is None:
        return part
    prefix, _, matrix, kind = match.groups()
    if family == "mixtral":
        moe = prefix.replace(".mlp.", ".block_sparse_moe.")
        return replace(part, name=f"{moe}experts.{part.expert[0]}.{MIXTRAL[matrix]}.{kind}")
    if family == "gpt_oss":
        return _gpt_oss_part(part, prefix, matrix, kind)
    if family == "granitemoe":
        moe = prefix.replace(".mlp.", ".block_sparse_moe.")
        return _stacked_part(part, matrix, f"{moe}input_linear.weight", f"{moe}output_linear.weight")
    if family == "gemma4":
        moe = prefix.replace(".mlp.", ".experts.")
        return _stacked_part(part, matrix, f"{moe}gate_up_proj", f"{moe}down_proj")
    return part


def _stacked_part(part: Part, matrix: str, gate_up: str, down: str) -> Part:
    """All experts in two tensors: gate and up [experts, 2 * size, hidden], and down [experts, hidden, size]."""
    if matrix == "down":
        return replace(part, name=down, stacked=True)
    offset = part.rows if matrix == "up" else 0
    return replace(part, name=gate_up, offset=offset, fused_rows=2 * part.rows, stacked=True)


def _gpt_oss_part(part: Part, prefix: str, matrix: str, kind: str) -> Part:
    """All experts in two tensors, transposed: gate and up row by row [experts, hidden, 2 * size], and down."""
    transposed = kind == "weight"
    name = f"{prefix}experts.{'down' if matrix == 'down' else 'gate_up'}_proj" + ("" if transposed else "_bias")
    part = replace(part, name=name, transposed=transposed, stacked=True)
    if matrix == "down":
        return part
    return replace(part, order=(range(matrix == "up", 2 * part.rows, 2),), fused_rows=2 * part.rows)


def gguf_part(part: Part, cols: int | None, names: Container[str] = ()) -> tuple[Part, int | None]:
    """The part and its columns. All experts of a layer are in three tensors, such as ffn_gate_exps [experts, size,
    hidden], or in two, with gate and up in one; `names` are the tensors of the file. Latent attention's projections are
    in two, attn_k_b [heads, rank, key_dim] and attn_v_b."""
    if part.expert is None:
        return part, cols
    if match := EXPERT.fullmatch(part.name):
        _, layer, matrix, kind = match.groups()
        gate_up, down = (f"blk.{layer}.ffn_{each}_exps.{kind}" for each in ("gate_up", "down"))
        if gate_up in names:
            return _stacked_part(part, matrix, gate_up, down), cols
        return replace(part, name=f"blk.{layer}.ffn_{matrix}_exps.{kind}", stacked=True), cols
    if match := HEADS.fullmatch(part.name):
        alone = replace(part, offset=0, fused_rows=None, columns=None, stacked=True)
        is_key = part.columns is not None
        name = f"blk.{match[1]}.attn_{'k' if is_key else 'v'}_b.weight"
        return replace(alone, name=name), part.width(cols or 0) if is_key else cols
    return part, cols
