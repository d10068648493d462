"""`quire info`: this machine's CPU and kernels, and a model's configuration. No weights are loaded."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quire.cli.options import add_json, add_model
from quire.config import DEFAULT_MODEL
from quire.errors import ModelNotFound, UnsupportedModel
from quire.kernels import isa
from quire.kernels.cpu import native
from quire.models.config import ModelConfig
from quire.store import resolve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_json(parser)
    parser.add_argument("--matrices", action="store_true", help="list what each matrix becomes on quire's own kernels")


def run(arguments: argparse.Namespace) -> None:
    """Describe this machine and a model, without loading it."""
    document = {"machine": machine(), "model": describe_model(arguments.model)}
    matrices = list_matrices(arguments.model) if arguments.matrices else None
    if arguments.json:
        print(json.dumps(document if matrices is None else document | {"matrices": matrices}))
        return
    for title, facts in document.items():
        print(title)
        for name, value in facts.items():
            print(f"  {name.replace('_', ' '):<20} {readable(value)}")
    for row in matrices or ():
        print(describe_matrix(row))


def list_matrices(name: str) -> list[dict[str, Any]]:
    found = native.find(isa.prepare())
    if isinstance(found, native.Missing):
        raise UnsupportedModel(f"--matrices describes quire's own kernels: {found.reason}. Leave it out.")
    from quire.weights.matrices import describe_matrices

    return describe_matrices(resolve(name, pull=False).path, found)


def describe_matrix(row: dict[str, Any]) -> str:
    rows, cols = row["shape"]
    return (
        f"{row['name']:<48} {rows:>7} x {cols:<6} {row['panels']:<12} {row['bytes']:>13,} bytes"
        f" ({row['file_bytes']:,} in the file), times {row['activations']};"
        f" on a GPU {row['gpu']}, {row['gpu_bytes']:,} bytes"
    )


def machine() -> dict[str, Any]:
    """The CPU's instruction sets, whether AMX really runs, and the kernels in use."""
    cpu = isa.prepare()
    return {
        "cpu": cpu.model,
        "cores": cpu.cores,
        "instructions": sorted(cpu.flags),
        "amx": cpu.amx.status.value,
        "amx_detail": cpu.amx.detail,
        "onednn_limit": isa.onednn_limit(cpu),
        "kernels": describe_kernels(cpu),
    }


def describe_kernels(cpu: isa.CPU) -> str:
    """quire's own kernels with their instruction set, or torch's with the reason."""
    found = native.find(cpu)
    if isinstance(found, native.Missing):
        return f"torch's, if it is installed: {found.reason}"
    return f"own, {found.isa} on {found.threads} threads"


def packed_bytes(path: Path) -> int | None:
    """Bytes of a GGUF file's weights when they are packed for quire's own kernels; None without these kernels."""
    module = native.load()
    if isinstance(module, native.Missing) or path.suffix != ".gguf":
        return None
    from quire.quant.ggml_types import PANEL_FORMATS
    from quire.weights.gguf import GGUFFile

    total = 0
    with GGUFFile(path) as file:
        for info in file.tensors.values():
            if len(info.shape) == 2:
                total += module.Panels(PANEL_FORMATS.get(info.type, "f32"), info.rows, info.cols).nbytes
            else:
                total += 4 * info.rows * info.cols
    return total


def describe_model(name: str) -> dict[str, Any]:
    try:
        files = resolve(name, pull=False)
    except ModelNotFound as error:
        if name != DEFAULT_MODEL:
            raise
        return {"name": name, "status": str(error)}
    from quire.weights.config import read_config  # imported here because it loads numpy

    config = read_config(files.path)
    windows = sorted({window for window in config.windows if window is not None})
    return {
        "name": name,
        "path": str(files.path),
        "file_bytes": files.size_bytes,
        "packed_bytes": packed_bytes(files.path),
        "family": config.family,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "context": config.max_len,
        "windows": windows,
        "rope": asdict(config.rope) if config.structure.rotates else None,
        "positions": config.structure.positions,
        "sampling": config.sampling.as_params(),
        "sampling_from": "the model" if config.sampling.from_model else "quire, because the model sets none",
        "cache_bytes_per_token_float32": 4 * cached_dims(config),
    }


def cached_dims(config: ModelConfig) -> int:
    """Of a token's keys and values, in all layers. quire's CPU kernels store the values of a latent, which are a part
    of it, once more."""
    if config.latent is not None:
        return config.num_layers * (config.head_dim + config.latent.rank)
    heads = [config.layer_heads(layer) for layer in range(config.num_stored_layers)]
    return sum(2 * num_kv_heads * head_dim for num_kv_heads, head_dim in heads)


def readable(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items() if item is not None)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
