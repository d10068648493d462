"""Plain matrices as codes, while they are loaded onto a GPU: `--quantize`. Codes are the nearest ones."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from quire.quant.code_format import NF4
from quire.quant.tile_format import TileFormat
from quire.quant.tile_packing import TileRows

MAX_E4M3 = 448.0
NAMES = ("int8", "fp8", "nf4", "int4")


def round_rows(values: Tensor, format: TileFormat) -> TileRows:
    """The nearest codes of rows [rows, cols]."""
    values = values.float()
    groups = values.view(len(values), format.num_groups(values.shape[1]), -1)
    if format.has_zeros:
        return _round_with_zeros(groups, format)
    largest = groups.abs().amax(-1)
    if format.codes == "table":
        scales = largest.half()
        relative = groups / scales.float().clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
        middles = torch.tensor([(low + high) / 2 for low, high in pairwise(NF4)]).to(values.device)
        codes = torch.bucketize(relative, middles).to(torch.uint8)
        return TileRows(codes.view(len(values), -1), scales)
    top = MAX_E4M3 if format.codes == "e4m3" else 127.0
    scales = torch.where(largest > 0, largest / top, 1.0)
    relative = groups / scales.unsqueeze(-1)
    if format.codes == "e4m3":
        codes = relative.clamp(-top, top).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = (relative.round().clamp(-127, 127) + 128).to(torch.uint8)
    return TileRows(codes.view(len(values), -1), scales)


def _round_with_zeros(groups: Tensor, format: TileFormat) -> TileRows:
    top = float((1 << format.bits) - 1)
    low, high = groups.amin(-1).clamp_max(0.0), groups.amax(-1).clamp_min(0.0)
    scales = torch.where(high > low, (high - low) / top, 1.0).half().float()
    scales = torch.where(scales > 0, scales, 1.0)  # float16 has no smaller numbers
    zeros = (-low / scales).round().clamp(0, top)
    codes = ((groups / scales.unsqueeze(-1)).round() + zeros.unsqueeze(-1)).clamp(0, top).to(torch.uint8)
    return TileRows(codes.view(len(groups), -1), scales, zeros.to(torch.uint8))
