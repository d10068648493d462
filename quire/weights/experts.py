"""Where files store the experts of a mixture. Layers declare one part for each matrix of each expert.

A canonical name is "model.layers.0.mlp.experts.3.gate_proj.weight". Checkpoints call `safetensors_part` or
`gguf_part`; parts that are not of an expert are returned unchanged.
"""

from __future__ import annotations

import re
from dataclasses import replace

from quire.layers.source import Part

EXPERT = re.compile(r"(model\.layers\.(\d+)\.mlp\.)experts\.\d+\.(gate|up|down)_proj\.(weight|bias)")

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
        return _granite_part(part, prefix.replace(".mlp.", ".block_sparse_moe."), matrix)
    return part


def _granite_part(part: Part, prefix: str, matrix: str) -> Part:
    """All experts in two tensors: gate and up [experts, 2 * size, hidden], and down [experts, hidden, size]."""
    if matrix == "down":
        return replace(part, name=f"{prefix}output_linear.weight", stacked=True)
    offset = part.rows if matrix == "up" else 0
    name = f"{prefix}input_linear.weight"
    return replace(part, name=name, offset=offset, fused_rows=2 * part.rows, stacked=True)


def _gpt_oss_part(part: Part, prefix: str, matrix: str, kind: str) -> Part:
    """All experts in two tensors, transposed: gate and up row by row [experts, hidden, 2 * size], and down."""
    transposed = kind == "weight"
    name = f"{prefix}experts.{'down' if matrix == 'down' else 'gate_up'}_proj" + ("" if transposed else "_bias")
    part = replace(part, name=name, transposed=transposed, stacked=True)
    if matrix == "down":
        return part
    return replace(part, order=(range(matrix == "up", 2 * part.rows, 2),), fused_rows=2 * part.rows)


def gguf_part(part: Part) -> Part:
    """All experts of a layer in three tensors, such as ffn_gate_exps [experts, size, hidden]."""
    match = EXPERT.fullmatch(part.name)
    if match is None or part.expert is None:
        return part
    _, layer, matrix, kind = match.groups()
    return replace(part, name=f"blk.{layer}.ffn_{matrix}_exps.{kind}", stacked=True)
